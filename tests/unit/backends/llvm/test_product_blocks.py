"""Sums of products are made in blocks: every way that a matmul or a convolution takes has the bits of chains written
in NumPy, with sizes as numbers and as symbols, and errors that do not grow with the number of products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import strata.ops as functions
from strata.backends.llvm.gemm.planning import in_rows, plan_contraction
from strata.core import Dim, c64, sym
from strata.kernel import PRODUCTS, ProductBlocks
from strata.mir import Graph
from strata.runtime import Session
from tests.unit.backends.llvm.test_conv_steps import templates
from tests.unit.backends.llvm.test_gemm import HOST, run

ops: Any = functions
MOST = 4e-7  # of f32 sums, relative to the length of all of them; one chain of 4608 products has 1.2e-6


def short(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers of eleven bits: their products are exact in f32, so that fused or not makes no difference."""
    made = rng.integers(1, 1 << 11, shape) * rng.choice((-1.0, 1.0), shape) * 2.0 ** rng.integers(-14, -8, shape)
    return made.astype(np.float32)


def in_blocks(products: np.ndarray, blocks: ProductBlocks | None) -> np.ndarray:
    """The sum over the first axis, as the rule says it."""
    total, part = None, np.zeros(products.shape[1:], np.float32)
    for k, product in enumerate(products):
        if k and blocks is not None and blocks.begins(k):
            total, part = (part if total is None else total + part), np.zeros_like(part)
        part = part + product
    return part if total is None else total + part


def error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def test_blocks_end_where_taps_do() -> None:
    assert ProductBlocks.of_matmul(PRODUCTS) is None
    assert ProductBlocks.of_matmul(PRODUCTS + 1) == ProductBlocks(PRODUCTS)
    assert ProductBlocks.of_convolution(14, (3, 3)) is None
    assert ProductBlocks.of_convolution(16, (3, 3)) == ProductBlocks(96)
    assert ProductBlocks.of_convolution(3, (7, 7)) == ProductBlocks(126)
    assert ProductBlocks.of_convolution(60, (3, 3)) == ProductBlocks(120, 180)
    assert ProductBlocks.of_convolution(300, (3, 3)) == ProductBlocks(PRODUCTS, 300)
    assert ProductBlocks.of_convolution(300, (1, 1)) == ProductBlocks(PRODUCTS, 300)  # as a matmul over 300


@pytest.mark.parametrize("k", [1, 127, 128, 129, 256, 300, 640])
@pytest.mark.parametrize("m", [1, 2, 8, 37])
def test_bits_of_matmuls(m: int, k: int) -> None:
    rng = np.random.default_rng(0)
    n = 100
    a, b = short(rng, m, k), short(rng, k, n)
    expected = in_blocks(a.T[:, :, None] * b[:, None, :], ProductBlocks.of_matmul(k))
    spec = plan_contraction(m, n, k, HOST, fewest_rows=1)
    ways = [spec, plan_contraction(m, n, k, HOST, m_exact=True, n_exact=True)]
    ways += [
        w for w in (in_rows(ways[1], m, n, k), plan_contraction(500, n, 2000, HOST, fewest_rows=1, is_open=True)) if w
    ]
    for way in ways:
        assert np.array_equal(run(way, a, b), expected), str(way)
    packed = plan_contraction(m, n, k, HOST, a_unit_k=False, fewest_rows=1)
    assert np.array_equal(run(packed, np.asfortranarray(a), b), expected)


@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
def test_bits_of_matmuls_whose_sizes_are_open(kept: bool) -> None:
    """Rows, columns or terms as symbols, with and without bounds: the chains of NumPy."""
    rng = np.random.default_rng(0)
    for open_sizes in ({"m": 64}, {"k": 512}, {"k": None}, {"m": None, "n": None, "k": None}):
        if kept and not open_sizes.keys() <= {"m"}:
            continue
        names: dict[str, Dim] = {name: sym(name, 0, most) for name, most in open_sizes.items()}
        for m, k, n in ((3, 300, 40), (9, 129, 20), (9, 128, 33), (2, 40, 17), (5, 1, 9), (4, 0, 5)):
            sizes: dict[str, Dim] = {"m": m, "k": k, "n": n, **names}
            g = Graph("open")
            x = g.input("a", (sizes["m"], sizes["k"]))
            y = (g.param if kept else g.input)("b", (sizes["k"], sizes["n"]))
            done = Session("cpu").compile(g.outputs(x @ y))
            a, b = short(rng, m, k), short(rng, k, n)
            if kept:
                done.set_params({"b": b})
            (found,) = done.run({"a": a} if kept else {"a": a, "b": b})
            products = a.T[:, :, None] * b[:, None, :] if k else np.zeros((1, m, n), np.float32)
            assert np.array_equal(np.asarray(found), in_blocks(products, ProductBlocks.of_matmul(k))), (open_sizes, k)


