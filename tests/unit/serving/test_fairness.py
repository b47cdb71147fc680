"""A request that has just come waits no more than twice as long as alone, whatever steps for the others take.

Time is what a clock says that goes on by what each call of the model costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strata.models import PAGE, Decoder
from strata.serving import Engine, Generation
from strata.serving.fairness import LEVELS, MOST_ALONE, FairShare, level

Make = Callable[..., Decoder]
Cost = Callable[[int, int], float]
pytestmark = pytest.mark.filterwarnings("ignore")


def by_rows(rows: int, tokens: int) -> float:
    """A row of a decode costs as much as another, a token of a prompt a quarter."""
    return float(rows) if tokens == 1 else 1.0 + 0.25 * tokens


def flat(rows: int, tokens: int) -> float:
    """Rows cost next to nothing beside reading the weights."""
    return 1.0 + 0.02 * rows if tokens == 1 else 1.0 + 0.02 * tokens


class Simulated:
    """An engine on a clock of its own; `arrives` may submit requests while the model computes."""

    def __init__(self, model: Decoder, cost: Cost, **options: Any) -> None:
        self.now = 0.0
        self.arrives: Callable[[], None] = lambda: None
        self.calls: list[tuple[int, int]] = []  # rows and tokens
        self.engine = Engine(model, speculate=False, prefix_cache=False, **options)
        self.engine.fair = FairShare(lambda: self.now)
        step = self.engine.cache.step

        def timed(tables: Any, ids: np.ndarray, **more: Any) -> np.ndarray:
            self.now += cost(*ids.shape)
            self.calls.append(ids.shape)
            self.arrives()
            return step(tables, ids, **more)

        self.engine.cache.step = timed  # type: ignore[method-assign]

    def ask(self, prompt: str, **options: Any) -> Generation:
        return self.engine.submit(prompt, **options)

    def took(self, prompt: str, **options: Any) -> float:
        """How long a question takes that comes in the middle of a call, from then on."""
        asked: list[tuple[float, Generation]] = []

        def comes() -> None:
            now, self.now = self.now, (before + self.now) / 2
            asked.append((self.now, self.ask(prompt, **options)))
            self.now, self.arrives = now, lambda: None

        before, self.arrives = self.now, comes
        if not self.engine.step():  # nobody else is here
            comes()
        begun, question = asked[0]
        while not question.is_done:
            self.engine.step()
        return self.now - begun


@pytest.mark.parametrize("cost", [by_rows, flat])
@pytest.mark.parametrize("others", [4, 15, 40])
@pytest.mark.parametrize("prompt", ["hello", "h" * 40])
@pytest.mark.parametrize("tokens", [3, 8])
def test_a_question_beside_long_answers(decoder: Make, cost: Cost, others: int, prompt: str, tokens: int) -> None:
    model = decoder(context=512, max_position_embeddings=512)
    alone = Simulated(model, cost).took(prompt, max_tokens=tokens)
    busy = Simulated(model, cost, cache_tokens=64 * 512)
    for i in range(others):
        busy.ask(f"hello {i}", max_tokens=400)
    for _ in range(20 + others * 3):
        busy.engine.step()
    waits = []
    for _ in range(9):
        waits.append(busy.took(prompt, max_tokens=tokens))
        for _ in range(3):
            busy.engine.step()
    rows = min(others, 15)
    assert np.median(waits) <= 2 * alone + cost(rows, 1) / 2  # half of the step that it came in


def test_a_question_beside_long_prompts(decoder: Make) -> None:
    """It waits for half of the part that is read when it comes."""
    model = decoder(context=512, max_position_embeddings=512)
    alone = Simulated(model, by_rows).took("hello", max_tokens=3)
    busy = Simulated(model, by_rows, cache_tokens=64 * 512)
    waits = []
    for _ in range(12):
        while sum(len(g.prompt_ids) > 9 for g in busy.engine._served) < 4:
            busy.ask("a long prompt " * 30, max_tokens=2)
            busy.engine.step()
        waits.append(busy.took("hello", max_tokens=3))
    assert np.median(waits) <= 2 * alone + by_rows(1, 4 * PAGE) / 2


@pytest.mark.parametrize("cost", [by_rows, flat])
def test_nothing_is_lost_between_equals(decoder: Make, cost: Cost) -> None:
    """Requests that come together are decoded together; where rows cost little, so are all others."""
    model = decoder(context=512, max_position_embeddings=512)
    made = Simulated(model, cost, cache_tokens=64 * 512, max_requests=16)
    requests = [made.ask(f"hello {i}", max_tokens=40) for i in range(16)]
    made.engine.run()
    assert [rows for rows, tokens in made.calls if tokens == 1] == [16] * 39
    assert all(r.is_done for r in requests)
    if cost is flat:
        old = [made.ask(f"hello {i}", max_tokens=100) for i in range(8)]
        for _ in range(40):
            made.engine.step()
        made.took("hello", max_tokens=8)  # it finds out what a row alone costs
        made.calls.clear()
        made.took("hello", max_tokens=8)
        assert {rows for rows, tokens in made.calls if tokens == 1} <= {8, 9}
        assert all(not r.is_done for r in old)


def test_others_have_their_half(decoder: Make) -> None:
    """Questions come without an end; long answers go on, with half of the time, and are what they are alone."""
    model = decoder(context=512, max_position_embeddings=512)
    made = Simulated(model, by_rows, cache_tokens=64 * 512, max_requests=8)
    long = [made.ask(f"hello {i}", max_tokens=150) for i in range(6)]
    for _ in range(30):
        made.engine.step()
    start, tokens = made.now, sum(len(r.tokens) for r in long)
    questions: list[Generation] = []
    while not any(r.is_done for r in long):
        if sum(not q.is_done for q in questions) < 2:
            questions.append(made.ask("hi", max_tokens=3))
        made.engine.step()
    given = sum(len(r.tokens) for r in long) - tokens  # seconds, as a row costs one
    assert 0.3 <= given / (made.now - start) <= 0.6
    made.engine.run()
    assert [r.text() for r in long] == [model.generate(f"hello {i}", max_tokens=150) for i in range(6)]


def test_a_slow_step_is_forgotten(decoder: Make) -> None:
    """One step that took much longer than others does not keep the others waiting for as long."""
    model = decoder(context=512, max_position_embeddings=512)
    made = Simulated(model, by_rows, cache_tokens=64 * 512)
    old = [made.ask(f"hello {i}", max_tokens=400) for i in range(4)]
    for _ in range(30):
        made.engine.step()

    def hiccup() -> None:
        made.now += 1e6
        made.arrives = lambda: None
        for _ in range(4):
            made.ask("hi", max_tokens=LEVELS[-1])

    made.arrives = hiccup
    made.engine.step()
    tokens = [len(r.tokens) for r in old]
    for _ in range(3 * (MOST_ALONE + 1)):
        made.engine.step()
    assert [len(r.tokens) for r in old] != tokens


def test_a_step_ends_where_a_request_comes(decoder: Make) -> None:
    """The rest of a long prompt is read later; not twice in a row, and to the same bits."""
    model = decoder(context=512, max_position_embeddings=512)
    made = Simulated(model, by_rows, cache_tokens=64 * 512)
    text = "a long prompt, which is alone. " * 12
    long = made.ask(text, max_tokens=5)
    questions: list[Generation] = []
    made.arrives = lambda: questions.append(made.ask("hi", max_tokens=1)) if len(questions) < 4 else None
    made.engine.step()
    assert made.calls == [(1, 4 * PAGE)]
    made.engine.step()
    assert made.calls[1] == (1, 2)
    made.engine.run()
    assert all(q.text() == model.generate("hi", max_tokens=1) for q in questions)
    assert long.text() == model.generate(text, max_tokens=5)
    assert sum(tokens for _, tokens in made.calls if tokens > 2) == len(text)


def test_levels() -> None:
    class Asked:
        def __init__(self, tokens: int) -> None:
            self.tokens = [0] * tokens

    found = [level(Asked(n)) for n in (0, LEVELS[0], LEVELS[1] - 1, LEVELS[1], LEVELS[2])]  # type: ignore[arg-type]
    assert found == [0, 1, 1, 2, 3]
