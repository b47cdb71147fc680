"""Golden cases of the passes: one file a case, the whole text compared; and what the text says is what is computed."""

from pathlib import Path

import numpy as np
import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.mir import Graph, Op, evaluate, parse
from strata.passes import PASSES, PassContext, parse_passes, run_passes
from strata.testing import find_cases, read_case

CASES = find_cases(Path(__file__).parent / "passes", "*.txt")


def context(case) -> PassContext:
    if "takes" in case.header:
        return PassContext(takes=lambda op, types: not op.is_composition)
    if "kernels" in case.header:  # what has none is built from what has one
        return PassContext(takes=lambda op, types: type(op).lower is not Op.lower)
    return PassContext()


def transformed(case) -> Graph:
    return run_passes(parse_passes(case.header["pass"]), parse(case.program), context(case))[0]


@pytest.mark.parametrize("path", CASES, ids=[p.stem for p in CASES])
def test_becomes(path: Path, golden) -> None:
    golden(path, lambda case: str(transformed(case)))


@pytest.mark.parametrize("path", CASES, ids=[p.stem for p in CASES])
def test_computes_the_same(path: Path, rng) -> None:
    case = read_case(path)
    before, after = parse(case.program), transformed(case)
    feeds = {}
    for x in (*before.inputs, *before.params):
        shape = x.type.static_shape
        values = rng.integers(0, 2, shape) if not x.dtype.is_float else rng.standard_normal(shape)
        feeds[x.node.op.key] = np.asarray(values).astype(x.dtype.np)
    needed = {*after.input_names, *after.param_names}
    close = 2e-2 if case.header["pass"].startswith("precision") else 1e-6
    wanted = evaluate(before, feeds)
    for old, new in zip(wanted, evaluate(after, {n: a for n, a in feeds.items() if n in needed}), strict=True):
        assert old.dtype == new.dtype
        if old.dtype.kind == "f":
            np.testing.assert_allclose(new, old, rtol=close, atol=close)


@pytest.mark.parametrize("path", CASES, ids=[p.stem for p in CASES])
def test_a_second_run_changes_nothing(path: Path) -> None:
    case = read_case(path)
    if case.header["pass"].startswith("precision"):
        return  # the casts that it inserts are kept, and what they feed is narrow already
    once = transformed(case)
    twice, _ = run_passes(parse_passes(case.header["pass"]), once, context(case))
    assert str(twice) == str(once)


def test_every_pass_has_a_case() -> None:
    tried = {str(p).partition("{")[0] for path in CASES for p in parse_passes(read_case(path).header["pass"])}
    assert tried == set(PASSES)


def test_spelling_reads_back() -> None:
    for path in CASES:
        for one in parse_passes(read_case(path).header["pass"]):
            assert parse_passes(str(one)) == [one]