def test_products_too_small_keep_their_sign_in_every_block() -> None:
    """What is below all floats is -0.0 where a block of known or open length ends."""
    a, b = np.full((9, 300), -1e-30, np.float32), np.full((300, 20), 1e-30, np.float32)
    for k in (1, 100, 128, 129, 300):
        signs = set()
        for size in (k, sym("k", 0), sym("k", 1, 512)):
            g = Graph("tiny")
            done = Session("cpu").compile(g.outputs(g.input("a", (9, size)) @ g.input("b", (size, 20))))
            (found,) = done.run({"a": a[:, :k].copy(), "b": b[:k].copy()})
            signs.add(np.signbit(np.asarray(found)).all().item())
        assert len(signs) == 1, k


def test_bits_of_complex_matmuls_do_not_depend_on_their_tiles() -> None:
    rng = np.random.default_rng(0)
    a, b = (short(rng, *s) + 1j * short(rng, *s) for s in ((37, 300), (300, 20)))
    a, b = a.astype(np.complex64), b.astype(np.complex64)
    one = run(plan_contraction(37, 20, 300, HOST, a=c64), a, b)
    other = run(plan_contraction(37, 20, 300, HOST, a=c64, a_unit_k=False), np.asfortranarray(a), b)
    assert np.array_equal(one, other)
    assert error(one, a.astype(np.complex128) @ b.astype(np.complex128)) < MOST


CONVOLUTIONS: list[Any] = [
    # channels, sizes, outputs, kernel, options; which way each takes is asserted nowhere: all of them obey
    (16, (9, 9), 24, (3, 3), {"stride": 2}),  # whole lines
    (60, (7, 7), 24, (3, 3), {"stride": 2, "padding": 1}),  # taps of a line
    (300, (5, 5), 24, (3, 3), {"stride": 2, "padding": 1}),  # channels of a tap
    (200, (5, 5), 24, (3, 3), {"padding": (2, 5), "dilation": 2}),  # whole taps in the padding
    (8, (20, 20), 24, (5, 5), {"stride": 2, "padding": 2}),  # joined taps
    (12, (4, 40), 24, (2, 13), {}),  # a line of joined taps that would be longer than a block
    (300, (6, 6), 24, (1, 1), {}), (300, (6, 6), 24, (1, 1), {"stride": 2}),
    (3, (64, 64), 20, (7, 7), {"stride": 2, "padding": 3}), (3, (33, 37), 20, (7, 7), {"padding": 3}),
    (2, (20, 40), 20, (13, 9), {}), (2, (20, 33), 20, (13, 9), {}), (1, (277,), 20, (150,), {}),
    (2, (3, 151), 20, (2, 120), {}), (4, (9, 10, 52), 12, (3, 4, 5), {}),
    (40, (20, 20), 40, (11, 11), {"groups": 40, "padding": 5}),  # planes, and channels side by side
    (40, (8, 8), 40, (11, 11), {"groups": 40, "padding": 5}),
    (80, (5, 5), 80, (5, 5), {"groups": 2, "padding": 2}),  # each group by itself
    (64, (9, 9), 64, (3, 3), {"groups": 4, "padding": 1}),  # narrow groups: whole lines
    (128, (5, 7), 32, (3, 3), {"groups": 2, "padding": 1}),  # channels of a line
]  # fmt: skip


