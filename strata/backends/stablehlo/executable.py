"""The `xla` backend: a graph as StableHLO modules, compiled and run by PJRT."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.backends.stablehlo.adapter import Client, client
from strata.backends.stablehlo.emit import Text, is_native, large_constants, write_module
from strata.core import Target, TensorType, new_lock
from strata.errors import DeviceError
from strata.lir import Lir
from strata.mir import Constant, Graph, Input, Node, Op, Param, Value, evaluate_values, leaf_name, run_op

KEPT_SIZES = 32  # sets of sizes that an executable keeps modules for; each is a compile


class XlaBackend:
    """StableHLO on a PJRT device: `xla` is the first one, `xla:1` the next."""

    name = "xla"

    def __init__(self, index: int = 0) -> None:
        self.client: Client = client()
        if index >= len(self.client.devices):
            count = len(self.client.devices)
            raise DeviceError(
                f"device 'xla:{index}' is not available; {self.client.platform} has {count} here, from 'xla:0'",
                code="E101",
            )
        self.index = index

    @property
    def target(self) -> Target:
        return Target.named("baseline")

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        return is_native(op)

    def reads_views(self, node: Node) -> bool:
        return False

    def runs_whole(self, node: Node) -> bool:
        return True

    def compile(self, lir: Lir) -> XlaExecutable:
        return XlaExecutable(lir, self.client, self.index)


@dataclass(frozen=True)
class Stage:
    """Nodes that run together: as one module, or, each by itself, on the host."""

    nodes: tuple[Node, ...]
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    is_host: bool


@dataclass(frozen=True)
class _Program:
    """All stages for one set of sizes."""

    graph: Graph
    stages: tuple[Stage, ...]
    texts: tuple[Text | None, ...]
    loaded: tuple[Any, ...]
    constants: Mapping[Value, Any]


class XlaExecutable:
    """A plan on a PJRT device. Sizes that are symbols are compiled for as they are met."""

    def __init__(self, lir: Lir, client: Client, index: int) -> None:
        self.lir, self.client, self.index = lir, client, index
        self._params: dict[str, Any] = {}
        self._programs: OrderedDict[tuple[tuple[str, int], ...], _Program] = OrderedDict()
        self._lock = new_lock()
        if not lir.has_dynamic_dims:
            self._program({})

    @property
    def host_steps(self) -> list[str]:
        """Ops that run in Python: no module can hold them."""
        return [n.op.name for n in self.lir.graph.nodes() if not _is_leaf(n) and not is_native(n.op)]

    def stablehlo(self, binding: Mapping[str, int] | None = None) -> str:
        """The text of the modules, for one set of sizes."""
        texts = [t.text for t in self._program(dict(binding or {})).texts if t is not None]
        return "\n".join(texts)

    def set_param(self, name: str, array: np.ndarray) -> None:
        self._params[name] = self.client.put(array, self.index)

    def run(
        self,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        binding: Mapping[str, int],
        threads: int | None = None,
    ) -> None:
        program = self._program(binding)
        graph = program.graph
        values: dict[Value, Any] = dict(program.constants)
        values |= {x: self.client.put(a, self.index) for x, a in zip(graph.inputs, inputs, strict=True)}
        values |= {x: self._params[leaf_name(x)] for x in graph.params}
        for stage, text, loaded in zip(program.stages, program.texts, program.loaded, strict=True):
            if text is None:
                self._run_host(stage, values)
                continue
            results = self.client.run(loaded, [values[x] for x in stage.takes])
            if text.is_checked and self.client.take(results.pop()):
                self._raise(stage, values)
            values.update(zip(stage.gives, results, strict=True))
        for out, result in zip(outputs, graph.results, strict=True):
            np.copyto(out, self.client.take(values[result]))

    def _raise(self, stage: Stage, values: Mapping[Value, Any]) -> None:
        """A module says that something in it is an error: NumPy finds out which, and where it comes from."""
        known = {x: self.client.take(values[x]) for x in stage.takes}
        evaluate_values(stage.gives, known, {})

    def _run_host(self, stage: Stage, values: dict[Value, Any]) -> None:
        for node in stage.nodes:
            arrays = [self.client.take(values[x]) for x in node.inputs]
            results = run_op(node.op, arrays, node.types)
            values.update({x: self.client.put(a, self.index) for x, a in zip(node.outputs, results, strict=True)})

    def _program(self, binding: Mapping[str, int]) -> _Program:
        key = tuple(sorted(binding.items())) if binding else ()
        with self._lock:
            found = self._programs.get(key)
            if found is None:
                found = self._programs[key] = self._made(binding)
                if len(self._programs) > KEPT_SIZES:
                    self._programs.popitem(last=False)
            else:
                self._programs.move_to_end(key)
            return found

    def _made(self, binding: Mapping[str, int]) -> _Program:
        graph = self.lir.graph.bind(binding) if binding else self.lir.graph
        stages = split(graph)
        names = [graph.name if i == 0 else f"{graph.name}_{i}" for i in range(len(stages))]
        texts = [None if s.is_host else write_module(n, s.takes, s.gives) for n, s in zip(names, stages, strict=True)]
        loaded = [
            None if t is None else self.client.compile(t.text, self.index, n) for n, t in zip(names, texts, strict=True)
        ]
        constants = {
            x: self.client.put(x.node.op.data.array, self.index)
            for s in stages for x in s.takes if isinstance(x.node.op, Constant)
        }  # fmt: skip
        return _Program(graph, tuple(stages), tuple(texts), tuple(loaded), constants)


def split(graph: Graph) -> list[Stage]:
    """Stages in order: what comes before an op of the host, that op, what comes after it."""
    level: dict[int, int] = {}
    for node in graph.nodes():
        below = max((level[id(x.node)] for x in node.inputs), default=0)
        on_host = not _is_leaf(node) and not is_native(node.op)
        level[id(node)] = below if _is_leaf(node) or below % 2 == on_host else below + 1
    nodes = [n for n in graph.nodes() if not isinstance(n.op, (Input, Param))]
    # constants belong to whoever reads them
    last = max([level[id(n)] for n in nodes], default=0)
    made = []
    results = set(graph.results)
    for number in range(last + 1):
        own = tuple(n for n in nodes if level[id(n)] == number and not isinstance(n.op, Constant))
        given = {x for n in own for x in n.outputs}
        read_later = {x for n in nodes if level[id(n)] > number for x in n.inputs}
        is_host = number % 2 == 1
        gives = [x for n in own for x in n.outputs if x in read_later or x in results]
        if number == last - last % 2:
            gives += [x for x in results if isinstance(x.node.op, Constant)]
        if not gives:
            continue
        reads = dict.fromkeys(x for n in own for x in n.inputs if x not in given)
        if is_host:
            takes = list(reads)
        else:
            stop = [x for x in reads if not isinstance(x.node.op, Constant)]
            takes = [*stop, *large_constants(gives, stop)]
        made.append(Stage(own, tuple(takes), tuple(dict.fromkeys(gives)), is_host))
    return made


def _is_leaf(node: Node) -> bool:
    return isinstance(node.op, (Input, Param, Constant))
