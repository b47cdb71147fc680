"""Mixtures of experts: Mixtral, Qwen2 and 3 MoE, OLMoE, Granite MoE, GLM-4.5, ERNIE 4.5 MoE, Phi-3.5 MoE.

A router chooses experts for each token; a grouped matmul multiplies each token with the matrices of its own experts,
and reads no others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import i64, sym
from strata.errors import FileError
from strata.mir import Graph, Value
from strata.models.config_values import whole
from strata.models.decoder_config import DecoderConfig, meant
from strata.models.decoders.expert_weights import ExpertStack
from strata.models.generating.stages import ExpertCut
from strata.models.llama import LlamaGraph, plain_names
from strata.models.weights import Weights, ops

Named = dict[str, Any]  # arrays, tensors of GGUF files, stacks of experts
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True)
class MoeConfig(DecoderConfig):
    """The sizes of a mixture of experts."""

    experts: int = 1
    chosen: int = 1
    expert_inner: int = 1
    shared_inner: int = 0  # of an expert that every token goes through
    sparse: tuple[bool, ...] = ()  # which layers have experts
    score: str = "softmax"
    renormalize: bool = True
    routed_scale: float = 1.0
    groups: int = 1  # of experts, of which some are chosen first
    chosen_groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 0 < self.chosen <= self.experts and self.expert_inner > 0 and self.groups >= self.chosen_groups > 0
        fits = fits and self.chosen <= self.experts // self.groups * self.chosen_groups
        if not fits or self.experts % self.groups or len(self.sparse) != self.layers:
            raise FileError(
                f"the configuration of the {self.family} makes no sense: {self.chosen} of {self.experts} experts, "
                f"{self.chosen_groups} of {self.groups} groups", code="F140",
            )  # fmt: skip


COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def moe_fields(
    found: Mapping[str, Any], layers: int, *, inner: str = "moe_intermediate_size", **own: Any
) -> dict[str, Any]:
    """The fields of `MoeConfig` that all families have keys for."""
    found = meant(found)
    count = next((key for key in COUNTS if found.get(key) is not None), COUNTS[0])
    chosen = "moe_k" if found.get("moe_k") is not None else "num_experts_per_tok"
    common = dict(experts=whole(found, count), chosen=whole(found, chosen, 2), expert_inner=whole(found, inner))
    return {**common, "sparse": (True,) * layers, **own}


def stacked(names: Mapping[str, str] | None = None, *, is_wide: bool = False) -> Callable[[Weights], Named]:
    """How weights are named: those of all experts of a layer become one stack [E, in, out], gate before up.

    `names` are parts of names under the names that they have here. Arrays of all experts are [E, out, in] in most
    files, and `is_wide` where they are [E, in, out] already.
    """

    def name(weights: Weights) -> Named:
        found: Named = {}
        parts: dict[tuple[str, str], dict[int, Any]] = {}
        for key, tensor in plain_names(weights).items():
            for old, new in (names or {}).items():
                key = key.replace(old, new)  # noqa: PLW2901
            match = EXPERT.fullmatch(key)
            if match is not None:
                parts.setdefault((match[1], match[3]), {})[int(match[2])] = tensor
            elif ".experts." in key and not is_wide and isinstance(tensor, np.ndarray) and tensor.ndim == 3:
                found[key.removesuffix(".weight")] = np.swapaxes(tensor, 1, 2)
            else:
                found[key] = tensor
        for (at, part), each in parts.items():
            if part != "up_proj":
                up = parts.get((at, "up_proj"), {}) if part == "gate_proj" else None
                found[f"{at}.{'down_proj' if up is None else 'gate_up_proj'}"] = _stack(at, each, up)
        return found

    return name


def _stack(at: str, each: Mapping[int, Any], up: Mapping[int, Any] | None) -> ExpertStack:
    lost = next((i for i in range(len(each)) if i not in each or (up is not None and i not in up)), None)
    if lost is not None:
        raise FileError(f"{at} has weights of {len(each)} experts, and not all of expert {lost}", code="F142")
    return ExpertStack(at, [[each[i]] if up is None else [each[i], up[i]] for i in range(len(each))])


class MoeGraph(LlamaGraph):
    """Builds the graph of a mixture of experts. Families override how experts are chosen."""

    config: MoeConfig
    router = "gate"
    shared = "shared_expert"
    matrices = 0  # in a stack of experts: all of the layer's where it is 0

    @property
    def matrix_count(self) -> int:
        """Matrices in a stack of experts."""
        return self.matrices or self.config.experts

    def feed_forward(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.mlp."
        if not c.sparse[layer]:
            return super().feed_forward(x, layer)
        rows = ops.reshape(x, (self.batch * self.count, c.hidden))
        weights, ids = self.route(self.linear(rows, f"{at}{self.router}", c.experts, c.hidden), layer)
        found = self.experts_of(rows, weights, ids, at)
        if c.shared_inner:
            found = found + self.shared_expert(rows, at)
        return ops.reshape(found, x.shape)

    def experts_of(self, rows: Value, weights: Value, ids: Value, at: str) -> Value:
        """What its experts make of each row, in the proportion of the weights."""
        made = self.routed(self.spread(rows), ops.reshape(ids, (-1,)), at)
        found: Value = ops.combine_experts(made, weights)
        return found

    def routed(self, rows: Value, ids: Value, at: str) -> Value:
        """Rows through their experts: in the graph, or where it is cut, by whoever runs its stages."""
        if not self.is_cut:
            return self.expert(rows, ids, at)
        made = self.graph.input(f"{at}experts", rows.type)
        self.cuts += (ExpertCut(at, rows, ids, made),)
        return made

    def of_experts(self, at: str, slots: int) -> Graph:
        """The experts of a layer as a graph of their own: x, ids, and weights of so many experts as inputs."""
        self.graph, self.is_fed, self.matrices = Graph("experts"), True, slots
        self._known, self.bound, count = {}, {}, sym("M", 1)
        x, ids = self.graph.input("x", (count, self.config.hidden)), self.graph.input("ids", (count,), i64)
        made = self.expert(x, ids, at)
        self.check()
        return self.graph.outputs(made)

    def spread(self, rows: Value) -> Value:
        """Each row as often as it has experts."""
        count, chosen, hidden = rows.shape[0], self.config.chosen, self.config.hidden
        wide = ops.broadcast_to(ops.reshape(rows, (count, 1, hidden)), (count, chosen, hidden))
        return ops.reshape(wide, (count * chosen, hidden))

    def route(self, logits: Value, layer: int) -> tuple[Value, Value]:
        """The weights and the numbers of the experts of each row, [M, chosen]."""
        c = self.config
        scores = ops.softmax(logits, -1) if c.score == "softmax" else ops.sigmoid(logits)
        bias = f"layers.{layer}.mlp.{self.router}.e_score_correction_bias"
        choice = scores + ops.reshape(self.param(bias, (c.experts,)), (1, c.experts)) if self.has(bias) else scores
        if c.groups > 1:
            choice = self.of_best_groups(choice, is_sum=self.has(bias))
        _, ids = ops.topk(choice, c.chosen)
        weights = ops.take_along_axis(scores, ids)
        if c.renormalize:
            weights = weights / (ops.sum(weights, -1, keepdims=True) + 1e-20)
        return (weights * c.routed_scale if c.routed_scale != 1.0 else weights), ids

    def of_best_groups(self, choice: Value, *, is_sum: bool) -> Value:
        """Scores of the experts in the best groups, by their largest score or by the sum of their two largest."""
        c = self.config
        split = ops.reshape(choice, (choice.shape[0], c.groups, c.experts // c.groups))
        best = ops.sum(ops.topk(split, 2)[0], -1) if is_sum else ops.max(split, -1)
        flags = ops.one_hot(ops.topk(best, c.chosen_groups)[1], c.groups)  # [M, chosen groups, groups]
        kept = ops.reshape(ops.max(flags, 1), (choice.shape[0], c.groups, 1)) > 0
        return ops.reshape(ops.where(kept, split, -np.inf), choice.shape)

    def expert(self, rows: Value, ids: Value, at: str) -> Value:
        """Rows through the expert that each has the number of."""
        c = self.config
        if self.has(f"{at}experts.gate_proj"):
            shape = (self.matrix_count, c.hidden, c.expert_inner)
            gate, up = (self.grouped(rows, ids, f"{at}experts.{part}_proj", shape) for part in ("gate", "up"))
        else:
            both = self.grouped(
                rows, ids, f"{at}experts.gate_up_proj", (self.matrix_count, c.hidden, 2 * c.expert_inner)
            )
            gate, up = (ops.narrow(both, -1, i * c.expert_inner, c.expert_inner) for i in range(2))
        name = f"{at}experts.down_proj"
        return self.grouped(self.activated(gate) * up, ids, name, (self.matrix_count, c.expert_inner, c.hidden))

    def shared_expert(self, rows: Value, at: str) -> Value:
        c, name = self.config, f"{at}{self.shared}."
        gate, up = self.linears(rows, [f"{name}gate_proj", f"{name}up_proj"], (c.shared_inner,) * 2, c.hidden)
        found = self.linear(self.activated(gate) * up, f"{name}down_proj", c.hidden, c.shared_inner)
        if not self.has(f"{at}{self.shared}_gate.weight"):
            return found
        return found * ops.sigmoid(self.linear(rows, f"{at}{self.shared}_gate", 1, c.hidden))
