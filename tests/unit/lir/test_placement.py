"""Where buffers lie never changes a result: packed, packed otherwise, and each in memory of its own give equal bits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from strata import ops
from strata.backends.llvm.runtime.executable import CpuExecutable
from strata.core import sym
from strata.lir import ArenaBlock, Lir, SizeClasses, byte_size, memory
from strata.mir import Graph, evaluate
from strata.runtime import CompilePipeline
from tests.programs import graphs


def chain() -> Graph:
    """Scratch of many sizes and lifetimes."""
    g = Graph("chain")
    x = g.input("x", (7, 33))
    kept, y = [], x
    for i in range(8):
        y = ops.sort(ops.sin(y) + float(i), axis=i % 2)
        kept.append(y)
    return g.outputs(sum(kept[1:], kept[0]), ops.concat([kept[2], kept[5]], axis=1))


def updates() -> Graph:
    """Values changed in place, with views of them and readers of what they were."""
    g = Graph("updates")
    x, at = g.input("x", (16, 8)), g.input("at", (), "i64")
    base = ops.sort(x, axis=0)
    first = ops.dynamic_update_slice(base, ops.tanh(x[:3]), [at, 0])
    second = ops.dynamic_update_slice(first, ops.narrow(first, 0, 0, 4) * 2.0, [5, 0])
    part = ops.reshape(ops.narrow(second, 0, 2, 8), (4, 16))
    return g.outputs(ops.softmax(part, axis=-1), second.sum(0), ops.sort(base, axis=1))


def guarded() -> Graph:
    """Stores of which only some elements come from memory: padding, selections, gathers."""
    g = Graph("guarded")
    x, ids = g.input("x", (9, 12)), g.input("ids", (5,), "i64")
    rows = ops.take(ops.sort(x, axis=0), ids, axis=0)
    padded = ops.pad(rows, ((1, 2), (0, 3)))
    return g.outputs(ops.where(padded > 0.0, padded, ops.flip(padded, 0)), ops.softmax(padded, axis=0))


def layer() -> Graph:
    return graphs.one_encoder_layer(width=48, heads=4)


def decode() -> Graph:
    return graphs.llama(2, width=64, heads=4, inner=96)


PROGRAMS: list[Callable[[], Graph]] = [chain, updates, guarded, layer, decode]


def apart(lir: Lir) -> Lir:
    """Every scratch buffer in memory of its own for the whole run; updates copy."""
    last = len(lir.schedule) - 1
    return replace(lir, buffers=tuple(
        replace(b, alias=None, birth=0, death=last) if b.role == "scratch" else b for b in lir.buffers
    ))  # fmt: skip


def run(lir: Lir, feeds: dict[str, np.ndarray], binding: dict[str, int]) -> list[np.ndarray]:
    executable = CpuExecutable(lir, lir.target)
    for name in lir.graph.param_names:
        executable.set_param(name, feeds[name])
    kinds = [x.type.bind(binding) for x in lir.graph.results]
    outputs = [np.empty(t.static_shape, t.dtype.np) for t in kinds]
    executable.run([feeds[name] for name in lir.graph.input_names], outputs, binding)
    return outputs


def random_feeds(graph: Graph, binding: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for x in (*graph.inputs, *graph.params):
        kind = x.type.bind(binding) if binding else x.type
        small = (rng.standard_normal(kind.static_shape) * 0.3).astype(kind.dtype.np)
        feeds[x.node.op.key] = small if kind.dtype.is_float else rng.integers(0, 3, kind.static_shape).astype("i8")
    return feeds


def check(graph: Graph, monkeypatch: pytest.MonkeyPatch, binding: dict[str, int]) -> None:
    lir = CompilePipeline("cpu").compile(graph).lir
    feeds = random_feeds(graph, binding)
    packed = run(lir, feeds, binding)
    for got, want in zip(packed, evaluate(graph, feeds, wide=True), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    own = run(apart(lir), feeds, binding)
    with monkeypatch.context() as patch:
        patch.setattr(
            memory, "pack", lambda blocks: memory._first_fit(sorted(blocks, key=lambda b: (b.size, -b.birth)))
        )
        otherwise = run(lir, feeds, binding)
    for a, b, c in zip(packed, own, otherwise, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    placement = lir.placement(binding or None)
    assert placement.arena_size <= 1.1 * placement.lower_bound
    assert apart(lir).placement(binding or None).arena_size >= placement.arena_size


@pytest.mark.parametrize("build", PROGRAMS, ids=lambda b: b.__name__)
def test_equal_bits(build: Callable[[], Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    check(build(), monkeypatch, {})


@pytest.mark.parametrize("size", [1, 6, 40])
def test_symbolic_sizes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(graphs.one_encoder_layer(length=sym("S", 1, 64), width=48, heads=4), monkeypatch, {"S": size})


def disjoint(lir: Lir, offsets: Mapping[str, int], binding: dict[str, int]) -> bool:
    """Whether no two buffers that are alive at once share a byte."""
    own = [b for b in lir.buffers if b.role == "scratch" and b.alias is None]
    at = {b.name: (offsets[b.name], offsets[b.name] + byte_size(b, binding)) for b in own}
    return all(
        at[a.name][1] <= at[b.name][0] or at[b.name][1] <= at[a.name][0]
        for i, a in enumerate(own)
        for b in own[:i]
        if a.birth <= b.death and b.birth <= a.death and byte_size(a, binding) and byte_size(b, binding)
    )


def placements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often buffers are placed."""
    placed: list[int] = []
    pack = memory.pack

    def counted(blocks: Sequence[ArenaBlock]) -> tuple[dict[str, int], int]:
        placed.append(len(blocks))
        return pack(blocks)

    monkeypatch.setattr(memory, "pack", counted)
    return placed


