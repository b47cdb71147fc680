"""State of a compiled graph: inputs that persist between runs, and outputs that update them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from strata.backends import DeviceArray, Executable
from strata.core import TensorType, here
from strata.errors import OptionError, ShapeError, UnknownNameError
from strata.kinds import whole_number
from strata.lir import Lir
from strata.mir import near, some_of
from strata.runtime.execute.foreign import read_param


class GraphState:
    """Kept values by input name, in the memory of the program's device. The owner holds a lock while it is used."""

    def __init__(
        self, lir: Lir, inputs: Mapping[str, TensorType], outputs: Sequence[TensorType], executable: Executable
    ) -> None:
        self._lir, self._inputs, self._outputs, self._executable = lir, inputs, outputs, executable
        self.values: dict[str, Any] = {}
        self._feeds: dict[str, int] = {}  # by input, the output that it takes its next value from
        self._in_place: dict[str, int] = {}  # by input whose output the plan makes by changing it, the input's place

    @property
    def is_used(self) -> bool:
        return bool(self.values or self._feeds)

    def bind(self, name: str, value: Any) -> None:
        kind = self._kind(name)
        if value is None:
            self.values.pop(name, None)
            return
        home = self._executable.home
        array = read_param(name, kind, value, home)
        if home is not None and not isinstance(array, DeviceArray):
            self.values[name] = home.upload(array, self._lir.name)
        else:
            self.values[name] = array.copy()  # runs may change it in place

    def read(self, name: str) -> np.ndarray:
        self._kind(name)
        if name not in self.values:
            raise UnknownNameError(f"input {name!r} has no kept value: use bind", code="N401", place=here())
        return np.array(self.values[name])

    def feed(self, name: str, output: int | None) -> None:
        kind = self._kind(name)
        if output is None:
            self._feeds.pop(name, None)
            self._in_place.pop(name, None)
            return
        at = whole_number(output)
        if at is None or not 0 <= at < len(self._outputs):
            raise OptionError(
                f"there is no output {output!r}: {self._lir.name!r} has {len(self._outputs)}", code="O401", place=here()
            )
        made = self._outputs[at]
        if made.dtype is not kind.dtype or not _can_follow(kind, made):
            raise ShapeError(
                f"input {name!r} is {kind}, which output {output} : {made} cannot become", code="S401", place=here()
            )
        self._feeds[name] = at
        self._in_place.pop(name, None)
        is_device = self._executable.home is not None
        may = self._executable.takes_over(name, at) if is_device else updates_in_place(self._lir, name, at)
        if made == kind and may:
            self._in_place[name] = list(self._inputs).index(name)

    def is_fed(self, output: int) -> bool:
        """Whether an output becomes the kept value of an input."""
        return output in self._feeds.values()

    def over(self, arrays: Sequence[Any]) -> dict[int, Any]:
        """Outputs that go where a kept value is, by number."""
        return {
            self._feeds[name]: arrays[at] for name, at in self._in_place.items() if self.values.get(name) is arrays[at]
        }

    def place(self, arrays: Sequence[np.ndarray], outputs: list[np.ndarray]) -> list[np.ndarray]:
        """The arrays to write: outputs that the plan makes by changing a kept value go where that value is."""
        for name, at in self._in_place.items():
            kept = self.values.get(name)
            if kept is arrays[at]:  # not where the caller gave his own array for this run
                outputs[self._feeds[name]] = kept
        return outputs

    def take(self, outputs: list[Any]) -> tuple[Any, ...]:
        """After a run: what is fed back becomes the kept value. Returns what the caller gets."""
        given = list(outputs)
        for name, i in self._feeds.items():
            if given[i] is not outputs[i]:  # it feeds another input, too
                self.values[name] = outputs[i].copy()
                continue
            self.values[name] = outputs[i]
            if isinstance(outputs[i], DeviceArray):
                continue
            view = outputs[i].view()
            view.flags.writeable = False
            given[i] = view
        return tuple(given)

    def copy_from(self, outputs: Sequence[np.ndarray]) -> None:
        """After a run into arrays of the caller: what is fed back is copied from them."""
        for name, i in self._feeds.items():
            home = self._executable.home
            self.values[name] = outputs[i].copy() if home is None else home.upload(outputs[i], self._lir.name)

    def copy(self) -> GraphState:
        made = GraphState(self._lir, self._inputs, self._outputs, self._executable)
        made.values = {name: a.copy() for name, a in self.values.items()}
        made._feeds, made._in_place = dict(self._feeds), dict(self._in_place)
        return made

    def _kind(self, name: str) -> TensorType:
        if name not in self._inputs:
            raise UnknownNameError(
                f"{self._lir.name!r} has no input {name!r}; it has {some_of(self._inputs)}{near(name, self._inputs)}",
                code="N112",
                place=here(),
            )
        return self._inputs[name]


def _can_follow(kind: TensorType, made: TensorType) -> bool:
    """Whether an output's type fits an input's: sizes that are symbolic in the input may change from run to run."""
    return kind.ndim == made.ndim and all(
        not isinstance(a, int) or a == b for a, b in zip(kind.shape, made.shape, strict=True)
    )


def updates_in_place(lir: Lir, name: str, output: int) -> bool:
    """Whether an output is made by changing an input that nothing reads afterwards, so that both may be one array."""
    source, result = dict(lir.io.inputs)[name], lir.io.outputs[output]
    at = next((i for i, s in enumerate(lir.schedule) if (result, source) in s.updates), None)
    if at is None or lir.io.outputs.count(result) != 1:
        return False
    readers = [i for i, s in enumerate(lir.schedule) if source in s.inputs or (i != at and source in s.read_buffers)]
    return source not in lir.io.outputs and all(i < at for i in readers)
