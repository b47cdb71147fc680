"""Collective operations against loops over the ranks: threads, processes, and members that disagree."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strata as st
from strata.distributed import Group, connect, local_groups, run_members
from strata.errors import OptionError, RunError

SERIAL: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def serially(arrays: list[np.ndarray], reduction: str) -> np.ndarray:
    total = arrays[0].copy()
    for a in arrays[1:]:
        total = SERIAL["sum" if reduction == "mean" else reduction](total, a)
    return total / len(arrays) if reduction == "mean" else total


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return f"127.0.0.1:{door.getsockname()[1]}"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (12, 5), (2, 3, 4)])
def test_reductions_have_the_bits_of_a_loop(size: int, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    for dtype, reductions in ((np.float32, ("sum", "mean", "max", "min", "prod")), (np.int64, ("sum", "max"))):
        arrays = [(rng.standard_normal(shape) * 10).astype(dtype) for _ in range(size)]
        for reduction in reductions:
            found = run_members(size, lambda g: g.all_reduce(arrays[g.rank], reduction))  # noqa: B023
            wanted = serially(arrays, reduction).astype(dtype)
            for f in found:
                assert (f.dtype, f.shape) == (np.dtype(dtype), shape)
                assert np.array_equal(f, wanted)


def test_late_members_change_no_bit(rng: np.random.Generator) -> None:
    arrays = [rng.standard_normal(1000).astype(np.float32) * 10.0**i for i in range(4)]
    for late in range(4):

        def work(group: Group) -> np.ndarray:
            time.sleep(0.03 * (group.rank == late))  # noqa: B023
            return group.all_reduce(arrays[group.rank])

        for found in run_members(4, work):
            assert np.array_equal(found, serially(arrays, "sum"))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gathers_parts_and_broadcasts(size: int, rng: np.random.Generator) -> None:
    rows = [rng.standard_normal((i + 1, 3)) for i in range(size)]  # of different lengths
    assert all(np.array_equal(f, np.concatenate(rows)) for f in run_members(size, lambda g: g.all_gather(rows[g.rank])))
    arrays = [rng.standard_normal((2 * size, 3)).astype(np.float32) for _ in range(size)]
    parts = run_members(size, lambda g: g.reduce_scatter(arrays[g.rank], "mean"))
    assert np.array_equal(np.concatenate(parts), serially(arrays, "mean"))
    for root in range(size):
        found = run_members(size, lambda g: g.broadcast(arrays[g.rank] if g.rank == root else None, root))  # noqa: B023
        assert all(np.array_equal(f, arrays[root]) for f in found)
    small = np.arange(4).astype(ml_dtypes.bfloat16)
    assert run_members(size, lambda g: g.all_gather(small))[0].dtype == small.dtype
    flipped = np.arange(6.0).reshape(2, 3).T
    assert np.array_equal(run_members(size, lambda g: g.all_gather(flipped))[0], np.concatenate([flipped] * size))
    assert run_members(size, lambda g: g.barrier()) == [None] * size


def test_what_is_given_stays_as_it_is(rng: np.random.Generator) -> None:
    given = rng.standard_normal(64)
    kept = given.copy()

    def work(group: Group) -> Any:
        mine = given.copy()
        first = group.all_reduce(mine)
        mine[:] = np.nan  # what was sent is a copy
        return first, group.all_reduce(given)

    for first, second in run_members(3, work):
        assert np.array_equal(first, second)
        first[:] = 0
    assert np.array_equal(given, kept)


def test_training_on_halves_of_a_batch_is_training_on_all(rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((8, 4)), rng.standard_normal((4, 2))
    slope = st.grad(lambda w, x: (st.tanh(x @ w) ** 2).mean(0).sum())
    whole = slope(st.asarray(w), st.asarray(x)).numpy()
    halves = run_members(2, lambda g: g.all_reduce(slope(st.asarray(w), st.asarray(x[g.rank :: 2])).numpy(), "mean"))
    assert np.array_equal(halves[0], halves[1])
    assert np.allclose(halves[0], whole, atol=1e-12)


def test_processes_on_loopback() -> None:
    """Three processes and this one: the same bits as threads."""
    program = textwrap.dedent("""
        import sys
        import numpy as np
        from strata.distributed import connect
        rank, size, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        with connect(rank, size, address, secret="s") as group:
            mine = np.random.default_rng(rank).standard_normal(50_000).astype(np.float32)
            total = group.all_reduce(mine)
            rows = group.all_gather(np.full(rank + 1, rank))
            part = group.reduce_scatter(np.arange(size * 2.0))
            group.barrier()
            told = group.broadcast(np.array([7]) if rank == 2 else None, root=2)
            group.all_gather(np.frombuffer(total.tobytes() + part.tobytes() + told.tobytes(), np.uint8))
    """)
    address = free_address()
    others = [subprocess.Popen([sys.executable, "-c", program, str(r), "3", address]) for r in (1, 2)]
    with connect(0, 3, address, secret="s") as group:
        arrays = [np.random.default_rng(r).standard_normal(50_000).astype(np.float32) for r in range(3)]
        total = group.all_reduce(arrays[0])
        assert np.array_equal(total, serially(arrays, "sum"))
        assert group.all_gather(np.full(1, 0)).tolist() == [0, 1, 1, 2, 2, 2]
        part = group.reduce_scatter(np.arange(6.0))
        assert part.tolist() == [0, 3]
        group.barrier()
        told = group.broadcast(None, root=2)
        mine = np.frombuffer(total.tobytes() + part.tobytes() + told.tobytes(), np.uint8)
        seen = group.all_gather(mine).reshape(3, -1)
        assert np.array_equal(seen[0][:200_000], seen[1][:200_000])
        assert np.array_equal(seen[0][:200_000], seen[2][:200_000])
    assert [p.wait(30) for p in others] == [0, 0]


def test_large_messages_both_ways_do_not_lock() -> None:
    address = free_address()
    big = np.ones(2_000_000)

    def one(rank: int) -> float:
        with connect(rank, 2, address, timeout=20) as group:
            return float(group.all_reduce(big).sum())

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(one, range(2))) == [4e6, 4e6]


def test_strangers_are_not_let_in() -> None:
    address = free_address()
    host, _, port = address.partition(":")
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(connect, 0, 2, address, secret="right", timeout=20)
        while True:
            try:
                with socket.create_connection((host, int(port)), timeout=5) as noise:
                    noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        with pytest.raises(RunError, match="rank 1 of 2 did not find all others"):
            connect(1, 2, address, secret="wrong", timeout=0.5)
        second = connect(1, 2, address, secret="right", timeout=20)
        with first.result() as a, second as b:
            assert [f.result().tolist() for f in [threads.submit(g.all_gather, [g.rank]) for g in (a, b)]] == [
                [0, 1]
            ] * 2


def test_members_that_disagree_are_named() -> None:
    with pytest.raises(RunError, match=r"rank \d is in its call 1, (all_gather|barrier); rank \d in its call 1"):
        run_members(2, lambda g: g.barrier() if g.rank else g.all_gather([1]), timeout=5)
    with pytest.raises(RunError, match=r"all_reduce sum of int64\[2\].*all_reduce sum of int64\[3\]|\[3\].*\[2\]"):
        run_members(2, lambda g: g.all_reduce(np.arange(2 + g.rank)), timeout=5)
    with pytest.raises(RunError, match="do not go together: rank 0"):
        run_members(2, lambda g: g.all_gather(np.zeros((1, 2 + g.rank))), timeout=5)
    with pytest.raises(RunError, match=r"rank 0 waited 0.1 s for rank 1"):
        run_members(2, lambda g: g.barrier() if g.rank == 0 else None, timeout=0.1)
    with pytest.raises(ZeroDivisionError):  # the cause, not that the others waited
        run_members(3, lambda g: 1 // 0 if g.rank == 1 else g.barrier(), timeout=0.2)


def test_a_member_that_goes_away_is_noticed() -> None:
    address = free_address()

    def leave() -> None:
        connect(1, 2, address, timeout=10).close()

    with ThreadPoolExecutor(1) as threads:
        gone = threads.submit(leave)
        with connect(0, 2, address, timeout=10) as group:
            gone.result()
            with pytest.raises(RunError, match="rank 0 lost rank 1"):
                group.barrier()
    with pytest.raises(RunError, match="did not find all others"):
        connect(0, 2, free_address(), timeout=0.05)


def test_mistakes() -> None:
    (group,) = local_groups(1)
    for wrong, message in (
        (lambda: group.all_reduce([1], "median"), "'median' is not one of sum"),
        (lambda: group.all_reduce([1], "mean"), "no mean of int64"),
        (lambda: group.all_reduce(["a"]), "no sum of <U1"),
        (lambda: group.all_gather([object()]), "cannot be sent"),
        (lambda: group.broadcast([1], 3), "no rank 3 among 1"),
        (lambda: local_groups(2)[0].reduce_scatter(np.zeros(3)), "no rows for 2"),
        (lambda: local_groups(0), "are none"),
        (lambda: connect(2, 2, "127.0.0.1:1"), "no rank 2 among 2"),
        (lambda: connect(0, 2, "nowhere"), "not host:port"),
    ):
        with pytest.raises(OptionError, match=message):
            wrong()
