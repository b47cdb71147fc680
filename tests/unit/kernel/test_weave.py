"""Short rows filled from several places, and elements that are a few apart: whole registers and shuffles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends.llvm.codegen.compile import compile_kernel, lower
from strata.core import Target
from strata.kernel import Axis, Kernel, Vectorise, combs

TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]
LENGTHS = (1, 7, 16, 17, 63, 64, 130, 1003)


def kernel_of(build: Callable[..., Any], *shapes: tuple[Any, ...], dtype: str = "f32") -> Kernel:
    g = st.Graph("g")
    g.outputs(build(*(g.input(f"x{i}", s, dtype) for i, s in enumerate(shapes))))
    (kernel,) = st.CompilePipeline("cpu").compile(g).lir.kernels.values()
    return kernel


def check(build: Any, wanted: Any, *shapes: tuple[int, ...], dtype: str = "f32", target: str = "host") -> None:
    rng = np.random.default_rng(len(shapes))
    arrays = [(rng.normal(size=s) * 50).astype(st.core.as_dtype(dtype).np) for s in shapes]
    kernel = kernel_of(build, *shapes, dtype=dtype)
    (got,) = compile_kernel(kernel, Target.named(target)).run(arrays, threads=2)
    np.testing.assert_array_equal(got.reshape(-1), np.asarray(wanted(*arrays)).reshape(-1))


@pytest.mark.few(8)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 7, 8, 9])
def test_channels_change_places(width: int, target: str) -> None:
    for length in LENGTHS:
        check(lambda x: x.transpose((1, 0)), lambda x: x.T, (width, length), target=target)
        check(lambda x: x.transpose((1, 0)), lambda x: x.T, (length, width), target=target)


@pytest.mark.parametrize("dtype", ["f64", "i8", "bool", "bf16", "i64"])
def test_every_width_of_elements(dtype: str) -> None:
    for length in LENGTHS:
        for width in (2, 3, 4):
            check(lambda x: x.transpose((1, 0)), lambda x: x.T, (width, length), dtype=dtype)
            check(lambda x: x.transpose((1, 0)), lambda x: x.T, (length, width), dtype=dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_every_few_elements(step: int, target: str) -> None:
    for length in LENGTHS:
        check(lambda x: x[1:, ::step], lambda x: x[1:, ::step], (4, length), target=target)
        if length > step:
            check(lambda x: x[step - 1 :: step] + 1, lambda x: x[step - 1 :: step] + 1, (length,), target=target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_repeated_and_broadcast(count: int, target: str) -> None:
    for length in LENGTHS:
        check(lambda x: st.ops.repeat(x, count, 1), lambda x: np.repeat(x, count, 1), (3, length), target=target)
        check(
            lambda x, n=length: st.ops.broadcast_to(x, (n, count)) + 1,
            lambda x, n=length: np.broadcast_to(x, (n, count)) + 1, (length, 1), target=target,
        )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("block", [2, 3, 4])
def test_blocks_become_pixels(block: int, target: str) -> None:
    for height, width in ((3, 5), (2, 16), (4, 33), (1, 70)):
        shape = (height, width, block, block)

        def spread(x: Any, size: tuple[int, int] = (height * block, width * block)) -> Any:
            return x.transpose((0, 2, 1, 3)).reshape(size)

        check(lambda x, s=spread: s(x) * 2, lambda x, s=spread: s(x) * 2, shape, target=target)
        check(spread, spread, shape, target=target)


def test_results_do_not_depend_on_threads() -> None:
    x = np.random.default_rng(0).normal(size=(3, 70000)).astype(np.float32)
    g = st.Graph("g")
    g.outputs(g.input("x", x.shape).transpose((1, 0)) * 2)
    for threads in (1, 2, 7):
        (got,) = st.Session("cpu").compile(g, st.CompileOptions(threads=threads)).run(x=x)
        np.testing.assert_array_equal(got, x.T * 2)


def test_sizes_that_are_not_known() -> None:
    n = st.sym("n", 0, 5000)
    g = st.Graph("g")
    g.outputs(g.input("x", (3, n)).transpose((1, 0)))
    compiled = st.Session("cpu").compile(g)
    for length in (0, 1, 15, 16, 333, 5000):
        x = np.random.default_rng(length).normal(size=(3, length)).astype(np.float32)
        np.testing.assert_array_equal(compiled.run(x=x)[0], x.T)


def test_stores_of_a_short_row_form_a_comb() -> None:
    lowered = lower(kernel_of(lambda x: x.transpose((1, 0)), (3, 1000)), Target.host())
    (axis,) = lowered.kernel.stores[0].axes
    (comb,) = combs(lowered.kernel.stores, axis)
    assert len(comb) == 3
    assert any(isinstance(a, Vectorise) for a in lowered.schedule.actions)
    assert combs(lowered.kernel.stores[:2], axis) == []
    assert combs(lowered.kernel.stores, Axis("other", 5)) == []


def test_whole_rows_stay_rows() -> None:
    lowered = lower(kernel_of(lambda x: x[:, 2:7], (1000, 9)), Target.host())
    assert len(lowered.kernel.stores) == 1
