"""Parts of a lazy plan that do not depend on each other, and running them at the same time.

A plan whose outputs, or whose last steps, join branches with enough work of their own is several programs: one for each
branch, and one for what joins them. Each has the bits that it has alone, so that the order does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strata.config import Config, using_config
from strata.core import SharedThreads, available_threads
from strata.mir import Constant, Graph, Node, Value, substitute_values
from strata.runtime import CompiledGraph, Session, run_price
from strata.tensor.data import Handle, handle_of

WORTH_A_BRANCH = 200e-6  # seconds of work by NumPy, below which a branch is not worth a thread
MOST_JOINS = 32  # steps, from the outputs down, before which branches are looked for

_threads = SharedThreads(max(2, min(16, os.cpu_count() or 2)), "strata-branch")


@dataclass(frozen=True)
class Branch:
    """A separate program: its values, and the leaves and values of others that it reads."""

    values: list[Value]
    reads: list[Value]
    compiled: CompiledGraph


def split(wanted: Sequence[Value]) -> tuple[list[list[Value]], bool]:
    """Groups of values that can be computed apart, and whether something is left that joins them; none: one program."""
    frontier = list(dict.fromkeys(wanted))
    if any(not x.type.is_static for x in frontier):
        return [], False
    position = {id(n): i for i, n in enumerate(_own_nodes(frontier))}
    joins = False
    for _ in range(MOST_JOINS):
        groups = _groups(frontier)
        if sum(run_price(_own_nodes(g)) >= WORTH_A_BRANCH for g in groups) > 1:
            return groups, joins
        if not frontier:
            break
        last = max(frontier, key=lambda x: position[id(x.node)])
        below = [x for x in last.node.inputs if not _is_given(x)]
        if any(not x.type.is_static for x in below):
            break
        frontier = list(dict.fromkeys([x for x in frontier if x.node is not last.node] + below))
        joins = True
    return [], False


def _is_given(x: Value) -> bool:
    return handle_of(x) is not None or isinstance(x.node.op, Constant)


def _own_nodes(values: Sequence[Value]) -> list[Node]:
    """What computes values from storage, producers first."""
    found: list[Node] = []
    seen: set[int] = set()
    stack: list[tuple[Value, bool]] = [(x, False) for x in reversed(values)]
    while stack:
        x, done = stack.pop()
        if done:
            found.append(x.node)
        elif id(x.node) not in seen and not _is_given(x):
            seen.add(id(x.node))
            stack.append((x, True))
            stack.extend((i, False) for i in reversed(x.node.inputs))
    return found


def _groups(values: Sequence[Value]) -> list[list[Value]]:
    """Values that share nothing that is computed are in different groups."""
    owner: dict[int, int] = {}
    group = list(range(len(values)))

    def root(i: int) -> int:
        while group[i] != i:
            i = group[i]
        return i

    for i, x in enumerate(values):
        for node in _own_nodes([x]):
            other = owner.setdefault(id(node), i)
            group[root(i)] = root(other)
    found: dict[int, list[Value]] = {}
    for i, x in enumerate(values):
        found.setdefault(root(i), []).append(x)
    return list(found.values())


class Branches:
    """The programs of a plan that is in branches."""

    def __init__(self, groups: list[list[Value]], wanted: list[Value], *, joins: bool, settings: Config) -> None:
        self.between = [x for group in groups for x in group if x not in wanted]
        self.parts = [_program(group, [], settings) for group in groups]
        known = [x for group in groups for x in group]
        self.last = _program(wanted, known, settings) if joins else None
        self.buffers = {x: np.empty(x.type.static_shape, x.dtype.np) for x in self.between}

    def clone(self) -> Branches:
        """The same programs, with their own memory between them."""
        made = copy(self)
        made.buffers = {x: np.empty_like(array) for x, array in self.buffers.items()}
        return made

    @property
    def programs(self) -> list[CompiledGraph]:
        return [b.compiled for b in (*self.parts, *(() if self.last is None else (self.last,)))]

    def run(self, leaves: dict[Value, Handle], outputs: dict[Value, np.ndarray], settings: Config) -> None:
        """All branches, at the same time where there are threads and no step of theirs is Python's; then the rest."""
        places = {**self.buffers, **outputs}

        def arrays(branch: Branch) -> dict[str, Any]:
            return {f"d{i}": places[x] if x in places else leaves[x].array for i, x in enumerate(branch.reads)}

        threads = available_threads(settings.num_threads)
        together = settings.concurrent and threads > 1 and not any(b.compiled.host_steps for b in self.parts)
        share = replace(settings, num_threads=max(1, threads // len(self.parts))) if together else settings

        def one(branch: Branch) -> None:
            with using_config(share):
                branch.compiled.run_into(arrays(branch), [places[x] for x in branch.values])

        if together:
            waiting = [_threads.submit(one, b) for b in self.parts[1:]]
            try:
                one(self.parts[0])
            finally:
                for future in waiting:
                    future.result()
        else:
            for branch in self.parts:
                one(branch)
        if self.last is not None:
            self.last.compiled.run_into(arrays(self.last), [places[x] for x in self.last.values])


def _program(values: list[Value], known: list[Value], settings: Config) -> Branch:
    """A program of values, of storage and of values that are known by then."""
    given = set(known)
    reads = _reached(values, given)
    graph = Graph("branch" if not known else "joined")
    table = {x: graph.input(f"d{i}", _kind(x)) for i, x in enumerate(reads)}
    graph.outputs(*substitute_values(values, table))
    return Branch(values, reads, Session(settings.device).compile(graph))


def _kind(x: Value) -> Any:
    handle = handle_of(x)
    return x.type if handle is None else handle.type


def _reached(values: Sequence[Value], given: set[Value]) -> list[Value]:
    """Storage and known values that values are computed from."""
    found: dict[Value, None] = {}
    seen: set[int] = set()
    stack = list(reversed(values))
    while stack:
        x = stack.pop()
        if x in given or handle_of(x) is not None:
            found[x] = None
        elif id(x.node) not in seen:
            seen.add(id(x.node))
            stack.extend(reversed(x.node.inputs))
    return list(found)