@pytest.mark.parametrize(("most", "count"), [(1 << 30, 2), (0, 26)])
def test_sizes_of_a_class_share_a_placement(most: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """9 to 16 and 17 to 32 do, unless that takes too much memory."""
    graph = graphs.one_encoder_layer(length=sym("S", 1), width=48, heads=4)
    lir = CompilePipeline("cpu").compile(graph).lir
    placed, classes = placements(monkeypatch), SizeClasses(lir, most)
    for size in range(9, 33):
        assert disjoint(lir, classes.placement({"S": size}).offsets, {"S": size})
    assert len(placed) == count


def test_a_class_is_no_larger_than_the_bounds_of_sizes() -> None:
    graph = graphs.one_encoder_layer(length=sym("S", 1, 70), width=48, heads=4)
    lir = CompilePipeline("cpu").compile(graph).lir
    assert SizeClasses(lir, 1 << 30).placement({"S": 66}).arena_size == lir.arena_size


def test_runs_of_a_class_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program, for sizes in any order, beside one for each size alone."""
    graph = graphs.one_encoder_layer(length=sym("S", 1), width=48, heads=4)
    lir = CompilePipeline("cpu").compile(graph).lir
    sizes = [17, 32, 23, 5, 31, 18]
    feeds = {size: random_feeds(graph, {"S": size}) for size in sizes}
    weights = {name: feeds[17][name] for name in lir.graph.param_names}
    alone = [run(lir, feeds[size] | weights, {"S": size}) for size in sizes]
    executable, placed = CpuExecutable(lir, lir.target), placements(monkeypatch)
    for name, value in weights.items():
        executable.set_param(name, value)
    for size, wanted in zip(sizes, alone, strict=True):
        kinds = [x.type.bind({"S": size}) for x in lir.graph.results]
        outputs = [np.empty(t.static_shape, t.dtype.np) for t in kinds]
        executable.run([feeds[size][name] for name in lir.graph.input_names], outputs, {"S": size})
        for got, want in zip(outputs, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    assert len(placed) == 2
