"""The `xla` backend: a graph as StableHLO modules, compiled and run by PJRT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from strata.backends.base import Arrays, Backend, Capabilities, Executable, ProcessorShare, ThreadSpread
from strata.backends.resident import DeviceArray
from strata.backends.stablehlo.adapter import Client, DevicePlace, client, listening
from strata.backends.stablehlo.device_memory import XlaHome
from strata.backends.stablehlo.emit import Text, is_native, write_module
from strata.core import Table, TensorType
from strata.errors import DeviceError, MemoryLimitError, OptionError
from strata.lir import Lir, PlanStage, Step, stages_of
from strata.mir import Constant, Graph, Node, Op, Value, evaluate_values, leaf_name, run_op, substitute_values


class XlaBackend(Backend):
    """StableHLO on a PJRT device: `xla` is the first one, `xla:1` the next."""

    name = "xla"
    capabilities = Capabilities(takes_graphs=True, spreads=True)

    def __init__(self, index: int = 0) -> None:
        self.client: Client = client()
        if index >= len(self.client.devices):
            count = len(self.client.devices)
            raise DeviceError(
                f"device 'xla:{index}' is not available; {self.client.platform} has {count} here, from 'xla:0'",
                code="E101",
            )
        self.index = index
        self.home: XlaHome = XlaHome(f"xla:{index}" if index else "xla", self.client, index)
        if self.client.platform == "cpu":
            self.capabilities = replace(self.capabilities, of_processor=ProcessorShare())

    @property
    def description(self) -> str:
        return self.client.version

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        return is_native(op)

    def runs_whole(self, node: Node) -> bool:
        return True

    def sources(self, lir: Lir) -> dict[str, str]:
        """The text of the modules of a plan, by name; none while sizes are symbolic."""
        if lir.symbols:
            return {}
        return {
            f"module{at}": text.text for at, (_, text) in enumerate(_written(lir, lir.graph, {})) if text is not None
        }

    def compile(self, lir: Lir) -> XlaExecutable:
        return XlaExecutable(lir, self.client.place(self.index), home=self.home)

    def compile_spread(self, lir: Lir, spread: ThreadSpread) -> XlaExecutable:
        return XlaExecutable(lir, self.client.grid(spread), spread)


@dataclass(frozen=True)
class _Program:
    """All stages for one set of sizes."""

    graph: Graph
    stages: tuple[PlanStage, ...]
    texts: tuple[Text | None, ...]
    loaded: tuple[Any, ...]
    constants: Mapping[Value, Any]
    scratch: int  # the most that one of the modules takes


class XlaExecutable(Executable):
    """A plan on a PJRT device. Sizes that are symbols are compiled for as they are met."""

    home: XlaHome | None

    def __init__(
        self, lir: Lir, place: DevicePlace, spread: ThreadSpread | None = None, home: XlaHome | None = None
    ) -> None:
        super().__init__(lir)
        self.place, self.spread, self.home = place, spread, home
        self._programs: Table[tuple[tuple[str, int], ...], _Program] = Table("xla programs")
        self._limit: int | None = None
        if not lir.has_dynamic_dims:
            self._program({})

    def is_host_step(self, at: int, step: Step) -> bool:
        return not step.is_module

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of the program that was made or used last; 0 before any sizes were met."""
        return next((program.scratch for program in reversed(self._programs.values())), 0)

    def limit_scratch(self, limit: int) -> None:
        """Those that are made already, and those to come."""
        self._limit = limit
        for program in self._programs.values():
            self._check_limit(program)

    def _check_limit(self, program: _Program) -> None:
        if self._limit is not None and program.scratch > self._limit:
            raise MemoryLimitError(
                f"{self.lir.name!r} needs {program.scratch:,} bytes of scratch memory on xla, "
                f"the limit is {self._limit:,}", code="C200",
            )  # fmt: skip

    def stablehlo(self, binding: Mapping[str, int] | None = None) -> str:
        """The text of the modules, for one set of sizes."""
        texts = [t.text for t in self._program(dict(binding or {})).texts if t is not None]
        return "\n".join(texts)

    def hold(self, name: str, array: Any) -> None:
        """One copy serves all programs that hold the same array."""
        if self.home is None:
            self.values[name] = self.place.put(array, name)
        else:
            self.values[name] = array if isinstance(array, DeviceArray) else self.home.shared(array, self.lir.name)

    def run(self, inputs: Arrays, outputs: Arrays, binding: Mapping[str, int], threads: int | None = None) -> None:
        self.fill(outputs, [self.place.take(x) for x in self._run(inputs, binding)])

    def run_resident(
        self, inputs: Sequence[Any], binding: Mapping[str, int], over: Mapping[int, DeviceArray] | None = None
    ) -> list[DeviceArray]:
        """Arrays of PJRT never change, so that nothing is written over another array."""
        assert self.home is not None
        return [self.home.holding(x, self.lir.name) for x in self._run(inputs, binding)]

    def takes_over(self, name: str, output: int) -> bool:
        return False

    def _run(self, inputs: Sequence[Any], binding: Mapping[str, int]) -> list[Any]:
        """The results, which may not be there yet."""
        program = self._program(binding)
        graph = program.graph
        values: dict[Value, Any] = dict(program.constants)
        values |= {x: self._put(a, leaf_name(x)) for x, a in zip(graph.inputs, inputs, strict=True)}
        values |= {x: self._put(self.values[leaf_name(x)], None) for x in graph.params}
        for stage, text, loaded in zip(program.stages, program.texts, program.loaded, strict=True):
            if text is None:
                self._run_host(stage, values)
                continue
            run = partial(self.place.run, loaded, [values[x] for x in text.takes])
            results = listening(run) if text.has_loop else run()
            if text.is_checked and self.place.take(results.pop()):
                self._raise(stage, values)
            values.update(zip(stage.gives, results, strict=True))
        return [values[result] for result in graph.results]

    def _put(self, array: Any, name: str | None) -> Any:
        if isinstance(array, DeviceArray):
            return array.place
        return self.place.put(array, name) if isinstance(array, np.ndarray) else array

    def _raise(self, stage: PlanStage, values: Mapping[Value, Any]) -> None:
        """A module says that something in it is an error: NumPy finds out which, and where it comes from."""
        known = {x: self.place.take(values[x]) for x in stage.takes if not isinstance(x.node.op, Constant)}
        evaluate_values(stage.gives, known, {})

    def _run_host(self, stage: PlanStage, values: dict[Value, Any]) -> None:
        for node in stage.nodes:
            arrays = [self.place.take(values[x]) for x in node.inputs]
            results = run_op(node.op, arrays, node.types)
            values.update({x: self.place.put(a) for x, a in zip(node.outputs, results, strict=True)})

    def _program(self, binding: Mapping[str, int]) -> _Program:
        key = tuple(sorted(binding.items())) if binding else ()
        return self._programs.get_or_make(key, lambda: self._made(binding))

    def _made(self, binding: Mapping[str, int]) -> _Program:
        graph = self.lir.graph.bind(binding) if binding else self.lir.graph
        if self.spread is not None:
            check_cuts(graph, self.spread)
        written = _written(self.lir, graph, binding, self.spread)
        stages, texts = [s for s, _ in written], [t for _, t in written]
        loaded = [None if t is None else self.place.load(t.text, graph.name) for t in texts]
        read = [x for t, s in zip(texts, stages, strict=True) for x in (s.takes if t is None else t.takes)]
        constants = {
            x: self.place.put(x.node.op.data.array) for x in (*read, *graph.results) if isinstance(x.node.op, Constant)
        }
        scratch = max((self.place.client.scratch_bytes(x) for x in loaded if x is not None), default=0)
        program = _Program(graph, tuple(stages), tuple(texts), tuple(loaded), constants, scratch)
        self._check_limit(program)
        return program


