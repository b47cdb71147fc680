"""Products with GGUF weights on the processor: every format, any number of rows, tails, threads."""

from __future__ import annotations

import numpy as np
import pytest

from strata import ops
from strata.core import Target, sym
from strata.mir import Graph
from strata.ops import schemes
from strata.runtime import CompiledGraph, CompileOptions, Session

KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k", "q8k")
pytestmark = pytest.mark.skipif(not Target.host().has_avx2, reason="the native product needs AVX2")


def _compiled(scheme: schemes.Scheme, codes: np.ndarray, k: int, threads: int | None = None) -> CompiledGraph:
    g = Graph("product")
    x, w = g.input("x", (sym("M", 1, 512), k)), g.param("w", codes.shape, "u8")
    g.outputs(ops.dequant_matmul(x, w, scheme=scheme))
    made = Session("cpu").compile(g, CompileOptions(threads=threads))
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


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind: str, rng: np.random.Generator) -> None:
    scheme = schemes.Scheme(f"gguf_{kind}")
    (codes,) = scheme.encode(rng.standard_normal((256, 130)))
    x = rng.standard_normal((9, 256)).astype(np.float32)
    one, two = (_compiled(scheme, codes, 256, threads).run(x=x)[0] for threads in (1, 2))
    assert np.array_equal(one, two)


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
