"""Pipelines of models: stages that take the outputs of others, run in topological order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strata.errors import OptionError, UnknownNameError

Stage = tuple[Callable[..., Any], Sequence[str]]


def schedule(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Topological order of names by what each needs; of those that could be next, the first named.

    What is needed and not named itself is an input. A cycle is an error that names it.
    """
    order: list[str] = []
    placed: set[str] = set()
    while len(order) < len(needs):
        ready = [n for n in needs if n not in placed and all(m in placed or m not in needs for m in needs[n])]
        if not ready:
            raise OptionError(f"pipeline: {' needs '.join(_circle(needs, placed))}", code="O613")
        order.append(ready[0])
        placed.add(ready[0])
    return order


def _circle(needs: Mapping[str, Sequence[str]], placed: set[str]) -> list[str]:
    """Names that need each other in a circle, the first one at both ends."""
    name = next(n for n in needs if n not in placed)
    path: list[str] = []
    while name not in path:
        path.append(name)
        name = next(m for m in needs[name] if m in needs and m not in placed)
    return [*path[path.index(name) :], name]


class Pipeline:
    """Stages by name: a function, and the names of its arguments: inputs, or other stages.

    Pipeline({"found": (search, ["vector"]), "vector": (model.embed, ["question"])}).run(question="what?")
    """

    def __init__(self, stages: Mapping[str, Stage]) -> None:
        self._stages = dict(stages)
        self.order = tuple(schedule({name: needs for name, (_, needs) in stages.items()}))
        named = (n for _, needs in stages.values() for n in needs)
        self.inputs = tuple(dict.fromkeys(n for n in named if n not in stages))

    def run(self, **inputs: Any) -> dict[str, Any]:
        """Run all stages; their results by name."""
        wrong = set(inputs) ^ set(self.inputs)
        if wrong:
            raise UnknownNameError(
                f"pipeline: takes {', '.join(self.inputs) or 'nothing'}, got {', '.join(inputs) or 'nothing'}",
                code="N601",
            )
        known = dict(inputs)
        for name in self.order:
            function, needs = self._stages[name]
            known[name] = function(*(known[n] for n in needs))
        return {name: known[name] for name in self.order}
