"""Regular expressions whose time is linear in the text.

The pattern comes from the model, and Python's matcher tries alternatives one after the other: `(a+)+$` takes a time
that doubles with every letter. Here all alternatives are followed at once (Thompson's construction), and sets of states
that were met before are looked up. Python's parser reads the pattern, and its matcher decides single characters and
places, so that the language is Python's; what no such machine can do, references back and looking around, is refused,
as in the RE2 library that the standard names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from strata.core import Deadline, Meter
from strata.errors import FileError

MEMORY = 1 << 12  # sets of states and characters that are remembered
BETWEEN = 1 << 10  # characters, or states of one, between looks at the clock
_parser: Any = import_module("re._parser")
_compiler: Any = import_module("re._compiler")

# A state is what it needs to be left, a matcher for one character (`takes`) or for a place, and where it leads.
State = int


class FullMatch:
    """`FullMatch("a+b")(text)` says whether all of a text is of a pattern."""

    def __init__(self, pattern: str) -> None:
        try:
            parsed = _parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise FileError(f"pattern {_short(pattern)}: {error}", code="F504") from None
        self.pattern = pattern
        self._flags: int = parsed.state.flags
        self._matchers: list[Any] = []  # of each state: one character or a place; None where it is free to leave
        self._takes: list[bool] = []
        self._next: list[tuple[State, ...]] = []
        self._states = Meter("max_nodes", f"states of the pattern {_short(pattern)}")
        self._by_code: dict[Any, Any] = {}
        self._parsed = parsed
        self._end = self._state()
        self._start = self._sequence(parsed, self._end, self._flags)
        self._has_places = any(m is not None and not t for m, t in zip(self._matchers, self._takes, strict=True))
        self._known: dict[tuple[frozenset[State], str], frozenset[State]] = {}

    def __call__(self, text: str) -> bool:
        deadline = Deadline(f"the pattern {_short(self.pattern)}")
        states = self._closed([self._start], text, 0)
        for at, letter in enumerate(text):
            if not states:
                return False
            if not at % BETWEEN or len(states) > BETWEEN:
                deadline.check()
            key = states, letter
            found = None if self._has_places else self._known.get(key)
            if found is None:
                found = self._step(states, text, at)
                if len(self._known) >= MEMORY:
                    self._known.clear()
                self._known[key] = found
            states = found
        return self._end in states

    def _step(self, states: Iterable[State], text: str, at: int) -> frozenset[State]:
        left = [
            after
            for state in states
            if self._takes[state] and self._matchers[state].match(text, at)
            for after in self._next[state]
        ]
        return self._closed(left, text, at + 1)

    def _closed(self, states: Iterable[State], text: str, at: int) -> frozenset[State]:
        """States with all that are reached from them without a character."""
        found: set[State] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state in found:
                continue
            found.add(state)
            matcher = self._matchers[state]
            if not self._takes[state] and (matcher is None or matcher.match(text, at)):
                waiting += self._next[state]
        return frozenset(found)

    # construction, from the end of the pattern to its start

    def _state(self, *after: State, matcher: Any = None, takes: bool = False) -> State:
        self._states.add()
        self._matchers.append(matcher)
        self._takes.append(takes)
        self._next.append(after)
        return len(self._next) - 1

    def _sequence(self, items: Any, after: State, flags: int) -> State:
        for code, value in reversed(list(items)):
            after = self._item(code, value, after, flags)
        return after

    def _item(self, code: Any, value: Any, after: State, flags: int) -> State:
        match str(code):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._state(after, matcher=self._matcher(code, value, flags), takes=True)
            case "AT":
                return self._state(after, matcher=self._matcher(code, value, flags))
            case "BRANCH":
                return self._state(*(self._sequence(branch, after, flags) for branch in value[1]))
            case "SUBPATTERN":
                _, add, remove, inner = value
                return self._sequence(inner, after, (flags | add) & ~remove)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                return self._repeat(least, most, after, lambda then: self._sequence(inner, then, flags))
        raise FileError(
            f"pattern {_short(self.pattern)}: {str(code).lower().replace('_', ' ')} takes more than linear time",
            code="F504",
        )

    def _repeat(self, least: int, most: Any, after: State, make: Callable[[State], State]) -> State:
        if most is _parser.MAXREPEAT:
            again = self._state()
            self._next[again] = (make(again), after)
            after = again
        else:
            end = after
            for _ in range(most - least):
                after = self._state(make(after), end)
        for _ in range(least):
            after = make(after)
        return after

    def _matcher(self, code: Any, value: Any, flags: int) -> Any:
        """Python's matcher of one character or place."""
        key = str(code), str(value), flags
        if key not in self._by_code:
            one = _parser.SubPattern(self._parsed.state, [(code, value)])
            state, kept = self._parsed.state, self._parsed.state.flags
            state.flags = flags
            try:
                self._by_code[key] = _compiler.compile(one, flags)
            finally:
                state.flags = kept
        return self._by_code[key]


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")
