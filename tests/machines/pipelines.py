"""Components for state machines: each multiplies by a number of its own."""

from __future__ import annotations

from strata.core import sym
from strata.mir import Graph
from strata.runtime import ModelComponent, ModelVariant


def component(profile: str, seq: int) -> ModelComponent:
    return ModelComponent(ModelVariant.encoder(1, seq), profile_key=profile)


def scaled(factor: int) -> Graph:
    g = Graph("component")
    return g.outputs(g.input("x", (sym("batch", 1, 2), sym("seq", 1, 4))) * float(factor) + 1.0)
