"""Stores cut at the conditions on their axes: the parts together write what the kernel writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends.llvm.codegen.compile import lower
from strata.core import Target
from strata.kernel import Kernel, Load, normalize, postorder
from strata.kernel.passes.split_predicates import cut_stores

TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]


def kernels(build: Callable[..., Any], *shapes: tuple[Any, ...], dtype: str = "f32") -> list[Kernel]:
    g = st.Graph("g")
    g.outputs(build(*(g.input(f"x{i}", s, dtype) for i, s in enumerate(shapes))))
    return list(st.CompilePipeline("cpu").compile(g).lir.kernels.values())


def is_plain(kernel: Kernel) -> bool:
    """Whether every element is read without a condition."""
    return all(n.where is None for n in postorder(kernel.roots) if isinstance(n, Load))


def check(build: Callable[..., Any], wanted: Callable[..., Any], *shapes: tuple[int, ...], dtype: str = "f32") -> None:
    rng = np.random.default_rng(sum(map(sum, shapes)))
    arrays = {f"x{i}": (rng.normal(size=s) * 50).astype(st.core.as_dtype(dtype).np) for i, s in enumerate(shapes)}
    g = st.Graph("g")
    g.outputs(build(*(g.input(name, a.shape, dtype) for name, a in arrays.items())))
    results = [st.Session("cpu").compile(g, st.CompileOptions(threads=n)).run(arrays)[0] for n in (1, 2, 7)]
    for result in results:
        np.testing.assert_array_equal(result, wanted(*arrays.values()))


def join(axis: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return lambda *x: st.ops.concat(x, axis), lambda *x: np.concatenate(x, axis)


def test_joined_rows_are_copies_of_their_own() -> None:
    (kernel,) = kernels(join(0)[0], (300, 64), (200, 64))
    parts = cut_stores(kernel)
    assert [p.name for p in parts] == ["k0_0", "k0"]
    assert all(map(is_plain, parts))
    assert [[a.extent for a in s.axes] for p in parts for s in p.stores] == [[300, 64], [200, 64]]


def test_joined_columns_share_the_loop_over_rows() -> None:
    (kernel,) = kernels(join(1)[0], (300, 64), (300, 5))
    (part,) = cut_stores(kernel)
    assert is_plain(part)
    assert len({s.axes[0] for s in part.stores}) == 1


def test_transposes_side_by_side_are_turned_each() -> None:
    """Rows of two images in turns, with channels first: neither could be turned in a loop that has both."""

    def build(x: Any, y: Any) -> Any:
        rows = st.ops.stack([x, y], 1)  # [8, 2, 16, 40]
        return st.ops.transpose(st.ops.reshape(rows, (16, 16, 40)), (2, 0, 1))

    (kernel,) = kernels(build, (8, 16, 40), (8, 16, 40))
    parts = cut_stores(kernel)
    assert len(parts) == 2
    assert all(map(is_plain, parts))
    assert all("tile" in str(lower(p, Target.named("avx512")).schedule) for p in parts)
    check(build, lambda x, y: np.stack([x, y], 1).reshape(16, 16, 40).transpose(2, 0, 1), (8, 16, 40), (8, 16, 40))


def test_sizes_that_are_not_known_are_cut_too() -> None:
    n, m = st.sym("n", 1, 1000), st.sym("m", 0, 1000)
    (kernel,) = kernels(join(0)[0], (n, 64), (m, 64), (3, 64))
    assert all(map(is_plain, cut_stores(kernel)))


def test_a_border_without_elements_of_the_source_reads_nothing() -> None:
    (kernel,) = kernels(lambda x: st.ops.pad(x, ((0, 0), (1, 2), (3, 4))), (64, 9, 30))
    (part,) = cut_stores(kernel)
    assert is_plain(part)
    assert sum(isinstance(s.value, Load) for s in part.stores) == 1


def test_what_has_no_conditions_or_sums_up_stays() -> None:
    for build, shape in (
        (lambda x: x + 1, (300, 64)),
        (lambda x: st.ops.concat([x, x], 0).sum(1), (300, 64)),
        (st.ops.tril, (300, 300)),
    ):
        (kernel,) = kernels(build, shape)
        assert cut_stores(kernel) == (kernel,)


@pytest.mark.parametrize("dtype", ["f32", "f64", "i8", "bool", "bf16", "c64"])
def test_join_of_every_kind(dtype: str) -> None:
    for axis, shapes in (
        (0, [(3, 7), (1, 7), (40, 7)]),
        (1, [(33, 1), (33, 70), (33, 3)]),
        (0, [(2000,), (1,), (77,)]),
    ):
        check(*join(axis), *shapes, dtype=dtype)


@pytest.mark.parametrize("shapes", [[(0, 5), (3, 5)], [(1, 5), (0, 5), (1, 5)], [(1, 1), (1, 1)]])
def test_join_of_little(shapes: list[tuple[int, ...]]) -> None:
    check(*join(0), *shapes)


@pytest.mark.parametrize("mode", ["constant", "reflect", "symmetric", "wrap", "edge"])
@pytest.mark.parametrize("widths", [((0, 0), (1, 2), (3, 0)), ((2, 1), (0, 0), (0, 5)), ((1, 1), (1, 1), (1, 1))])
@pytest.mark.parametrize("shape", [(3, 6, 9), (40, 7, 65)])
def test_padding(shape: tuple[int, ...], widths: Any, mode: Any) -> None:
    check(lambda x: st.ops.pad(x, widths, mode), lambda x: np.pad(x, widths, mode), shape)


@pytest.mark.parametrize("by", [-3, 0, 1, 5, 70])
@pytest.mark.parametrize("axis", [0, 1])
def test_roll(by: int, axis: int) -> None:
    check(lambda x: st.ops.roll(x, by, axis), lambda x: np.roll(x, by, axis), (67, 131))


def test_arithmetic_around_a_join() -> None:
    def build(x: Any, y: Any) -> Any:
        return st.ops.concat([x * 2, y + 1], 1) * 3

    check(build, lambda x, y: np.concatenate([x * 2, y + 1], 1) * 3, (50, 33), (50, 31))


def test_a_number_without_axes_in_a_join() -> None:
    def build(x: Any, y: Any) -> Any:
        return st.ops.concat([x, y.reshape((1,))], 0)

    check(build, lambda x, y: np.concatenate([x, y.reshape(1)]), (50,), ())
    check(
        lambda x: st.ops.pad(x.expand((40, 60)), ((0, 0), (1, 2))),
        lambda x: np.pad(np.full((40, 60), x), ((0, 0), (1, 2))),
        (),
    )


def test_transposed_join() -> None:
    check(
        lambda x, y: st.ops.concat([x, y], 0).transpose((2, 1, 0)),
        lambda x, y: np.concatenate([x, y], 0).transpose(2, 1, 0), (20, 33, 40), (31, 33, 40),
    )  # fmt: skip


def test_rows_past_the_caches_change_places() -> None:
    for shape, order in (
        ((3, 1300, 17, 64), (0, 2, 1, 3)),
        ((70, 300, 200), (1, 0, 2)),
        ((9, 700, 5, 130), (2, 0, 1, 3)),
    ):
        check(lambda x, p=order: x.transpose(p), lambda x, p=order: x.transpose(p), shape)


def test_large_joins_and_borders() -> None:
    check(*join(1), (9000, 500), (9000, 12))
    check(*join(0), (700, 4096), (500, 4096))
    widths = ((0, 0), (1, 1), (1, 1))
    check(lambda x: st.ops.pad(x, widths), lambda x: np.pad(x, widths), (300, 128, 128))


@pytest.mark.parametrize("target", TARGETS)
def test_on_every_target(target: str) -> None:
    from strata.backends.llvm.codegen.compile import compile_kernel

    (kernel,) = kernels(lambda x: st.ops.pad(x, ((2, 1), (3, 4)), "reflect"), (40, 37))
    (part,) = cut_stores(kernel)
    x = np.random.default_rng(0).normal(size=(40, 37)).astype(np.float32)
    (got,) = compile_kernel(part, Target.named(target))(x)
    np.testing.assert_array_equal(got, np.pad(x, ((2, 1), (3, 4)), "reflect"))


@pytest.mark.parametrize(
    ("mode", "dtype"), [("reflect", "f32"), ("edge", "f32"), ("symmetric", "f64"), ("constant", "u8")]
)
def test_long_borders_are_plain_loops_where_masks_cost_more(mode: Any, dtype: str) -> None:
    widths = ((2, 1), (3, 5))
    rows = 2300 if dtype == "f32" else 1200 if dtype == "f64" else 9000

    def build(x: Any) -> Any:
        return st.ops.pad(x, widths, mode)

    (kernel,) = kernels(build, (rows, 1000), dtype=dtype)
    assert all(map(is_plain, cut_stores(normalize(kernel))))
    check(build, lambda x: np.pad(x, widths, mode), (rows, 1000), dtype=dtype)
