"""A slice of the shipped suite through Triton's interpreter and compiler, where `triton` is installed.

It is 1 GB, so that the `dev` extra does not bring it. `tests/backends/triton_suite.py` says how to run all of it.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton (1 GB)"
)
ROOT = Path(__file__).parents[2]


def suite(*arguments: str, interpreted: bool, module: str = "triton_suite") -> str:
    """Triton decides when it is imported whether it interprets, so that each of the two has a process of its own."""
    settings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"tests.backends.{module}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=settings | ({"TRITON_INTERPRET": "1"} if interpreted else {}),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_samples_in_the_interpreter() -> None:
    report = suite("interpret", "--every", "16", interpreted=True)
    assert re.search(r"^1\d\d samples in Triton's interpreter, 0 wrong", report, re.MULTILINE)


def test_scalar_functions_on_awkward_numbers() -> None:
    report = suite(interpreted=True, module="triton_scalars")
    assert re.search(r"^1\d\d\d scalar functions in Triton's interpreter, 0 wrong", report, re.MULTILINE)


def test_programs_in_the_interpreter() -> None:
    names = ["a_decoder_for_every_size", "a_training_step", "attention_takes_its_scale_and_softcap", "random_graphs"]
    names += ["transposes_and_windows", "exponentials_of_long_rows", "orders_along_any_axis"]
    report = suite(*names, interpreted=True, module="triton_programs")
    assert report.endswith("7 programs in Triton's interpreter agree\n")


def test_schedules_of_matmuls_in_the_interpreter() -> None:
    report = suite(interpreted=True, module="triton_schedules")
    assert re.search(r"^\d+ matmuls by \d+ schedules in Triton's interpreter, 0 wrong", report, re.MULTILINE)


def test_attention_in_the_interpreter() -> None:
    report = suite(interpreted=True, module="triton_attention")
    assert re.search(r"^\d+ attentions in Triton's interpreter, 0 wrong", report, re.MULTILINE)


def test_products_with_quantised_weights_in_the_interpreter() -> None:
    report = suite("q4_0", "q5_0", "q3k", "q4k", "int4/32", interpreted=True, module="triton_blocks")
    assert re.search(r"^\d+ products with quantised weights in Triton's interpreter, 0 wrong", report, re.MULTILINE)


def test_the_search_for_schedules() -> None:
    assert suite(interpreted=True, module="triton_tune").endswith("schedules in Triton's interpreter agree\n")


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_compile(gpu: str) -> None:
    names = ["matmul-0", "matmul-0-bf16", "softmax-0", "layer_norm-0", "conv-0", "cumsum-0", "gather-0", "gelu-0-f16"]
    names += ["multiply-0-c64", "matmul-0-f64", "reduce_max-0", "cast-0"]
    names = names if gpu == "sm_90" else names[:5]
    report = suite("compile", "--gpu", gpu, *names, interpreted=False)
    assert re.search(rf"^\d+ programs for {gpu}, 0 rejected", report, re.MULTILINE)


def test_specialised_attention_compiles_without_spilling() -> None:
    report = suite(interpreted=False, module="triton_specialised")
    assert re.search(r"^\d+ attentions with specialised warps, 0 wrong", report, re.MULTILINE)