def windows(x: np.ndarray, w: np.ndarray, groups: int, options: dict[str, Any]) -> np.ndarray:
    """Products of a convolution, [tap and channel, image, output, *counts]: what is outside is zero."""
    rank = w.ndim - 2

    def each(name: str, default: int) -> tuple[int, ...]:
        value = options.get(name, default)
        return value if isinstance(value, tuple) else (value,) * rank

    stride, padding, dilation = each("stride", 1), each("padding", 0), each("dilation", 1)
    x = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    sizes = x.shape[2:]
    counts = [(s - d * (k - 1) - 1) // t + 1 for s, k, d, t in zip(sizes, w.shape[2:], dilation, stride, strict=True)]
    outputs, channels = w.shape[:2]
    made = []
    for tap in np.ndindex(*w.shape[2:]):
        place = tuple(
            slice(t * d, t * d + (c - 1) * s + 1, s) for t, d, c, s in zip(tap, dilation, counts, stride, strict=True)
        )
        seen = x[(slice(None), slice(None), *place)]
        for c in range(channels):
            mine = seen[:, [o // (outputs // groups) * channels + c for o in range(outputs)]]
            made.append(mine * w[(slice(None), c, *tap)].reshape(-1, *(1,) * rank))
    return np.stack(made)


def compiled(shape: tuple[Dim, ...], w: np.ndarray, options: dict[str, Any], *, last: bool) -> Any:
    """A convolution by itself; with channels last if it is to be."""
    rank = w.ndim - 2
    g = Graph("conv")
    order = (0, rank + 1, *range(1, rank + 1))
    x = g.input("x", (shape[0], *shape[2:], shape[1]) if last else shape)
    made = getattr(ops, f"conv{rank}d")(ops.transpose(x, order) if last else x, g.param("w", w.shape), **options)
    graph = g.outputs(ops.transpose(made, (0, *range(2, rank + 2), 1)) if last else made)
    done = Session("cpu").compile(graph)
    done.set_params({"w": w})
    return done


def results(x: np.ndarray, w: np.ndarray, options: dict[str, Any]) -> Iterator[np.ndarray]:
    """Channels first and last, with sizes as numbers and as symbols; [image, output, *counts]."""
    rank = w.ndim - 2
    names = [sym(f"s{axis}", 1, 512) for axis in range(rank)]
    for last in (False, True):
        given = np.moveaxis(x, 1, -1) if last else x
        for shape in (x.shape, (sym("n", 1, 64), x.shape[1], *names)):
            made = compiled(shape, w, options, last=last)
            (found,) = made.run({"x": np.ascontiguousarray(given)})
            yield np.moveaxis(np.asarray(found), -1, 1) if last else np.asarray(found)


@pytest.mark.few(6)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_bits_of_convolutions(case: Any) -> None:
    channels, sizes, outputs, kernel, options = case
    groups = options.get("groups", 1)
    rng = np.random.default_rng(0)
    x, w = short(rng, 2, channels, *sizes), short(rng, outputs, channels // groups, *kernel)
    products, beside = windows(x, w, groups, options), 1 < outputs // groups <= 16
    if beside and groups > 1:
        order = np.arange(len(products)).reshape(-1, kernel[-1], channels // groups)
        products = products[order.swapaxes(1, 2).ravel()]
    expected = in_blocks(products, ProductBlocks.of_convolution(channels // groups, kernel, beside=beside))
    for found in results(x, w, options):
        assert np.array_equal(found, expected)


LONG: list[Any] = [
    (512, (9, 9), 64, (3, 3), {"stride": 2, "padding": 1}),
    (512, (14, 14), 64, (3, 3), {"padding": 1}),  # Winograd's way
    (2048, (3, 3), 64, (1, 1), {}), (2048, (3, 3), 64, (1, 1), {"stride": 2}),
    (512, (7, 7), 32, (3, 3), {"groups": 2, "padding": 1}),  # groups side by side
    (1024, (5, 5), 256, (3, 3), {"groups": 2, "padding": 1}),
    (4, (12, 12, 64), 16, (8, 8, 4), {}),
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_errors_of_long_convolutions(case: Any) -> None:
    torch = pytest.importorskip("torch")
    channels, sizes, outputs, kernel, options = case
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in
            ((2, channels, *sizes), (outputs, channels // options.get("groups", 1), *kernel)))  # fmt: skip
    assert w[0].size >= 961
    function = getattr(torch.nn.functional, f"conv{len(kernel)}d")
    exact = function(*(torch.from_numpy(v).double() for v in (x, w)), **options).numpy()
    first = None
    for found in results(x, w, options):
        assert error(found, exact) < MOST
        first = found if first is None else first
        assert np.array_equal(found, first)


def test_paths_that_the_cases_take() -> None:
    """The templates differ: lines, panels, planes, tables, groups side by side."""
    seen = set()
    for channels, sizes, outputs, kernel, options in CONVOLUTIONS:
        w = np.zeros((outputs, channels // options.get("groups", 1), *kernel), np.float32)
        for last in (False, True):
            for plan in templates(compiled((2, channels, *sizes), w, options, last=last)):
                kind = type(plan.convolution).__name__
                seen.add(f"{kind} {'beside' if getattr(plan.convolution, 'beside', 0) else ''}".strip())
    assert {"Lines", "Planes", "Convolution", "Convolution beside"} <= seen


@pytest.mark.parametrize("m", [1, 2, 8, 64])
def test_errors_of_long_matmuls(m: int) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((m, 4096), (4096, 96)))
    exact = a.astype(np.float64) @ b
    for kept in (False, True):
        g = Graph("matmul")
        x = g.input("a", (sym("m", 1, 64), 4096))
        y = g.param("b", b.shape) if kept else g.input("b", b.shape)
        done = Session("cpu").compile(g.outputs(x @ y))
        if kept:
            done.set_params({"b": b})
        (found,) = done.run({"a": a} if kept else {"a": a, "b": b})
        assert error(np.asarray(found), exact) < MOST


def test_errors_of_experts() -> None:
    """A grouped matmul has the order of a matmul."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((40, 1024), (2, 1024, 96)))
    ids = rng.integers(0, 2, 40)
    g = Graph("experts")
    made = ops.grouped_matmul(g.input("x", x.shape), g.input("w", w.shape), g.input("ids", ids.shape, "i64"))
    (found,) = Session("cpu").compile(g.outputs(made)).run({"x": x, "w": w, "ids": ids})
    exact = np.stack([x[i].astype(np.float64) @ w[e] for i, e in enumerate(ids)])
    assert error(np.asarray(found), exact) < MOST
    for i in (0, 7, 39):
        product = run(plan_contraction(1, 96, 1024, HOST), x[i : i + 1], w[ids[i]])
        assert np.array_equal(np.asarray(found)[i : i + 1], product)
