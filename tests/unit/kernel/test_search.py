"""The search for schedules under bad candidates: it ends within its budget, and its answer is never slower."""

from collections.abc import Iterator, Sequence

import pytest

from strata.kernel import Parallel, Schedule, SearchLimits, search

FIRST = Schedule((Parallel(1, 64),))


def endless(schedule: Schedule) -> Iterator[Schedule]:
    """Candidates without end: each has four successors."""
    for step in range(1, 5):
        yield Schedule((Parallel(1, schedule.parallel.grain + step),))


class Machine:
    """Times by grain; some candidates are refused: they crashed, hung, gave wrong results, or grew too large."""

    def __init__(self, refused: set[int], fastest: int) -> None:
        self.refused, self.fastest = refused, fastest
        self.tried: list[int] = []

    def __call__(self, wave: Sequence[Schedule]) -> list[float | None]:
        grains = [s.parallel.grain for s in wave]
        self.tried += grains
        return [None if g in self.refused else 1.0 + abs(g - self.fastest) for g in grains]


@pytest.mark.parametrize("refused", [set(), {65, 66}, {65, 66, 67, 68}, set(range(65, 2000))], ids=len)
def test_refused_candidates_do_not_stop_it(refused: set[int]) -> None:
    machine = Machine(refused, fastest=90)
    limits = SearchLimits(trials=40)
    trials = search(FIRST, endless, machine, limits)
    assert len(machine.tried) <= limits.trials * 2
    assert not {t.schedule.parallel.grain for t in trials} & refused
    assert trials[0].seconds <= next(t.seconds for t in trials if t.schedule == FIRST)
    if not refused:
        assert trials[0].seconds < trials[-1].seconds


def test_the_heuristics_schedule_wins_where_nothing_is_faster() -> None:
    trials = search(FIRST, endless, Machine(set(), fastest=64))
    assert trials[0].schedule == FIRST


def test_nothing_is_answered_where_the_first_cannot_be_measured() -> None:
    assert search(FIRST, endless, Machine({64}, fastest=70)) == []


def test_no_candidate_is_measured_twice() -> None:
    machine = Machine(set(), fastest=200)
    search(FIRST, endless, machine)
    assert len(machine.tried) == len(set(machine.tried))
