"""Kernel text reads back as the kernel it came from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core import sym
from strata.errors import ParseError
from strata.kernel import StoredKernel, parse_kernel, show_kernel, verify_kernel
from strata.kernel import text as text_module
from tests.unit.kernel import samples

ROWS, COLUMNS = sym("R"), sym("C", 1, 4096)
SAMPLES = {
    "softmax": samples.softmax(ROWS, COLUMNS),
    "layernorm": samples.layernorm(ROWS, 768),
    "column_sum": samples.reduction((ROWS, COLUMNS), (0,)),
    "argmax": samples.reduction((ROWS, 7), (1,), "argmax"),
    "gather": samples.gather(ROWS, COLUMNS, 8),
    "pad": samples.pad(ROWS, COLUMNS, 2, 3),
    "merge_heads": samples.merge_heads(2, 3, ROWS, 16),
    "concatenate": samples.concatenate(ROWS, COLUMNS, 4),
}

SOFTMAX = """kernel @softmax(x: f32[R, 8]) -> y: f32[R, 8] {
  size R in 1..
  axis i0 in R
  axis i1 in 8
  axis r0a in 8
  %0 = x[i0, i1]
  %1 = x[i0, r0a]
  %2 = max %1 over r0a
  %3 = sub(%0, %2)
  %4 = exp(%3)
  %5 = sub(%1, %2)
  %6 = exp(%5)
  %7 = sum %6 over r0a
  %8 = div(%4, %7)
  store y[i0, i1] = %8 over i0, i1
}"""


@pytest.mark.parametrize("name", SAMPLES)
def test_round_trip(name: str) -> None:
    kernel = SAMPLES[name].kernel
    verify_kernel(kernel)
    text = show_kernel(kernel)
    again = parse_kernel(text)
    assert again == kernel
    assert show_kernel(again) == text


def test_softmax_text() -> None:
    assert show_kernel(samples.softmax(ROWS, 8).kernel) == SOFTMAX


def test_an_order_that_an_op_names_is_in_the_text() -> None:
    text = SOFTMAX.replace("= sum %6", "= sum.serial %6")
    kernel = parse_kernel(text)
    assert show_kernel(kernel) == text
    assert kernel != parse_kernel(SOFTMAX)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("  %0 = x[i9]", "is not a value"),
        ("  %0 = zork(i0)", "is not a scalar function"),
        ("  %0 = sub(i0)", "takes 2 arguments"),
        ("  hello", "expected size, axis"),
        ("  store q[i0] = i0 over i0", "no buffer"),
    ],
)
def test_errors_name_the_line(line: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason) as caught:
        parse_kernel(f"kernel @k(x: f32[8]) -> y: f32[8] {{\n  axis i0 in 8\n{line}\n}}")
    assert "line 3" in str(caught.value)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_stored_kernel_is_read_when_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    k = SAMPLES[name].kernel
    shown = show_kernel(k)
    with monkeypatch.context() as m:
        m.setattr(text_module, "parse_kernel", lambda _: pytest.fail("read too early"))
        stored = StoredKernel.of(shown)
        assert (stored.name, stored.input_names, stored.output_names) == (k.name, k.input_names, k.output_names)
        assert stored.has_reductions == k.has_reductions
        other = stored.renamed("other")
        assert other.name == "other"
        assert show_kernel(stored) == shown
    assert stored == k
    assert k == stored
    assert hash(stored) == hash(k)
    assert other == k.renamed("other")
    assert show_kernel(other) == show_kernel(k.renamed("other"))
    assert replace(stored, schedule=k.schedule) == k
    with pytest.raises(AttributeError):
        _ = StoredKernel.of(shown).other  # type: ignore[attr-defined]


def test_a_changed_kernel_has_another_text() -> None:
    k = SAMPLES["softmax"].kernel
    assert show_kernel(replace(k, name="other")) == show_kernel(k).replace(f"@{k.name}(", "@other(", 1)


def test_what_is_no_kernel_is_not_stored() -> None:
    with pytest.raises(ParseError, match="expected `kernel"):
        StoredKernel.of("nothing")
