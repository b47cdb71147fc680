"""The structure of a module as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from strata.hir.build import HirModule


@dataclass(frozen=True, slots=True)
class Reflection:
    """A summary of a module; labels are those of its blocks, in order."""

    name: str
    policy: str
    node_count: int
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]
    labels: tuple[str, ...]
    blocks: dict[str, int]


def reflect(module: HirModule) -> Reflection:
    """A summary of a module."""
    made = [node for node in module.nodes if not node.is_leaf]
    histogram: dict[str, int] = {}
    for node in made:
        histogram[node.block.name] = histogram.get(node.block.name, 0) + 1
    return Reflection(
        module.name,
        module.fusion,
        len(module.nodes),
        tuple(x.text for x in module.inputs),
        tuple(x.text for x in module.params),
        tuple(x.label for x in module.results),
        tuple(node.label for node in made),
        histogram,
    )
