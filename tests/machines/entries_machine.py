"""Bounded tables: which entries are there, which goes next, and what was counted."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from strata.core import Table

KEYS = st.sampled_from([1, 2, 3, "1", (1, 2), None])


class EntriesMachine(RuleBasedStateMachine):
    """`Table` beside a list of keys, the next to go first."""

    @initialize(capacity=st.none() | st.integers(1, 4), policy=st.sampled_from(["lru", "fifo"]))
    def start(self, capacity: int | None, policy: str) -> None:
        self.entries: Table[object, object] = Table("buckets", capacity, policy)
        self.capacity, self.policy = capacity, policy
        self.order: list[object] = []
        self.values: dict[object, object] = {}
        self.counts: Counter[str] = Counter()

    @rule(key=KEYS, fails=st.booleans())
    def get_or_make(self, key: object, fails: bool) -> None:
        made = object()

        def make() -> object:
            if fails:
                raise ZeroDivisionError
            return made

        if key in self.order:
            self.counts["hits"] += 1
            assert self.entries.get_or_make(key, make) is self.values[key]
            self._used(key)
            return
        self.counts["misses"] += 1
        if fails:
            try:
                self.entries.get_or_make(key, make)
            except ZeroDivisionError:
                return
            raise AssertionError("a failure was kept from the caller")
        assert self.entries.get_or_make(key, make) is made
        self._added(key, made)

    @rule(key=KEYS)
    def get(self, key: object) -> None:
        assert self.entries.get(key) is self.values.get(key)
        if key in self.order:
            self._used(key)

    @rule()
    def clear(self) -> None:
        self.entries.clear()
        self.order, self.values = [], {}

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "entries"):
            return
        assert self.entries.keys() == self.order
        assert len(self.entries) == len(self.order)
        assert all(key in self.entries for key in self.order)
        counters = self.entries.counters
        assert (counters.hits, counters.misses, counters.evictions) == tuple(
            self.counts[name] for name in ("hits", "misses", "evictions")
        )

    def _used(self, key: object) -> None:
        if self.policy == "lru":
            self.order.remove(key)
            self.order.append(key)

    def _added(self, key: object, made: object) -> None:
        self.order.append(key)
        self.values[key] = made
        while self.capacity is not None and len(self.order) > self.capacity:
            del self.values[self.order.pop(0)]
            self.counts["evictions"] += 1
