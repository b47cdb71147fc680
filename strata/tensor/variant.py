"""One compiled signature of a jitted function, programs shared by many shapes, and reports about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from strata.backends import DeviceArray, DeviceHome
from strata.core import Table, TensorType, TreeDef, builder, here, new_lock
from strata.errors import TraceError
from strata.mir import Graph, leaf_name
from strata.runtime import CompiledGraph, Session
from strata.tensor.data import Handle
from strata.tensor.shape_generic import LARGEST, NEEDS_NUMBERS, SMALL, General, generalize
from strata.tensor.structure_key import outline_of
from strata.tensor.tensor import Tensor, fresh_tensors


@dataclass(slots=True)
class Variant:
    """A graph, the arrays that the function closed over, and how to give results back. Compiled on its first run."""

    graph: Graph
    captured: dict[str, Any]
    names: tuple[str, ...]
    structure: TreeDef
    fixed: dict[int, Any]  # results that are not tensors, by place among the leaves
    kinds: tuple[TensorType, ...]  # of the results
    donated: tuple[int, ...] = ()  # inputs that the caller gives up
    device: str = "cpu"
    home: DeviceHome | None = None  # the memory that results stay in; None: they are arrays of the host
    compiled: CompiledGraph | None = None
    shared: dict[str, str] | None = None  # names of inputs in a shared program, by ours
    takes: dict[int, int] | None = None  # outputs, and the donated inputs that they are written over
    rebuild: Callable[[Iterator[Any]], Any] | None = None  # puts results into the structure
    runs: int = 0
    repeats: int = 0  # how often a call was kept to compare others with
    _lock: Any = field(default_factory=new_lock)

    def run(self, handles: Sequence[Handle]) -> Any:
        compiled = self.compiled or self.compile()
        feeds = self.renamed({n: h.array for n, h in zip(self.names, handles, strict=True)})
        over = self._over(compiled, handles)
        try:
            made = compiled.run_over(feeds, over) if self.home is None else compiled.run_resident(feeds, over)
        finally:
            self._release(handles)
        return self._finished(made)

    def run_ready(self, arrays: list[np.ndarray], handles: Sequence[Handle]) -> Any:
        """The same for arrays that the program takes as they are, in its order."""
        compiled = self.compiled
        assert compiled is not None
        if self.home is not None:
            return self._run_on_device(compiled, arrays, handles)
        if not self.donated:
            return self._finished(compiled.run_ready(arrays))
        try:
            made = compiled.run_ready(arrays, self._over(compiled, handles))
        finally:
            self._release(handles)
        return self._finished(made)

    def _run_on_device(self, compiled: CompiledGraph, arrays: Sequence[Any], handles: Sequence[Handle]) -> Any:
        if not self.donated:
            entered = compiled._enter(arrays)
            return self._finished(compiled.run_ready(list(arrays), resident=True) if entered is None else entered)
        try:
            made = compiled.run_ready(list(arrays), self._over(compiled, handles), resident=True)
        finally:
            self._release(handles)
        return self._finished(made)

    @property
    def takes_arrays(self) -> bool:
        """Whether its program has exactly its inputs, in order: `run_ready` can be used."""
        return self.compiled is not None and self.shared is None and tuple(self.compiled.inputs) == self.names

    def _finished(self, made: Sequence[Any]) -> Any:
        self.runs += 1
        return self.restore(fresh_tensors(made, self.kinds))

    def _over(self, compiled: CompiledGraph, handles: Sequence[Handle]) -> dict[int, Any]:
        """Results go where donated arguments lie, as far as the plan reads those before it writes.

        Only memory that nobody else has seen is written over, and none that is an argument twice.
        """
        if not self.donated:
            return {}
        if self.takes is None:
            self.takes = self._pairs(compiled)
        counts = Counter(handles) if len(set(handles)) != len(handles) else None
        over = {}
        for output, i in self.takes.items():
            handle = handles[i]
            own = handle.is_own and (self.home is None or type(handle.array) is DeviceArray)
            if own and (counts is None or counts[handle] == 1):
                over[output] = handle.array
        return over

    def _release(self, handles: Sequence[Handle]) -> None:
        """Donated arguments are given up, whatever happened."""
        for i in self.donated:
            handles[i].release()

    def _pairs(self, compiled: CompiledGraph) -> dict[int, int]:
        """Outputs, and the donated inputs that they take over."""
        names = compiled.lir.graph.input_names
        pairs: dict[int, int] = {}
        for i in self.donated:
            name = self.shared.get(self.names[i], "") if self.shared is not None else self.names[i]
            if name not in names:
                continue
            free = (o for o in range(len(self.graph.results)) if o not in pairs)
            found = next((o for o in free if compiled.takes_over(name, o)), None)
            if found is not None:
                pairs[found] = i
        return pairs

    def renamed(self, feeds: dict[str, Any]) -> dict[str, Any]:
        """Inputs by the names that the program has for them."""
        if self.shared is None:
            return feeds
        return {self.shared[n]: a for n, a in (feeds | self.captured).items() if n in self.shared}

    def finisher(self) -> Callable[[list[Tensor]], Any]:
        """`restore`, as quick as it can be: for one who calls it often."""
        return itemgetter(0) if self.structure.kind == "leaf" and not self.fixed else self.restore

    def restore(self, results: Sequence[Tensor]) -> Any:
        """Results in the structure that the function gave."""
        if self.rebuild is None:
            self.rebuild = builder(self.structure)
        tensors = iter(results)
        if not self.fixed:
            return self.rebuild(tensors)
        count = len(results) + len(self.fixed)
        return self.rebuild(iter([self.fixed[i] if i in self.fixed else next(tensors) for i in range(count)]))

    def compile(self) -> CompiledGraph:
        with self._lock:
            if self.compiled is None:
                made = Session(self.device).compile(self.graph)
                made.set_params(self.captured)
                self.compiled = made
        return self.compiled

    def form(self, ranges: Mapping[int, tuple[int, int]]) -> General | None:
        """The program with sizes symbolic inside ranges, if there is one."""
        return generalize(outline_of(self.graph), ranges=ranges)

    def open_forms(self, sizes: Iterable[int]) -> Iterator[General]:
        """Programs for many shapes: with these sizes symbolic, then with all large ones, then with all that can be."""
        program = outline_of(self.graph)
        for small, ranges in ((SMALL, dict.fromkeys(sizes, (1, LARGEST))), (SMALL, None), (1, None)):
            found = generalize(program, small, ranges)
            if found is not None:
                yield found

    def _not_shared(self) -> TraceError:
        return TraceError(
            f"jit: {self.graph.name} cannot share a program between shapes: an op of it needs fixed sizes",
            code="T218", place=here(), fix="raise max_variants, or on_miss='interpret'",
        )  # fmt: skip

    def share(self, programs: Table[Any, CompiledGraph], general: General | None, where: Any) -> None:
        """Run on a program with symbolic sizes, made now if it is the first of its form."""
        program = outline_of(self.graph)
        if general is None:
            raise self._not_shared()
        try:
            made = programs.get_or_make((general.key, where), lambda: Session(self.device).compile(general.graph))
        except NEEDS_NUMBERS as error:
            raise self._not_shared() from error
        used = [leaf_name(x) for x in program.leaf_values]
        self.shared = {name: f"d{i}" for i, name in enumerate(used)}
        self.compiled = made


@dataclass(frozen=True, slots=True)
class JitExplanation:
    """What a jitted function was compiled to; `str` is the report."""

    name: str
    variants: Sequence[Variant]
    misses: tuple[str, ...]
    max_variants: int | None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The steps of the first variant, in order."""
        return tuple(s.label for s in self.variants[0].compile().lir.schedule) if self.variants else ()

    def __str__(self) -> str:
        limit = "" if self.max_variants is None else f" of at most {self.max_variants}"
        lines = [f"{self.name}: {len(self.variants)} variants{limit}"]
        for i, miss in enumerate(self.misses):
            lines.append(f"  compiled for {miss}: {'the first call' if i == 0 else 'a signature not seen before'}")
        for variant in self.variants:
            compiled = variant.compile()
            steps = compiled.lir.schedule
            lines.append(f"  {compiled.signature}")
            lines.append(
                f"    {len(variant.graph.nodes())} ops became {len(steps)} steps, {len(compiled.lir.kernels)} kernels; "
                f"{variant.runs} runs; {len(compiled.host_steps)} steps on the host"
            )
            lines += [f"    {step.name:<12} {step.label}" for step in steps]
            lines += [f"    not fused: {cut}" for cut in compiled.lir.cuts]
            lines += [f"    {line}" for line in compiled.memory.splitlines()[:1]]
        return "\n".join(lines)
