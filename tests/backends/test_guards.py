"""Arrays end where they end: what lies before and behind a result stays as it was, and nothing else is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strata import ops
from strata.backends.llvm.codegen.compile import compile_kernel
from strata.core import Target, bf16, f32, f64, i8
from strata.kernel import SPREADS, KernelBuilder, parse_schedule
from strata.mir import Graph, Value
from strata.runtime import CompileOptions, Session
from tests.backends.guard_pages import DEVICES, guarded, sweep

AROUND = 128  # elements before and behind
MADE: dict[str, Callable[[Value], Value]] = {
    "narrowed": lambda x: ops.cast(x, "u8"),
    "running": lambda x: ops.cast(ops.cumsum(x, axis=2), "u8"),
    "compared": lambda x: ops.greater(x, x * 2),
    "sorted": lambda x: ops.cast(ops.argsort(x, axis=2), "i16"),
    "rounded": lambda x: ops.cast(ops.cast(x, "f32") * 0.5, "f16"),
    "turned": lambda x: ops.cast(ops.transpose(x, (2, 0, 1)), "i8"),
    "added up": lambda x: ops.cast(ops.sum(x, axis=1), "i32"),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("source", ["u8", "i32", "i64"])
@pytest.mark.parametrize("name", MADE)
def test_nothing_is_written_beside_results(name: str, source: str) -> None:
    rng = np.random.default_rng(0)
    for length in (1, 2, 7, 9, 15, 16, 17, 18, 31, 33, 65, 129):
        graph = Graph("guarded")
        x = graph.input("x", (2, 3, length), source)
        y = MADE[name](x)
        graph.outputs(y)
        values = rng.integers(0, 9, (2, 3, length)).astype(x.dtype.np)
        for fusion in (True, False):
            compiled = Session("cpu").compile(graph, CompileOptions(fusion=fusion))
            count = int(np.prod(y.shape))
            memory = np.full(count + 2 * AROUND, 1, y.dtype.np)
            result: Any = memory[AROUND : AROUND + count].reshape(y.shape)
            compiled.run_into({"x": values}, [result])
            (wanted,) = compiled.run(x=values)
            np.testing.assert_array_equal(result, wanted)
            assert (memory[:AROUND] == 1).all(), length
            assert (memory[AROUND + count :] == 1).all(), length


@pytest.mark.few(1)
@pytest.mark.parametrize("device", DEVICES)
def test_samples_stay_inside_their_arrays(device: str) -> None:
    """Some of the catalogue, in another process: what reads past an end dies. All: `python -m …guard_pages`."""
    assert not list(sweep(device, every=17))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", SPREADS)
def test_elements_that_are_apart(device: str, step: int) -> None:
    """Fewer lanes than elements between two of them: no register may end behind the last one."""
    rng = np.random.default_rng(step)
    for lanes, dtype in itertools.product((2, 4, 8, 16), (f32, bf16, i8, f64)):
        k = KernelBuilder("apart")
        x = k.input("x", dtype[3 * lanes * step])
        k.output("y", dtype[3 * lanes], lambda index, x=x: x[index[0] * step + (step - 1)])
        native = compile_kernel(
            k.build(),
            Target.named(device.split(":")[1]),
            parse_schedule(f"parallel 1 grain 64; vectorise 0 by {lanes}"),
        )
        array = guarded(rng.integers(-9, 9, 3 * lanes * step).astype(dtype.np), at_end=True)
        np.testing.assert_array_equal(native(array)[0], array[step - 1 :: step])
