"""Random graphs of mixed types: machine code gives what the interpreter gives, fused and not, on 1 and 7 threads."""

import numpy as np
import pytest

from strata.config import using
from strata.core import bf16, f16
from strata.mir import Value, evaluate, toposort
from strata.runtime import CompileOptions, Session
from tests.fuzz.mixed_graphs import mixed_graph

CLOSE = {4: 1e-4, 8: 1e-9}  # by the size of a float


def check_mixed(seed: int) -> None:
    graph, feeds = mixed_graph(seed)
    wanted = evaluate(graph, feeds)
    narrow = any(x.dtype in (f16, bf16) for node in graph.nodes() for x in node.outputs)
    first = None
    for options in (CompileOptions(), CompileOptions(fusion=False)):
        compiled = Session("cpu").compile(graph, options)
        assert not compiled.host_steps
        results = compiled.run(feeds)
        note = f"seed {seed} {options}\n{graph}\n{compiled.lir}"
        for got, want, x in zip(results, wanted, graph.results, strict=True):
            assert got.dtype == want.dtype == x.dtype.np, note
            assert got.shape == want.shape, note
            if narrow:  # they are rounded in other places, and may fall on the other side of a step
                assert np.isfinite(got.astype(np.float64)).all(), note
            elif x.dtype.is_float:
                scale = max(1.0, float(np.max(np.abs(want), initial=0.0)))
                close = CLOSE[_narrowest(x)]
                np.testing.assert_allclose(got, want, rtol=close, atol=close * scale, err_msg=note)
            else:
                np.testing.assert_array_equal(got, want, err_msg=note)
        if first is None:
            first = results
            with using(num_threads=7):
                for a, b in zip(results, compiled.run(feeds), strict=True):
                    np.testing.assert_array_equal(a, b, err_msg=note)


def _narrowest(result: Value) -> int:
    """Bytes of the narrowest float that a result is made of."""
    made_of = [x.dtype for node in toposort([result]) for x in node.outputs]
    return min(dtype.itemsize for dtype in made_of if dtype.is_float)


@pytest.mark.parametrize("seed", range(40))
def test_mixed_types(seed: int) -> None:
    check_mixed(seed)


@pytest.mark.parametrize("seed", [1024, 530, 223, 975])
def test_seeds_that_failed_once(seed: int) -> None:
    """Running sums along two axes in one kernel; those that are the same for all lanes of a last step; single elements
    at the end of rows that are stored as bytes."""
    check_mixed(seed)
