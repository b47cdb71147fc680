"""What a step computes: those being continued first, then prompts, of which one may be cut."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from strata.errors import OptionError, UnknownNameError
from strata.serving import AdapterQueue, Batcher, Prefill, PrefillChunk


def queue(*totals: int) -> deque[Prefill[str]]:
    return deque(Prefill(f"p{i}", total) for i, total in enumerate(totals))


def test_those_being_continued_come_first() -> None:
    prompts = queue(3, 4)
    batch = Batcher(10, 8).build(["a", "b", "c"], prompts)
    assert batch.decodes == ("a", "b", "c")
    assert batch.pieces == (PrefillChunk("p0", 0, 3, True), PrefillChunk("p1", 0, 4, True))
    assert batch.tokens == 10
    assert not prompts
    assert Batcher(2, 8).build(["a", "b", "c"], queue(1)).decodes == ("a", "b")


def test_the_first_prompt_that_does_not_fit_is_cut() -> None:
    prompts = queue(5, 3, 1)
    batch = Batcher(8, 8).build(["a"], prompts)
    assert batch.tokens == 8
    assert batch.pieces == (PrefillChunk("p0", 0, 5, True), PrefillChunk("p1", 0, 2, False))
    assert [(p.item, p.total - p.done, p.done) for p in prompts] == [("p1", 1, 2), ("p2", 1, 0)]  # nobody overtakes it
    assert Batcher(8, 8).build([], prompts).pieces == (PrefillChunk("p1", 2, 3, True), PrefillChunk("p2", 0, 1, True))


def test_at_most_so_many_sequences() -> None:
    prompts = queue(1, 1, 1)
    batch = Batcher(100, 3).build(["a"], prompts)
    assert [p.item for p in batch.pieces] == ["p0", "p1"]
    assert len(prompts) == 1
    assert Batcher(100, 1).build(["a", "b"], queue(1)).pieces == ()


def test_cuts_keep_their_grain_and_leave_a_rest() -> None:
    assert Batcher(40, 8, 16, 4).build([], queue(100)).pieces[0].end == 32
    assert Batcher(40, 8, 16, 4).build([], queue(36 + 5)).pieces[0].end == 32
    assert Batcher(34, 8, 16, 4).build([], queue(36)).pieces[0].end == 16  # 4 would be left
    assert Batcher(15, 8, 16).build([], queue(36)).pieces == ()


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    batcher = Batcher(64, 8, 16, 4, chunk=32)
    prompts = queue(200, 150, 10, 20)
    batch = batcher.build(["a"], prompts)
    assert batch.pieces == (
        PrefillChunk("p2", 0, 10, True),
        PrefillChunk("p3", 0, 20, True),
        PrefillChunk("p0", 0, 32, False),
    )
    assert [(p.item, p.done) for p in prompts] == [("p0", 32), ("p1", 0)]
    assert batcher.build(["a"], prompts, spares=True).pieces == ()
    assert batcher.build([], prompts, spares=True).pieces == (PrefillChunk("p0", 32, 64, False),)  # nobody is spared
    prompts.append(Prefill("p4", 5))
    assert batcher.build([], prompts, spares=True).pieces == (PrefillChunk("p4", 0, 5, True),)
    alone = queue(200)
    assert batcher.build([], alone).pieces == (PrefillChunk("p0", 0, 64, False),)
    assert batcher.build(["a"], alone).pieces == (PrefillChunk("p0", 64, 96, False),)


def test_every_token_is_read_once_in_order(rng: np.random.Generator) -> None:
    for _ in range(200):
        totals = rng.integers(1, 90, rng.integers(1, 6)).tolist()
        entries = int(rng.integers(1, 5))
        chunk = [None, 32, 48, 64][int(rng.integers(4))]
        batcher = Batcher(int(rng.integers(32 + entries, 80)), entries, 16, 4, chunk)
        prompts, seen = queue(*totals), {f"p{i}": 0 for i in range(len(totals))}
        while prompts:
            batch = batcher.build(["d"] * int(rng.integers(0, entries)), prompts, spares=bool(rng.integers(2)))
            assert batch.tokens
            assert batch.tokens <= batcher.max_tokens
            assert len(batch.decodes) + len(batch.pieces) <= entries
            for piece in batch.pieces:
                assert piece.start == seen[piece.item] < piece.end
                assert piece.start % 16 == 0
                seen[piece.item] = piece.end
                total = totals[int(piece.item[1:])]
                assert piece.is_last == (piece.end == total)
                assert piece.is_last or total - piece.end > 4
        assert list(seen.values()) == totals


def test_steps_that_are_never_filled_are_refused() -> None:
    for wrong in ((0, 1), (1, 0), (1, 1, 0), (1, 1, 1, -1), (8, 1, 1, 0, 1)):
        with pytest.raises(OptionError, match="never filled"):
            Batcher(*wrong)


def test_neighbours_with_one_adapter_go_together() -> None:
    line: AdapterQueue[int] = AdapterQueue(3, known=("fr", "de"))
    for i, adapter in enumerate(["fr", "fr", "de", "fr", "fr", "fr", "fr", None]):
        line.put(i, adapter)
    assert len(line) == 8
    found = [line.batch() for _ in range(5)]
    assert found == [("fr", [0, 1]), ("de", [2]), ("fr", [3, 4, 5]), ("fr", [6]), (None, [7])]
    assert line.swaps == 4
    assert line.batch() == (None, [])
    with pytest.raises(UnknownNameError, match="no adapter 'it'; known: de, fr"):
        line.put(9, "it")
    line.put(1, "de")
    assert line.drop(1)
    assert not line.drop(1)
    with pytest.raises(OptionError, match="a batch of 0"):
        AdapterQueue(0)