def _written(
    lir: Lir, graph: Graph, binding: Mapping[str, int], spread: ThreadSpread | None = None
) -> list[tuple[PlanStage, Text | None]]:
    """The stages of a plan, over its graph with sizes, and the text of each that is a module."""
    old = [Value(n, 0) for n in lir.graph.nodes()]
    leaves = dict(zip((*lir.graph.inputs, *lir.graph.params), (*graph.inputs, *graph.params), strict=True))
    new = substitute_values(old, leaves, lambda op: op.bind(binding)) if binding else old
    alike = {id(a.node): b.node for a, b in zip(old, new, strict=True)}
    parts = ((list({id(alike[id(n)]): alike[id(n)] for n in s.nodes}.values()), not s.is_module) for s in lir.schedule)
    stages = stages_of(graph, parts)
    made: list[tuple[PlanStage, Text | None]] = []
    for at, stage in enumerate(stages):
        name = f"{graph.name}_{at}" if len(stages) > 1 else graph.name
        made.append((stage, None if stage.is_host else write_module(name, stage.takes, stage.gives, spread)))
    return made


def check_cuts(graph: Graph, spread: ThreadSpread) -> None:
    """Refuse cuts of what is not there, or that do not come out even."""
    for name, cuts in spread.cuts.items():
        kind = graph.leaf(name).type
        if len(cuts) > kind.ndim:
            raise OptionError(f"compile option shard: {name} : {kind} has no axis {kind.ndim}", code="O144")
        for axis, names in enumerate(cuts):
            size, parts = kind.shape[axis], spread.parts(names)
            if isinstance(size, int) and size % parts:
                raise OptionError(
                    f"compile option shard: axis {axis} of {name} : {kind} does not divide into {parts} parts",
                    code="O144",
                )
