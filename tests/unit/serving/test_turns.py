"""Requests for long answers, however many, do not keep a new one waiting; and all of them are answered."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from strata.models import PAGE, Decoder
from strata.serving import Engine
from strata.serving.turns import FIRST_TOKENS, IN_TURNS, in_turn, next_turns, who_makes_room, who_makes_room_for

Make = Callable[..., Decoder]
pytestmark = pytest.mark.filterwarnings("ignore")


def asked(number: int, tokens: int = 0, client: str = "a", last_step: int = 0) -> Any:
    return SimpleNamespace(number=number, tokens=[0] * tokens, client=client, last_step=last_step)


def numbers(requests: Any) -> list[int]:
    return [r.number for r in requests]


@pytest.mark.parametrize("client", ["attacker", "innocent"])
@pytest.mark.parametrize("count", [8, 40])
def test_long_answers_do_not_keep_a_new_request_waiting(decoder: Make, client: str, count: int) -> None:
    """They fill the KV cache; steps are counted until short questions are answered."""
    model = decoder(context=512, max_position_embeddings=512)
    engine = Engine(model, cache_tokens=4 * 512, max_requests=8, speculate=False)
    long = [engine.submit(f"hello {i}", max_tokens=100_000, client="attacker") for i in range(count)]
    for _ in range(150):  # they all have their first tokens, or wait for it
        engine.step()
    for _ in range(12):
        for _ in range(60):
            engine.step()
        question = engine.submit("hi", max_tokens=3, client=client)
        steps = 0
        while not question.is_done:
            steps += 1
            engine.step()
        if client == "innocent" or count == 8:
            assert steps <= 4
    assert bool(engine.load["waiting"]) == (count == 40)
    assert engine.metrics.snapshot()["counters"]["preemptions"] > 0
    for request in long[4:]:
        request.cancel()
    engine.run()
    for at, request in enumerate(long[:4]):
        assert request.text() == model.generate(f"hello {at}", max_tokens=512)
    assert engine.cache.pool.free == engine.cache.pool.pages


def test_all_are_answered_while_new_ones_come(decoder: Make) -> None:
    """Short questions, one after another, use the pages of one for a long answer; it is answered all the same."""
    model = decoder(context=512)
    engine = Engine(model, cache_tokens=2 * model.context, max_requests=4, speculate=False)
    long = [engine.submit(f"hello {i}", max_tokens=200) for i in range(6)]
    steps = 0
    while not all(r.is_done for r in long):
        if len(engine._waiting) < 2:
            engine.submit("a question of some length, to take a few pages", max_tokens=6)
        engine.step()
        steps += 1
        assert steps < 10_000
    for at, request in enumerate(long):
        assert request.text() == model.generate(f"hello {at}", max_tokens=200)


def test_clients_take_turns_in_the_batch(decoder: Make) -> None:
    """One request of a client has a token in each step, whatever another one asks for."""
    engine = Engine(decoder(context=512), max_requests=4, speculate=False, cache_tokens=64 * 512)
    for i in range(30):
        engine.submit(f"hello {i}", max_tokens=300, client="many")
    for _ in range(100):
        engine.step()
    alone = engine.submit("hello", max_tokens=200, client="one")
    steps = 0
    while not alone.is_done:
        steps += 1
        engine.step()
    assert steps <= 204


def test_what_is_not_at_its_end_counts_as_given(decoder: Make) -> None:
    """Who has been answered before does not wait for those whose long answers have only begun."""
    model = decoder(context=512)
    engine = Engine(model, max_requests=2, speculate=False, cache_tokens=64 * 512)
    assert engine.submit("hello", max_tokens=40, client="one").text()
    many = [engine.submit("hello", max_tokens=150, client="many") for _ in range(60)]
    for _ in range(40):
        engine.step()
    again = engine.submit("hello", max_tokens=2, client="one")
    for _ in range(4):
        engine.step()
    assert again.is_done
    assert not any(r.is_done for r in many)


def test_prompts_of_clients_take_turns(decoder: Make) -> None:
    engine = Engine(decoder(context=512), max_requests=4, max_tokens=8 * PAGE, speculate=False, prefix_cache=False)
    for i in range(12):
        engine.submit(f"{i} " * 30, max_tokens=1, client="many")
    alone = engine.submit("hello", max_tokens=1, client="one")
    engine.step()
    engine.step()
    assert alone.is_done


def test_turns() -> None:
    assert in_turn("aAbBcDE", str.isupper) == list("aAbBcDE")
    assert in_turn("abcABd", str.isupper) == list("aAbBcd")
    few = [asked(2, 3), asked(1, 90)]
    assert next_turns(few, 2, 2, 0) == few
    some = [asked(1, 90, last_step=7), asked(2, 90, last_step=5), asked(3, 4, last_step=8), asked(4, 1)]
    some.append(asked(5, 90, "b", 9))
    assert [numbers(next_turns(some, 1, 1, step)) for step in range(12, 16)] == [[2], [4], [4], [4]]
    assert numbers(next_turns(some, 2, 2, 13)) == [2, 4]
    assert numbers(next_turns(some, 4, 4, 13)) == [2, 4, 5, 3]
    old = [asked(i, FIRST_TOKENS, last_step=100 - i) for i in range(50)]
    assert numbers(next_turns(old, 2, 2, 101)) == [2 * IN_TURNS - 1, 2 * IN_TURNS - 2]  # the first of them in turns


def test_who_makes_room() -> None:
    served = [asked(1, 99), asked(2, 99), asked(3, 99, "b"), asked(4, 5)]
    assert who_makes_room(served).number == 2  # its client has two
    assert who_makes_room(served[2:]).number == 4  # nothing but the oldest
    new = asked(9, 0, "c")
    assert (found := who_makes_room_for(new, served, 4)) is not None
    assert found.number == 2
    assert who_makes_room_for(asked(9), served[2:], 4) is None
    young = [asked(i, 1) for i in range(5)]
    assert who_makes_room_for(asked(9), [*served, *young], 4) is None
    assert (found := who_makes_room_for(new, young, 4)) is not None
    assert found.number == 4
    crowd = [*(asked(i, 99) for i in range(4)), *(asked(10 + i) for i in range(IN_TURNS * 2))]
    assert (found := who_makes_room_for(new, crowd, 2)) is not None
    assert found.number == 17  # others than the young ones would make room in vain
    assert who_makes_room_for(asked(0, 70), crowd, 2) is None
    assert who_makes_room_for(asked(3, 70), served, 4) is None  # none came after it that is not young
    assert (found := who_makes_room_for(asked(1, 70), served, 4)) is not None
    assert found.number in (2, 3)
