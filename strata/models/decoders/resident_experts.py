"""The experts of a decoder that stay in memory: a store for each layer, with the family's own feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strata.backends import backend_for
from strata.errors import FileError, OptionError
from strata.models.base import compile_bound
from strata.models.decoders.expert_weights import one_expert, slots_like
from strata.models.decoders.moe import MoeConfig, MoeGraph
from strata.models.generating.experts import ExpertPool, ExpertStore, ExpertStores
from strata.models.weights import Weights
from strata.runtime import CompiledGraph


def no_experts(kind: str) -> OptionError:
    """The error of a budget for a model that has no experts."""
    return OptionError(f"load: a model of the kind {kind!r} has no experts", code="O612")


def expert_stores(config: Any, make: Callable[..., Any], weights: Weights, budget: int, device: str) -> ExpertStores:
    """Stores for the layers of a mixture of experts; `make` builds the family's graph."""
    if not isinstance(config, MoeConfig) or not any(config.sparse):
        raise no_experts(config.family)
    if backend_for(device).home is not None:
        raise OptionError(f"load: {device} has memory of its own, and keeps all experts there", code="O612")
    layers = {f"layers.{i}.mlp.": _held(weights, f"layers.{i}.mlp.") for i in np.flatnonzero(config.sparse)}
    for held in layers.values():
        for name, stack in held.items():
            if stack.shape[0] != config.experts:
                raise FileError(
                    f"{name!r} is of {stack.shape[0]} experts, the configuration has {config.experts}", code="F142"
                )
    graphs: dict[Any, tuple[list[str], CompiledGraph]] = {}  # layers of one form share a graph

    def store(at: str) -> ExpertStore:
        held, names = layers[at], list[str]()

        def feed_forward(slots: int) -> CompiledGraph:
            room = {name: slots_like(stack, slots) for name, stack in held.items()}
            key = tuple((n.removeprefix(at), getattr(w, "kind", ""), w.shape) for n, w in room.items())
            if key not in graphs:
                graphs[key] = _feed_forward(make(config, room, 1, every=False), at, slots, device)
            names[:], graph = graphs[key]
            return graph

        def fetch(expert: int) -> list[np.ndarray]:
            return [one_expert(held[at + name], expert) for name in names]

        pool = ExpertPool(config.experts, budget)
        return ExpertStore(pool, fetch, spare=config.chosen, feed_forward=feed_forward)

    return ExpertStores(list(layers), store)


def _held(weights: Weights, at: str) -> dict[str, Any]:
    return {name: w for name, w in weights.items() if name.startswith(f"{at}experts.")}


def _feed_forward(builder: MoeGraph, at: str, slots: int, device: str) -> tuple[list[str], CompiledGraph]:
    """The family's experts as a graph of rows, ids and weights in slots; and the names of these behind `at`."""
    g = builder.of_experts(at, slots)
    return [name.removeprefix(at) for name in g.input_names[2:]], compile_bound(g, {}, device)
