"""One place has the order of kernel rewrites."""

from __future__ import annotations

import ast
from pathlib import Path

from strata.kernel import device_form, interpret, loops_of, normalize, processor_phases
from tests.source import nodes_of
from tests.unit.kernel import samples

PACKAGE = Path(__file__).parents[3] / "strata"
# what `normalize` is followed by; backends ask for the whole order, and matchers for the normal form
LATER = {"as_bits", "columns_first", "unroll_short_rows", "unroll_short_reductions", "cut_stores"}


def test_only_the_pipeline_puts_rewrites_in_order() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), alias.name)
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path.read_text("utf-8"), LATER)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("strata.kernel")
        for alias in node.names
        if alias.name in LATER
    }
    assert {path for path, _ in found} == {"kernel/passes/pipeline.py"}
    assert {name for _, name in found} == LATER


def test_every_form_computes_the_same(rng) -> None:
    sample = samples.reduction((6, 40), (1,))
    array = rng.random((6, 40), "f")
    (want,) = interpret(sample.kernel, [array])
    phases = processor_phases(sample.kernel)
    assert phases.kernels == (normalize(sample.kernel),)
    for form in (device_form(sample.kernel), loops_of(phases.kernels[0])[0]):
        (got,) = interpret(form, [array.reshape(-1)])
        assert (got.reshape(want.shape) == want).all()
