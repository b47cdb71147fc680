"""Cases of onnx.backend.test that are known to fail, each with its reason."""

from __future__ import annotations

_RANDOM = "the expected numbers are draws of NumPy's global generator; the standard calls the case informational"
_HALF = "two of 192 f16 numbers differ by 5e-4; ours are nearer to the f64 result than the expected ones"
_HARNESS = "the suite's comparison fails on arrays without axes inside a sequence, for onnx's own evaluator too"

EXPECTED_FAILURES: dict[str, str] = {
    "test_attention_4d_causal_fp16": _HALF,
    "test_attention_4d_causal_fp16_expanded": _HALF,
    "test_bernoulli": _RANDOM,
    "test_bernoulli_double": _RANDOM,
    "test_bernoulli_double_expanded": _RANDOM,
    "test_bernoulli_expanded": _RANDOM,
    "test_bernoulli_seed": _RANDOM,
    "test_bernoulli_seed_expanded": _RANDOM,
    "test_loop16_seq_none": _HARNESS,
}


def reason(name: str) -> str | None:
    """Why a case is expected to fail on the compiled backend; None where it must pass."""
    return EXPECTED_FAILURES.get(name)
