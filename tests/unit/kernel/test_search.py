"""The search over schedules, with a made-up clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from strata.backends.llvm.compile import lower, machine_of
from strata.core import Target, sym
from strata.kernel import (
    Changes,
    Limits,
    Parallel,
    Schedule,
    Vectorise,
    parse_kernel,
    parse_schedule,
    search,
    show_kernel,
)
from tests.unit.kernel import samples


def grain(schedule: Schedule) -> int:
    return schedule.parallel.grain


def doubled_or_halved(schedule: Schedule) -> Iterator[Schedule]:
    for value in (grain(schedule) * 2, grain(schedule) // 2):
        yield Schedule((Parallel(1, max(1, value)),))


def test_the_search_walks_to_the_fastest_schedule() -> None:
    def measure(schedules: Sequence[Schedule]) -> list[float | None]:
        return [abs(grain(s) - 64) + 1.0 for s in schedules]

    trials = search(Schedule((Parallel(1, 4),)), doubled_or_halved, measure)
    assert grain(trials[0].schedule) == 64
    assert [t.seconds for t in trials] == sorted(t.seconds for t in trials)


def test_the_first_schedule_stays_where_nothing_is_faster() -> None:
    first = Schedule((Parallel(1, 4),))
    trials = search(first, doubled_or_halved, lambda ss: [1.0 if s == first else 2.0 for s in ss])
    assert trials[0].schedule == first


def test_a_refused_schedule_is_never_chosen() -> None:
    first = Schedule((Parallel(1, 4),))
    trials = search(first, doubled_or_halved, lambda ss: [1.0 if s == first else None for s in ss])
    assert [t.schedule for t in trials] == [first]
    assert search(first, doubled_or_halved, lambda ss: [None for _ in ss]) == []


def test_a_search_is_bounded() -> None:
    count = 0

    def measure(schedules: Sequence[Schedule]) -> list[float | None]:
        nonlocal count
        count += len(schedules)
        return [1.0 / grain(s) for s in schedules]

    search(Schedule((Parallel(1, 1),)), doubled_or_halved, measure, Limits(trials=9))
    assert count == 9


KERNELS = {
    "softmax": samples.softmax(sym("R"), 1024).kernel,
    "layernorm": samples.layernorm(64, 768).kernel,
    "column_sum": samples.reduction((sym("R"), 300), (0,)).kernel,
    "merge_heads": samples.merge_heads(2, 3, 40, 16).kernel,
}


@pytest.mark.parametrize("name", KERNELS)
def test_changes_are_distinct_print_and_keep_chunks_whole(name: str) -> None:
    target = Target.host()
    lowered = lower(KERNELS[name], target)
    changes = Changes(lowered.kernel, lowered.nest, machine_of(target))
    made = list(changes(lowered.schedule))
    assert made
    assert lowered.schedule not in made
    for schedule in made:
        assert parse_schedule(str(schedule)) == schedule
        vectors = [a.loop for a in schedule.actions if isinstance(a, Vectorise)]
        assert len(vectors) == len(set(vectors))
        assert all(not (changes.inside[n] & set(vectors)) for n in vectors)
        lanes = changes._lanes_in_chain(schedule, schedule.parallel.loops)
        assert schedule.parallel.grain % lanes == 0 or not schedule.parallel.loops


def test_a_kernel_with_a_schedule_reads_back() -> None:
    kernel = replace(KERNELS["softmax"], schedule="parallel 1 grain 4; vectorise 1 by 16")
    assert parse_kernel(show_kernel(kernel)) == kernel
    assert show_kernel(kernel) != show_kernel(KERNELS["softmax"])
