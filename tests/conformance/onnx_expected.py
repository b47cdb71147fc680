"""Cases of onnx.backend.test that are known to fail, each with its reason."""

from __future__ import annotations

_RANDOM = "the expected numbers are draws of NumPy's global generator; the standard calls the case informational"
_HALF = "two of 192 f16 numbers differ by 5e-4; ours are nearer to the f64 result than the expected ones"
_HARNESS = "the suite's comparison fails on arrays without axes inside a sequence, for onnx's own evaluator too"
_NYQUIST = "f32 FFT kernels leave 2e-6 where the imaginary part is exactly 0; the case allows 1e-7"
_INDEX = "wrong index arithmetic in CPU kernels: strata.kernel.algebra drops a constant when it joins // and %"

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

# Fail on the compiled backend only; to be removed with the bug.
_ROTARY = ("", "_3d_input", "_interleaved", "_no_position_ids", "_no_position_ids_interleaved",
           "_no_position_ids_rotary_dim", "_with_interleaved_rotary_dim", "_with_rotary_dim")  # fmt: skip
KERNEL_FAILURES: dict[str, str] = dict.fromkeys(
    [
        *(f"test_{name}" for name in ("dft_irfft", "dft_irfft_opset19", "sequence_model5")),
        *(f"test_rotary_embedding{form}{body}" for form in _ROTARY for body in ("", "_expanded")),
    ],
    _INDEX,
) | dict.fromkeys([f"test_dft{form}{opset}" for form in ("", "_axis", "_rfft") for opset in ("", "_opset19")], _NYQUIST)


def reason(name: str) -> str | None:
    """Why a case is expected to fail on the compiled backend; None where it must pass."""
    return EXPECTED_FAILURES.get(name) or KERNEL_FAILURES.get(name)
