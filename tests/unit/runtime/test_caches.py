"""Compile caches: keys, limits, buckets, padding. Numbers are those of the behaviour list."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.config import using
from strata.errors import OptionError
from strata.hir import HirModule
from strata.mir import Graph
from strata.runtime import (
    BucketedCompileCache,
    CompileCache,
    CompileOptions,
)
from tests.unit.runtime.builders import Counting, relu_graph

# compile cache


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_one_compile_a_key_and_a_limit(device: str) -> None:  # behaviour 92
    build = Counting(relu_graph)
    cache = CompileCache(device, 2, "fifo")
    assert cache.is_empty
    first = cache.get_or_compile(1, build)
    assert cache.get_or_compile(1, build) is first
    assert len(build.calls) == 1
    cache.get_or_compile(2, build)
    assert len(cache) == 2
    assert len(build.calls) == 2
    cache.get_or_compile(1, build)
    cache.get_or_compile(3, build)
    assert not cache.contains(1)
    assert cache.contains(2)
    assert cache.contains(3)
    assert (cache.counters.hits, cache.counters.misses, cache.counters.evictions) == (2, 3, 1)


def test_least_recently_used_goes_first() -> None:
    cache = CompileCache("reference", 2, "lru")
    for key in (1, 2, 1, 3):
        cache.get_or_compile(key, relu_graph)
    assert cache.contains(1)
    assert not cache.contains(2)


def test_options_are_part_of_the_key() -> None:
    cache = CompileCache("cpu", 4)
    plain = cache.get_or_compile(1, relu_graph)
    unfused = cache.get_or_compile(1, relu_graph, CompileOptions(fusion=False))
    assert plain is not unfused
    assert len(cache) == 2


@pytest.mark.parametrize(("capacity", "policy"), [(0, "lru"), (-1, "lru"), (2, "random"), (True, "lru")])
def test_impossible_caches_are_refused(capacity, policy: str) -> None:
    with pytest.raises(OptionError):
        CompileCache("reference", capacity, policy)


def test_threads_share_one_compile() -> None:
    build = Counting(relu_graph)
    cache = CompileCache("cpu", 4)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get_or_compile(7, build))) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(set(map(id, found))) == 1
    assert len(found) == 16
    assert len(build.calls) == 1


def test_failures_are_not_kept() -> None:
    cache = CompileCache("reference", 2)

    def fail() -> Graph:
        raise KeyError("no weights")

    with pytest.raises(KeyError):
        cache.get_or_compile(1, fail)
    cache.get_or_compile(1, relu_graph)
    assert len(cache) == 1


# buckets


def test_buckets_compile_lazily_for_their_largest_key() -> None:  # behaviour 93
    build = Counting(relu_graph)
    cache = BucketedCompileCache("reference", [range(1, 4), range(4, 8)])
    two, three = cache.get_or_compile(2, build), cache.get_or_compile(3, build)
    assert two is not None
    assert three is not None
    assert two[0] == three[0] == 3
    assert two[1] is three[1]
    assert build.calls == [(3,)]
    assert cache.get_or_compile(8, build) is None
    assert cache.get_or_compile(0, build) is None
    assert build.calls == [(3,)]
    assert (cache.compiled_count(), cache.total_buckets()) == (1, 2)
    assert [cache.bucket_for(k) for k in (0, 1, 3, 4, 7, 8)] == [None, 0, 0, 1, 1, None]


@pytest.mark.parametrize("ranges", [[], [range(3, 3)], [range(1, 4), range(3, 6)], [range(4, 6), range(1, 4)]])
def test_buckets_are_checked(ranges) -> None:
    with pytest.raises(OptionError):
        BucketedCompileCache("reference", ranges)


def test_gaps_between_buckets_are_fine() -> None:
    cache = BucketedCompileCache("reference", [(1, 4), (10, 20)])
    assert cache.get_or_compile(5, relu_graph) is None
    assert cache.bucket_for(12) == 1


def test_run_padded_pads_and_slices() -> None:  # behaviour 95
    build = Counting(relu_graph)
    cache = BucketedCompileCache("cpu", [range(1, 16)])
    for rows in (10, 7):
        data = np.arange(rows, dtype=np.float32) - 3
        found = cache.run_padded(rows, rows, build, [("x", data, 1)], [1])
        assert found is not None
        upper, (out,) = found
        assert upper == 15
        np.testing.assert_array_equal(out, np.maximum(data, 0))
    assert len(build.calls) == 1
    assert cache.run_padded(16, 16, build, {"x": np.ones(16, np.float32)}) is None
    found = cache.run_padded(10, 10, build, [("x", np.ones(10, np.float32), 1)], [0])
    assert found is not None
    np.testing.assert_array_equal(found[1][0], [1] * 10 + [0] * 5)


@pytest.mark.parametrize(
    ("low", "high", "ends"),
    [(8, 64, [8, 16, 32, 64]), (16, 32, [16, 32]), (10, 64, [16, 32, 64]), (8, 20, [8, 16, 32]), (16, 16, [16])],
)
def test_ladders(low: int, high: int, ends: list[int]) -> None:  # behaviour 96
    cache = BucketedCompileCache.power_of_two_ladder("reference", low, high)
    starts = [1, *(e + 1 for e in ends[:-1])]
    assert cache.buckets() == [range(s, e + 1) for s, e in zip(starts, ends, strict=True)]


def test_ladder_finds_the_next_power() -> None:
    cache = BucketedCompileCache.power_of_two_ladder("reference", 8, 64)
    found = [cache.get_or_compile(key, relu_graph) for key in (17, 9, 3, 64, 65)]
    assert [f and f[0] for f in found] == [32, 16, 8, 64, None]
    for low, high in ((0, 4), (8, 4)):
        with pytest.raises(OptionError):
            BucketedCompileCache.power_of_two_ladder("reference", low, high)


def test_parameters_come_with_the_first_compile() -> None:
    def build(upper: int):
        g = Graph("p")
        return g.outputs(g.input("x", (upper,)) * g.param("w", (1,))), {"w": np.array([3], np.float32)}

    cache = BucketedCompileCache("cpu", [range(1, 5)])
    found = cache.ensure_graph_with_params(2, build)
    assert found is not None
    np.testing.assert_array_equal(found[1].run(x=np.ones(4, np.float32))[0], 3)


def scaled_block(upper: int) -> HirModule:
    m = HirModule("block")
    return m.outputs(m.linear(m.input("x", (upper, 2)), m.param("w", (2, 3)), m.param("b", (3,)), act="relu"))


def test_blocks_and_options_under_every_name() -> None:
    options = CompileOptions(fusion=False)
    whole = CompileCache("cpu", 2)
    kept = whole.get_or_compile_with_options("k", lambda: relu_graph(4), options)
    assert kept is whole.get_or_compile("k", lambda: relu_graph(4), options)
    assert kept is not whole.get_or_compile("k", lambda: relu_graph(4))
    cache, build = BucketedCompileCache("cpu", [range(1, 5), range(5, 9)]), Counting(scaled_block)
    assert (cache.total_buckets(), cache.compiled_count()) == (2, 0)
    found = cache.get_or_compile_hir(2, build)
    assert found is not None
    assert found[0] == 4
    assert found[1].signature == "(x: f32[4, 2], param w: f32[2, 3], param b: f32[3]) -> f32[4, 3]"
    assert cache.get_or_compile_hir(4, build) == found
    unfused = cache.get_or_compile_hir_with_options(3, build, options)
    assert unfused is not None
    assert len(unfused[1].lir.schedule) > len(found[1].lir.schedule)
    assert unfused == cache.get_or_compile_with_options(3, build, options)
    assert build.calls == [(4,), (4,)]
    assert cache.compiled_count() == 2
    weights = {"w": np.ones((2, 3), np.float32), "b": np.full(3, -1, np.float32)}
    fed = cache.ensure_hir_with_params(7, lambda upper: (scaled_block(upper), weights))
    assert fed is not None
    np.testing.assert_array_equal(fed[1].run(x=np.ones((8, 2), np.float32))[0], np.ones((8, 3)))


def test_inputs_without_rows_are_not_padded() -> None:
    def build(upper: int) -> Graph:
        g = Graph("mixed")
        return g.outputs(g.input("x", (upper, 3)) * g.input("scale", (3,)))

    cache = BucketedCompileCache("cpu", [range(1, 9)])
    scale = np.array([1, 2, 3], np.float32)
    found = cache.run_padded_mixed(5, 5, build, [("x", np.ones((5, 3), np.float32), 3), ("scale", scale, None)], [3])
    assert found is not None
    assert found[0] == 8
    np.testing.assert_array_equal(found[1][0], np.broadcast_to(scale, (5, 3)))


def test_public_names() -> None:
    for name in ("CompileCache", "BucketedCompileCache", "DynamicDimCompileCache", "ModelCompilePipeline", "AotCache"):
        assert getattr(st, name).__name__ == name


def test_a_setting_that_checks_indices_is_not_lost_in_a_cache() -> None:
    def build() -> Graph:
        g = Graph("rows")
        return g.outputs(ops.take(g.input("x", (3,)), g.input("at", (1,), "i64")))

    cache = CompileCache("cpu", 2)
    feeds = {"x": np.ones(3, np.float32), "at": np.array([7])}
    cache.get_or_compile("k", build).run(feeds)
    with using(check_indices=True), pytest.raises(IndexError):
        cache.get_or_compile("k", build).run(feeds)
