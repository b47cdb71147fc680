"""Expert statistics of a running graph: which experts were asked for, and how many of them were in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from strata.arguments import public
from strata.core import here, new_lock
from strata.errors import OptionError
from strata.runtime.report.observe import OBSERVERS

if TYPE_CHECKING:
    from strata.mir import Node
    from strata.runtime.execute.compiled import CompiledGraph

MOST_EXPERTS = 1 << 16  # of one layer
ROUTED = ("grouped_matmul", "dequant_grouped_matmul")  # ops that take the number of an expert for each row


@public
@dataclass(frozen=True, slots=True)
class ResidencyStats:
    """Rows that were routed, by layer: to experts in memory, and to others.

    Calls are the experts that a run asked for, each once. `moved` are the bytes that were read to bring others in.
    """

    hits: tuple[int, ...]
    misses: tuple[int, ...]
    hit_calls: tuple[int, ...] = ()
    miss_calls: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()

    @classmethod
    def joined(cls, layers: Sequence[ResidencyStats]) -> ResidencyStats:
        """Of several layers together."""
        return cls(*(tuple(n for each in layers for n in getattr(each, f.name)) for f in fields(cls)))

    @property
    def hit_rate(self) -> float:
        total = sum(self.hits) + sum(self.misses)
        return sum(self.hits) / total if total else 1.0


@public
class ExpertWatch:
    """Watches the runs of a compiled graph inside a block; results are the same, runs are slower.

    A layer is a set of matmuls by expert that read the same ids, in the order of the program. Masks say which experts
    are in memory: one bool for each, for all layers or for each. `take_topk` gives the ids that were routed. Experts in
    the body of a loop are no layer of the graph: they are not counted.
    """

    def __init__(self, compiled: CompiledGraph, experts: int) -> None:
        if not 1 <= experts <= MOST_EXPERTS:
            said = "are none" if experts < 1 else f"are more than {MOST_EXPERTS}"
            raise OptionError(f"ExpertWatch: {experts} experts {said}", code="O612", place=here())
        self.experts, self._compiled, self._lock = experts, compiled, new_lock()
        self._layers: dict[str, list[int]] = {}  # steps by the buffer of ids
        for at, step in enumerate(compiled.lir.schedule):
            routed = [n for n in step.nodes if n.op.name in ROUTED]
            if routed:
                self._check_count(routed[0])
                ids = [n for n in step.inputs if self._is_ids(n)]
                if ids:
                    self._layers.setdefault(ids[-1], []).append(at)
        self._names = list(self._layers)
        self._masks = [np.ones(experts, bool)] * len(self._names)
        self._ids: list[list[np.ndarray]] = [[] for _ in self._names]
        self._counts = self._zero()

    def _check_count(self, node: Node) -> None:
        op: Any = node.op
        count = op.id_sizes(*(x.type for x in node.inputs))[0]
        if isinstance(count, int) and count != self.experts:
            raise OptionError(
                f"ExpertWatch: {self._compiled.source.name!r} has layers of {count} experts, not {self.experts}",
                code="O612", place=here(),
            )  # fmt: skip

    def _is_ids(self, name: str) -> bool:
        kind = self._compiled.lir.buffer(name).type
        return kind.dtype.name in ("i32", "i64") and kind.ndim == 1

    @property
    def layers(self) -> int:
        """Layers with experts that the graph has."""
        return len(self._names)

    def set_resident(self, mask: Any) -> None:
        """The experts in memory: bool[experts] for all layers, or one such row for each."""
        try:
            given = np.asarray(mask)
        except ValueError:  # rows of several lengths
            given = np.asarray(mask, object)
        is_mask = given.dtype.kind == "b" or (given.dtype.kind in "iu" and not np.any((given != 0) & (given != 1)))
        if given.size and not is_mask:
            raise OptionError("ExpertWatch: a mask is made of True and False, or of 1 and 0", code="O612", place=here())
        rows = given.astype(bool)
        if rows.shape not in ((self.experts,), (self.layers, self.experts)):
            raise OptionError(
                f"ExpertWatch: a mask is bool[{self.experts}] or bool[{self.layers}, {self.experts}], got "
                f"bool{list(rows.shape)}", code="O612", place=here(),
            )  # fmt: skip
        self._masks = [rows] * self.layers if rows.ndim == 1 else list(rows)

    def __enter__(self) -> Self:
        OBSERVERS.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        OBSERVERS.remove(self)

    # as an observer of runs

    def begin(self, compiled: CompiledGraph, binding: Mapping[str, int], arrays: Sequence[np.ndarray]) -> None:
        pass

    def step(self, compiled: CompiledGraph, at: int, begin: int, end: int, spans: Sequence[Any], read: Any) -> None:
        if compiled is not self._compiled:
            return
        for layer, name in enumerate(self._names):
            if self._layers[name][0] == at:
                ids = np.array(read(name)).reshape(-1)
                counts = np.bincount(np.clip(ids, 0, self.experts - 1), minlength=self.experts)
                here, away = counts[self._masks[layer]], counts[~self._masks[layer]]
                with self._lock:
                    self._ids[layer].append(ids)
                    for i, n in enumerate((here.sum(), away.sum(), np.count_nonzero(here), np.count_nonzero(away))):
                        self._counts[i][layer] += int(n)

    def end(self, compiled: CompiledGraph, begin: int, end: int) -> None:
        pass

    # what was seen

    def take_topk(self) -> list[np.ndarray]:
        """The ids that were routed since the last time, for each layer."""
        with self._lock:
            made = [np.concatenate(rows) if rows else np.zeros(0, np.int64) for rows in self._ids]
            self._ids = [[] for _ in self._names]
        return made

    def take_stats(self) -> ResidencyStats:
        """Hits and misses since the last time."""
        with self._lock:
            counts, self._counts = self._counts, self._zero()
        return ResidencyStats(*map(tuple, counts))

    def _zero(self) -> list[list[int]]:
        return [[0] * self.layers for _ in range(4)]
