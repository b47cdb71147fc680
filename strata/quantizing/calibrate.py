"""Calibration: what the matmuls of a decoder are given, as importance matrices and as products for GPTQ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strata import ops as functions
from strata.quantizing.perplexity import Progress, pieces
from strata.runtime import Session

ops: Any = functions


@dataclass
class Activations:
    """Sums over tokens of what each matmul is given: squares, magnitudes, and products on demand."""

    tokens: int = 0
    squares: dict[str, np.ndarray] = field(default_factory=dict)
    magnitudes: dict[str, np.ndarray] = field(default_factory=dict)
    products: dict[str, np.ndarray] = field(default_factory=dict)

    def importance(self, name: str) -> np.ndarray | None:
        """The mean square of each column of a matmul, f32[K]: a row of an importance matrix."""
        found = self.squares.get(name)
        return None if found is None else (found / max(self.tokens, 1)).astype(np.float32)

    def magnitude(self, name: str) -> np.ndarray | None:
        found = self.magnitudes.get(name)
        return None if found is None else (found / max(self.tokens, 1)).astype(np.float32)


def collect_activations(
    model: Any, texts: Sequence[str], *, products: Iterable[str] = (), context: int = 512,
    max_tokens: int | None = 32768, progress: Progress | None = None,
) -> Activations:  # fmt: skip
    """Statistics of a decoder's matmuls on texts. `products` names the matmuls whose products x·xᵀ are wanted."""
    parts = pieces(model, texts, context, max_tokens)
    builder = model._build(model.context, every=True)
    builder.watched = {}
    builder.build()
    wanted = set(products)
    plan: list[tuple[str, str, Any]] = []
    made: dict[Any, Any] = {}
    for name, x in builder.watched.items():
        rows = ops.reshape(x, (-1, x.shape[-1]))
        kinds = ["squares", "magnitudes", *(["products"] if name in wanted else [])]
        for kind in kinds:
            if (kind, x) not in made:
                made[kind, x] = _summed(kind, rows)
            plan.append((kind, name, made[kind, x]))
    found = Activations()
    values = list(dict.fromkeys(value for *_, value in plan))
    compiled = Session(model.device).compile(builder.graph.returning(*values))
    compiled.set_params(builder.bound)
    sums: list[np.ndarray] | None = None
    for done, ids in enumerate(parts, 1):
        state = model.start(1, ids.shape[1])
        names = [slot.name for slot in model.config.slots]
        feeds = {"input_ids": ids, "past": np.zeros(1, np.int64), **dict(zip(names, state.caches, strict=True))}
        results = [np.asarray(r, np.float64) for r in compiled.run(feeds)]
        sums = results if sums is None else [a + b for a, b in zip(sums, results, strict=True)]
        found.tokens += ids.shape[1]
        if progress is not None:
            progress(done, len(parts))
    by_value = dict(zip(values, sums or (), strict=True))
    for kind, name, value in plan:
        getattr(found, kind)[name] = by_value[value]
    return found


def _summed(kind: str, rows: Any) -> Any:
    if kind == "products":
        return ops.matmul(ops.transpose(rows, (1, 0)), rows)
    return ops.sum(rows * rows if kind == "squares" else ops.abs(rows), axis=0)
