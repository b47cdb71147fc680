"""What a backend is to the runtime: it says what it takes, and turns a plan into something that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from strata.core import Target, TensorType
from strata.lir import Lir
from strata.mir import Node, Op


class Executable(Protocol):
    """A compiled plan. Safe to run from many threads at once."""

    lir: Lir

    @property
    def host_steps(self) -> Sequence[str]:
        """Ops that run in Python: reports name them, so that none is a surprise."""

    def set_param(self, name: str, array: Any) -> None:
        """Take a parameter's value: kept (and packed where kernels want it packed) until it is set again."""

    def clone(self) -> Executable:
        """Another with the same code and parameters: what is set on one of them later is not seen by the other."""

    def run(
        self, inputs: Sequence[Any], outputs: Sequence[Any], binding: Mapping[str, int], threads: int | None
    ) -> None:
        """Fill the output arrays. Inputs are in the order of the plan's io, contiguous and of the declared types."""


class Quick(Protocol):
    """Optional part of an executable, its `quick`: a short way into a plan of fixed sizes that runs again and again."""

    @property
    def asked(self) -> int | None:
        """The number of threads that `enter` is for; None for the default, another number while there is no entry."""

    @property
    def enter(self) -> Callable[[Any], tuple[Any, ...] | None]:
        """Takes a dict, or a list in the order of the plan's io, or a tuple of either and a list of arrays for the
        results; gives the results, or None where the caller has to go the long way."""

    def wants(self, asked: int | None) -> bool:
        """Whether it has to learn of a run on so many threads."""

    def learn(self, executable: Any, inputs: Sequence[Any], outputs: Sequence[Any], asked: int | None) -> None:
        """Told of a run that went the long way, with name, dtype and shape of its inputs; may keep its outputs."""


class Backend(Protocol):
    """A way to run plans."""

    name: str

    @property
    def target(self) -> Target: ...

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        """Whether the op runs natively as it is, on these types; others are decomposed first, or run on the host."""

    def reads_views(self, node: Node) -> bool:
        """Whether a node that is a step of its own reads evenly spaced elements where they lie."""

    def runs_whole(self, node: Node) -> bool:
        """Whether a node that could be part of a kernel is better a step of its own."""

    def compile(self, lir: Lir) -> Executable: ...


class CodeArchive(Protocol):
    """Optional part of a backend, its `archive`: machine code of plans that can be kept in a bundle."""

    known: tuple[str, ...]
    """Names of all targets that code can be made for."""

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of targets of this machine's kind, from the least to the most demanding."""

    @property
    def version(self) -> str:
        """Of the way code is called: code of another version must not be loaded."""

    def record(self, lir: Lir) -> dict[str, bytes]: ...

    def load(self, lir: Lir, codes: Mapping[str, bytes]) -> Executable:
        """An executable of kept code; MissingCodeError where some is missing: none is made of a plan from a file."""


class MissingCodeError(LookupError):
    """Kept code does not have all that a plan runs."""


@dataclass(frozen=True)
class Spread:
    """Devices in a grid with named axes, and along which of them arrays are cut: for each axis of an array, the names.

    A backend that can run so has `compile_spread(lir, spread)`.
    """

    axes: tuple[tuple[str, int], ...]
    cuts: Mapping[str, tuple[tuple[str, ...], ...]]

    @property
    def count(self) -> int:
        return prod(n for _, n in self.axes)

    def parts(self, names: tuple[str, ...]) -> int:
        """Into how many parts an axis is cut."""
        return prod(dict(self.axes)[name] for name in names)

    def part(self, cuts: Sequence[tuple[str, ...]], shape: Sequence[int], at: int) -> tuple[slice, ...]:
        """What the device at a place of the grid, counted row by row, has of an array."""
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            at, place[name] = divmod(at, size)
        found = []
        for size, names in zip(shape, cuts, strict=False):
            number = 0
            for name in names:
                number = number * dict(self.axes)[name] + place[name]
            length = size // self.parts(names)
            found.append(slice(number * length, (number + 1) * length))
        return tuple(found)
