"""What small programs cost when they are written step by step: the call itself, and the first call of a new shape.

In functions of Python that are entered; seconds are in benchmarks/costs.py.
"""

import numpy as np
import pytest

import strata as st
from strata.runtime import Session
from tests.counts import calls

CALL = 140  # functions of (a + b).numpy() on a thousand floats, after the first
NEW_SHAPE = 260  # functions of a known program on a shape that it has not met


def pair(count: int) -> tuple[st.Tensor, st.Tensor]:
    rng = np.random.default_rng(count)
    a, b = (st.tensor(rng.standard_normal(count).astype("f")) for _ in range(2))
    return a, b


def work(a: st.Tensor, b: st.Tensor) -> int:
    def add() -> None:
        (a + b).numpy()

    return calls(add)


def test_a_sum_of_a_thousand_floats() -> None:
    a, b = pair(1000)
    for _ in range(20):
        work(a, b)
    assert max(work(a, b) for _ in range(50)) < CALL


def test_a_shape_that_is_new() -> None:
    work(*pair(999))
    done = sorted(work(*pair(n)) for n in range(1001, 1041))
    assert done[len(done) // 2] < NEW_SHAPE


def test_a_thousand_shapes_take_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one expression, at sizes that are interpreted and sizes that are compiled."""
    kernels: list[str] = []
    compile_graph = Session.compile

    def counted(self: Session, *args: object, **kwargs: object) -> object:
        made = compile_graph(self, *args, **kwargs)  # type: ignore[arg-type]
        kernels.extend(made.lir.kernels)
        return made

    monkeypatch.setattr(Session, "compile", counted)
    rng = np.random.default_rng(0)
    for n in range(1, 1001):
        x = rng.standard_normal((n, 37)).astype("f")
        got = (st.tanh(st.tensor(x)) * 0.25 + 1.5).numpy()
        assert got.shape == x.shape
    np.testing.assert_allclose(got, np.tanh(x) * 0.25 + 1.5, rtol=1e-5)
    assert 1 <= len(kernels) <= 3, kernels
