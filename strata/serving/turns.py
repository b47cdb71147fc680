"""Who takes part in a step, and who makes room: new requests before those with many tokens, clients in turn.

A request is *young* until it has its first tokens. Requests for long answers may fill the batch and the KV cache: a
young one does not wait for their end. It takes part in the next steps; where there is no room for it, one that is not
young gives its pages back, and goes on later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from strata.serving.generation import Generation

FIRST_TOKENS: Final = 64  # until it has so many, a request is young
IN_TURNS: Final = 4  # times as many requests as a step takes are decoded in turns; the others wait for one to end
WAITED_SHARE: Final = 4  # one in so many places of a step is for who has waited longest
ADMITTED: Final = 16  # times as many may have pages of the KV cache
KEPT_FREE: Final = 8  # a part of the pages that requests which were preempted do not take: new ones come
PATIENCE: Final = 512  # steps after which a preempted request may preempt those that came after it
T = TypeVar("T")


def is_young(request: Generation) -> bool:
    """Whether it has not had its first tokens."""
    return len(request.tokens) < FIRST_TOKENS


def in_turn(items: Iterable[T], client: Callable[[T], Hashable]) -> list[T]:
    """The first of each client, then the second of each, and so on."""
    seen: Counter[Hashable] = Counter()
    ranked: list[tuple[int, T]] = []
    for item in items:
        ranked.append((seen[client(item)], item))
        seen[client(item)] += 1
    return [item for _, item in sorted(ranked, key=lambda pair: pair[0])]


def next_turns(ready: Sequence[Generation], most: int, entries: int, step: int) -> list[Generation]:
    """Up to `most` of the requests that may go on: of each client those with the fewest tokens.

    A quarter of the places and at least one are for who has waited longest; of a single place, each fourth step.
    """
    if len(ready) <= most:
        return list(ready)
    old = sorted((g for g in ready if not is_young(g)), key=lambda g: g.number)
    some = [*filter(is_young, ready), *in_turn(old, _client)[: IN_TURNS * entries]]
    some.sort(key=lambda g: g.last_step or step)
    kept = in_turn(some, _client)[: max(most // WAITED_SHARE, int(most > 1 or step % WAITED_SHARE == 0))]
    others = [g for g in some if g not in kept]
    others.sort(key=lambda g: min(len(g.tokens), FIRST_TOKENS))
    return [*kept, *in_turn(others, _client)][:most]


def who_makes_room(served: Sequence[Generation]) -> Generation:
    """Who is preempted where pages are short: of the client with the most requests that are not young, the one that
    came last. The oldest of them goes on to its end, so that all do, one after another."""
    old = [g for g in served if not is_young(g)]
    if len(old) < 2:
        return max(served, key=lambda g: g.number)
    counts = Counter(map(_client, old))
    return max(old, key=lambda g: (counts[g.client], g.number))


def who_makes_room_for(request: Generation, served: Sequence[Generation], entries: int) -> Generation | None:
    """Who is preempted for a request that was not let in; None where it has to wait.

    One that was preempted itself goes before those that came after it. A new one goes before those of a client that has
    more requests; and before those that are not young, unless more young ones than a step takes are there. Where no
    more young ones are let in, others than those would make room in vain.
    """
    young = sum(map(is_young, served))
    is_crowded = young >= IN_TURNS * entries
    if request.tokens:
        if is_crowded:
            return None
        after = [g for g in served if not is_young(g) and g.number > request.number]
        return who_makes_room(after) if after else None
    counts = Counter(map(_client, served))
    largest = max(counts, key=lambda c: counts[c], default="")
    if counts[largest] > counts[request.client] + 1:
        theirs = [g for g in served if g.client == largest and (is_young(g) or not is_crowded)]
        return who_makes_room(theirs) if theirs else None
    return who_makes_room(served) if young < entries and len(served) - young > 1 else None


def _client(request: Generation) -> str:
    return request.client
