"""Which cases of a test `make test` runs, where they are too many for every run: a few, drawn afresh each time.

`@pytest.mark.few(8)` names their number. Without `--few` all cases run, as they do by `make test-all`.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence

import pytest


def drawn(cases: Sequence[Mapping[str, Hashable]], count: int, draw: random.Random) -> set[int]:
    """`count` of the cases, by their numbers: as many values of each parameter are among them as can be."""
    left, kept = list(range(len(cases))), set[int]()
    draw.shuffle(left)
    seen: set[tuple[str, Hashable]] = set()
    while left and len(kept) < count:
        at = max(left, key=lambda i: len(cases[i].items() - seen))
        left.remove(at)
        kept.add(at)
        seen |= cases[at].items()
    return kept


def _values(case: pytest.Function) -> dict[str, int]:
    """Parameters of a case and their values; a value is the same object in all cases that have it."""
    return {name: id(value) for name, value in case.callspec.params.items()}


def left_out(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Cases of the tests that are marked `few` which this run does without."""
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("few") and hasattr(item, "callspec"):
            tests.setdefault((str(item.path), item.originalname), []).append(item)
    out: list[pytest.Item] = []
    for (_, name), cases in tests.items():
        (count,) = cases[0].get_closest_marker("few").args  # type: ignore[union-attr] # only such are in it
        kept = drawn([_values(case) for case in cases], count, random.Random(f"{seed} {name}"))
        out += [case for at, case in enumerate(cases) if at not in kept]
    return out
