"""Products with GGUF weights on the processor: every format, any number of rows, tails, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata import ops
from strata.backends.llvm.backend import CpuBackend
from strata.backends.llvm.quant.gguf_wide import STEPS
from strata.core import Target, as_dtype, sym
from strata.mir import REGISTRY, Graph
from strata.ops.quant import schemes
from strata.ops.quant.dequant import quantize_weights
from strata.ops.quant.gguf_blocks import FORMATS, block_format, random_blocks
from strata.runtime import CompiledGraph, CompileOptions, Session

KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k", "q8k", "iq4_nl", "iq4_xs", "mxfp4")
DECODED = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "nvfp4", "tq1_0", "q1_0", "u4_128h",
           "i8_64b", "m4_32f", "nf4_64f", "fp4_64f", "e4m3_128f", "e5m2_32h")  # fmt: skip
TARGETS = [t for t in map(Target.named, ("host", "avx512", "avx2")) if t.runs_on(Target.host())]
pytestmark = pytest.mark.skipif(not Target.host().has_avx2, reason="the native product needs AVX2")


def _compiled(
    scheme: schemes.Scheme, codes: np.ndarray, k: int, threads: int | None = None, target: Target | None = None
) -> CompiledGraph:
    g = Graph("product")
    x, w = g.input("x", (sym("M", 1, 512), k)), g.param("w", codes.shape, "u8")
    g.outputs(ops.dequant_matmul(x, w, scheme=scheme))
    session = Session("cpu")
    session.backend = CpuBackend(target)
    made = session.compile(g, CompileOptions(threads=threads))
    made.set_param("w", codes)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 7, 66])
def test_values(kind: str, n: int, rng: np.random.Generator) -> None:
    scheme, k = schemes.Scheme(f"gguf_{kind}"), 512
    (codes,) = scheme.encode(rng.standard_normal((k, n)))
    exact = scheme.decode(codes, k=k, n=n).astype(np.float64)
    made = _compiled(scheme, codes, k)
    assert [s.label for s in made.lir.schedule] == ["dequant_matmul"]
    for rows in (1, 2, 3, 4, 71):
        x = rng.standard_normal((rows, k)).astype(np.float32)
        usual = np.linalg.norm(x) * np.linalg.norm(exact) / np.sqrt(k)  # size of results whose terms are independent
        assert np.linalg.norm(made.run(x=x)[0] - x @ exact) <= 1e-4 * usual, rows


@pytest.mark.few(12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_steps_that_are_not_whole(kind: str, target: Target, rng: np.random.Generator) -> None:
    """Rows whose blocks do not fill a step, and the last of which ends where the weights end."""
    scheme = schemes.Scheme(f"gguf_{kind}")
    for k in (256, 768) if FORMATS[kind].elements == 256 else (64, 96, 128, 160, 352):
        (codes,) = scheme.encode(rng.standard_normal((k, 9)))
        exact = scheme.decode(codes, k=k, n=9).astype(np.float64)
        made = _compiled(scheme, codes, k, target=target)
        for rows in (1, 3, 5):
            x = rng.standard_normal((rows, k)).astype(np.float32)
            usual = np.linalg.norm(x) * np.linalg.norm(exact) / np.sqrt(k)
            assert np.linalg.norm(made.run(x=x)[0] - x @ exact) <= 1e-4 * usual, (k, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_each_element_of_a_block(kind: str, rng: np.random.Generator) -> None:
    """A single element of x that is not zero finds its own weight: all elements of two blocks of the widest kind."""
    scheme, k = schemes.Scheme(f"gguf_{kind}"), 512
    (codes,) = scheme.encode(rng.standard_normal((k, 5)))
    exact = scheme.decode(codes, k=k, n=5)
    made = _compiled(scheme, codes, k)
    for at in range(k):
        x = np.zeros((1, k), np.float32)
        x[0, at] = 1.0
        np.testing.assert_allclose(made.run(x=x)[0][0], exact[at], rtol=0, atol=2e-5 * np.abs(exact).max())


@pytest.mark.few(12)
@pytest.mark.parametrize("kind", DECODED)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_blocks_that_are_decoded_in_the_cache(kind: str, target: Target, rng: np.random.Generator) -> None:
    """Random bytes: what no encoder writes must be read as well."""
    scheme, n = schemes.Scheme(f"gguf_{kind}"), 7
    form = block_format(kind)
    for k in (form.elements, 1024 + 3 * form.elements):
        codes = random_blocks(form, n * k // form.elements, rng).reshape(-1)
        exact = scheme.decode(codes, k=k, n=n).astype(np.float64)
        made = _compiled(scheme, codes, k, target=target)
        assert [s.label for s in made.lir.schedule] == ["dequant_matmul"]
        for rows in (1, 3, 9):
            x = rng.standard_normal((rows, k)).astype(np.float32)
            usual = np.linalg.norm(x) * np.linalg.norm(exact) / np.sqrt(k)
            assert np.linalg.norm(made.run(x=x)[0] - x @ exact) <= 2e-6 * usual, (k, rows)


def test_steps_name_every_eight_once() -> None:
    for step in STEPS.values():
        assert sorted(run for runs in step.runs for run in runs) == list(range(step.elements // 8))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind: str, rng: np.random.Generator) -> None:
    scheme = schemes.Scheme(f"gguf_{kind}")
    (codes,) = scheme.encode(rng.standard_normal((256, 1030)))
    for rows in (1, 9):
        x = rng.standard_normal((rows, 256)).astype(np.float32)
        found = [_compiled(scheme, codes, 256, threads).run(x=x)[0] for threads in (1, 2, 7)]
        for other in found[1:]:
            assert np.array_equal(found[0], other)


def test_rows_of_zeros_and_outliers(rng: np.random.Generator) -> None:
    scheme = schemes.Scheme("gguf_q4_1")
    (codes,) = scheme.encode(rng.standard_normal((256, 8)))
    exact = scheme.decode(codes, k=256, n=8).astype(np.float64)
    x = rng.standard_normal((3, 256)).astype(np.float32)
    x[0] = 0
    x[1, 5] = 1e4
    x[2] *= 1e-30
    found, wanted = _compiled(scheme, codes, 256).run(x=x)[0], x @ exact
    assert (found[0] == 0).all()
    for i in (1, 2):
        assert np.linalg.norm(found[i] - wanted[i]) <= 1e-4 * np.linalg.norm(wanted[i])


@pytest.mark.parametrize("level", ["host", "avx2", "baseline"])
@pytest.mark.parametrize("scheme", ["gguf_q4_0", "gguf_q8_0", "gguf_q4k", "gguf_q6k", "gguf_q8k"])
@pytest.mark.parametrize("rows", [1, 4, 17])
def test_what_is_not_finite_is_never_lost(rows: int, scheme: str, level: str) -> None:
    """Rows become whole numbers with a scale: one that has a NaN or an infinity gives no numbers, others stay as is."""
    if not Target.named(level).runs_on(Target.host()):
        pytest.skip("this processor lacks the instructions")
    rng = np.random.default_rng(rows)
    (codes,) = quantize_weights(rng.standard_normal((512, 48)).astype(np.float32), scheme)
    graph = Graph("g")
    x, w = graph.input("x", (rows, 512)), graph.input("w", codes.shape, "u8")
    compiled = Session(f"cpu:{level}").compile(graph.outputs(ops.dequant_matmul(x, w, scheme=scheme)))
    plain = rng.standard_normal((rows, 512)).astype(np.float32)
    (wanted,) = compiled.run(x=plain, w=codes)
    assert np.isfinite(wanted).all()
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        for at in (0, 5, 8, 31, 32, 300, 511):  # every lane of the first group's registers, and other groups
            broken = plain.copy()
            broken[0, at] = value
            (got,) = compiled.run(x=broken, w=codes)
            assert not np.isfinite(got[0]).any(), (value, at)
            np.testing.assert_array_equal(got[1:], wanted[1:])


def test_schemes_without_blocks_run_as_loops(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 6)).astype(np.float32)
    codes = rng.integers(-128, 127, (6, 3)).astype(np.int8)
    feeds: dict[str, np.ndarray] = {"x": x, "codes": codes}
    feeds |= {name: rng.random((2, 3)).astype(np.float32) for name in ("scales", "zeros")}
    g = Graph("int8a")
    kind: Any = REGISTRY["dequant_matmul"]
    multiplied = kind(scheme=schemes.Scheme(kind="int8a", block_size=4))
    g.outputs(multiplied(*(g.input(name, a.shape, as_dtype(a.dtype)) for name, a in feeds.items())))
    (got,), (want,) = (Session(device).compile(g).run(feeds) for device in ("cpu", "reference"))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
