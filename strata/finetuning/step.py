"""A training step of a decoder: loss and gradients, compiled once, its memory known before the first run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from strata import ops as functions
from strata.core import f32, i32, u8
from strata.errors import OptionError
from strata.mir import Graph, leaf_name, substitute_values
from strata.runtime import Session
from strata.transforms import value_and_grad

ops: Any = functions


class TrainingStep:
    """Loss and gradients of `batch` sequences of `length` tokens, by the weights that are trained.

    `changes` are low-rank changes of matmuls; `trained` names parameters of the graph, or all floats if it is None. A
    graph has B times the scale of its change; values and gradients are those of B itself.
    """

    def __init__(
        self, model: Any, changes: Mapping[str, Any], *, batch: int, length: int, trained: Sequence[str] | None = None
    ) -> None:
        if not 2 <= length <= model.context:
            raise OptionError(
                f"finetune: sequences of {length} tokens, the model takes 2 to {model.context}", code="O685"
            )
        builder = model._build(length, every=True)
        if builder.changes:
            raise OptionError("finetune: the model has an adapter that is kept apart already", code="O685")
        builder.changes = changes
        labels = builder.graph.input("labels", (builder.batch, builder.count), i32)
        counts = builder.graph.input("counts", (builder.batch, builder.count), f32)
        builder.build()
        builder.check()
        self.model, self.batch, self.length = model, batch, length
        graph = builder.graph
        logits = graph.results[0]
        chosen = ops.take_along_axis(ops.log_softmax(logits, axis=-1), ops.insert_axis(labels, -1), axis=-1)
        lost = ops.reshape(chosen, counts.shape) * counts
        loss = -ops.sum(lost) / ops.sum(counts)
        whole = graph.returning(loss)
        sizes = {"B": batch, "S": length, "C": length}  # C: rows of a KV cache, which not every decoder has
        bound = whole.bind({name: size for name, size in sizes.items() if name in whole.symbols()})
        self._blocks = {leaf_name(x): builder.bound.pop(leaf_name(x)) for x in bound.params if x.dtype is u8}
        bound = _with_inputs(bound, self._blocks)
        wanted = set(changes)
        self._scales = {f"{name}.lora_B": np.float32(change.scale) for name, change in changes.items()}
        self.values: dict[str, np.ndarray] = {
            n: np.array(a, np.float32) / self._scales.get(n, np.float32(1)) for n, a in builder.bound.items()
            if (n in trained if trained is not None else n.rpartition(".lora_")[0] in wanted)
        }  # fmt: skip
        self.compiled = Session(model.device).compile(value_and_grad(bound, wrt=list(self.values)))
        self.compiled.set_params(builder.bound)
        held = {**builder.bound, **self._blocks}
        self.weight_bytes = sum(a.nbytes for n, a in held.items() if n not in self.values)
        self._feeds = {
            slot.name: np.zeros((batch, *(() if slot.is_fixed else (length,)), *slot.shape), np.float32)
            for slot in model.config.slots
        } | self._blocks

    @property
    def planned_bytes(self) -> int:
        """What a step needs: weights, activations, an empty KV cache, trained values with gradients and averages."""
        own = sum(a.nbytes for a in self.values.values())
        empty = sum(a.nbytes for name, a in self._feeds.items() if name not in self._blocks)
        return self.weight_bytes + self.activation_bytes + empty + 4 * own

    @property
    def activation_bytes(self) -> int:
        scratch = self.compiled.memory.scratch
        assert scratch is not None  # sizes are bound
        return scratch

    def run(self, ids: np.ndarray, counts: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """The loss of tokens i32[B, S + 1] where counts f32[B, S] are not 0, and the gradients by name."""
        given, labels = (np.ascontiguousarray(part, np.int32) for part in (ids[:, :-1], ids[:, 1:]))
        feeds = {
            "input_ids": given, "labels": labels,
            "counts": np.ascontiguousarray(counts, np.float32), "past": np.zeros(1, np.int64), **self._feeds,
        }  # fmt: skip
        loss, *grads = self.compiled.run(feeds)
        return float(loss), self._scaled(dict(zip(self.values, grads, strict=True)))

    def update(self, values: Mapping[str, np.ndarray]) -> None:
        """The trained values from now on."""
        self.values.update(values)
        self.compiled.set_params(self._scaled(values))

    def _scaled(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {n: a * self._scales[n] if n in self._scales else a for n, a in arrays.items()}


def _with_inputs(graph: Graph, names: Iterable[str]) -> Graph:
    """The graph with some parameters as inputs.

    What follows from parameters alone is computed once and kept: of blocks, that would be all weights as the floats
    that gradients are multiplied with. As inputs they are unpacked one by one.
    """
    wanted, made = set(names), Graph(graph.name)
    known = {x: made.input(leaf_name(x), x.type) for x in graph.inputs}
    for x in graph.params:
        known[x] = (made.input if leaf_name(x) in wanted else made.param)(leaf_name(x), x.type)
    return made.outputs(*substitute_values(graph.results, known))
