"""A violation made small: fewer outputs and steps, smaller sizes, simpler numbers, for as long as it stays the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from strata.errors import StrataError
from strata.mir import evaluate_values
from tests.differential.meaning import values_of
from tests.differential.program import Leaf, Program, renamed, without_unused

SECONDS = 20.0


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = SECONDS) -> Program:
    """The smallest program found that still fails."""
    end = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(program):
            if time.monotonic() > end:
                return program
            if _fails(candidate, fails):
                program, smaller = candidate, True
                break
    return program


def _fails(program: Program, fails: Callable[[Program], bool]) -> bool:
    try:
        return fails(program)
    except (StrataError, AssertionError, KeyError, IndexError, ValueError, TypeError):
        return False


def dies(check: Callable[[Program], Any], program: Program) -> bool:
    """Whether a check ends its process, tried in a copy of this one."""
    child = os.fork()
    if child == 0:
        try:
            os.close(2)
            check(program)
        except BaseException:  # noqa: BLE001 - only a crash counts
            os._exit(0)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0


def _candidates(program: Program) -> Iterator[Program]:
    for i in program.outputs if len(program.outputs) > 1 else ():
        yield without_unused(replace(program, outputs=(i,)))
    yield from _earlier(program)
    yield from _cut(program)
    for size in program.sizes:
        for value in (0, 1, 2, 3, size.value // 2, size.value - 1):
            if size.low <= value < size.value:
                yield program.at({size.name: value})
    yield from _plainer(program)


def _earlier(program: Program) -> Iterator[Program]:
    """Outputs that are inputs of what makes them."""
    made = program.producers()
    for i in program.outputs:
        for at in made[i].refs() if i in made else ():
            yield without_unused(replace(program, outputs=tuple(at if j == i else j for j in program.outputs)))


def _cut(program: Program) -> Iterator[Program]:
    """A step's results given as leaves."""
    try:
        with np.errstate(all="ignore"):
            _, values = values_of(program)
            feeds = program.arrays()
            known = {values[i]: feeds[f"x{i}"] for i in range(len(program.leaves))}
            arrays = evaluate_values(values, known, {})
    except StrataError:
        return
    at = len(program.leaves)
    for number, step in enumerate(program.steps):
        here = range(at, at + step.count)
        at += step.count
        if any(i in program.outputs for i in here):
            continue
        new = [Leaf(arrays[i].shape, values[i].dtype, data=arrays[i]) for i in here]
        order = [
            *range(len(program.leaves)),
            *here,
            *(i for i in range(len(program.leaves), len(arrays)) if i not in here),
        ]
        table = {old: now for now, old in enumerate(order)}
        steps = [renamed(s, table) for k, s in enumerate(program.steps) if k != number]
        outputs = tuple(table[i] for i in program.outputs)
        yield without_unused(replace(program, leaves=(*program.leaves, *new), steps=tuple(steps), outputs=outputs))


def _plainer(program: Program) -> Iterator[Program]:
    """Leaves with one number in all places, or shorter."""
    arrays = program.arrays()
    for i, leaf in enumerate(program.leaves):
        a = arrays[f"x{i}"]
        for number in (0, 1, *a.reshape(-1)[:6]):
            filled = np.full(a.shape, number, a.dtype)
            if a.size and leaf.data is None and not leaf.style.startswith("all"):
                yield _with(program, i, replace(leaf, data=filled))
        if leaf.data is None:
            continue
        for axis, d in enumerate(leaf.shape):
            if isinstance(d, int) and d > 1:
                cut = np.take(a, range(d // 2), axis)
                yield _with(program, i, replace(leaf, shape=cut.shape, data=cut))


def _with(program: Program, at: int, leaf: Leaf) -> Program:
    return replace(program, leaves=tuple(leaf if i == at else x for i, x in enumerate(program.leaves)))
