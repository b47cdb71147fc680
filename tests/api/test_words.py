"""The field's words find the things they name: in code, in pages, on the command line."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from strata.cli.parser import make_parser

ROOT = Path(__file__).parents[2]
PLACES = {
    "KV cache": ("strata/models", "strata/serving", "strata/backends/llvm/attention", "docs/guides/serving.md"),
    "paged KV cache": ("strata/models/paged.py", "strata/ops/nn/paged.py", "strata/serving", "docs/guides/serving.md"),
    "continuous batching": ("strata/serving/engine.py", "docs/guides/serving.md", "README.md"),
    "speculative decoding": ("strata/models/speculative.py", "strata/models/generate.py", "docs/guides/serving.md"),
    "prefill": ("strata/models/cached.py", "strata/serving/batching.py", "docs/guides/serving.md"),
    "decode": ("strata/models/cached.py", "strata/serving/batching.py", "strata/backends/llvm/attention/decode.py"),
    "matmul": (
        "strata/backends/llvm/gemm",
        "strata/backends/triton/codegen/product.py",
        "strata/backends/wgsl/tiles.py",
    ),
    "epilogue": ("strata/backends/llvm/gemm/epilogue.py", "strata/lir/fusion.py", "docs/guides/fusion.md"),
    "tile": ("strata/backends/llvm/gemm/micro.py", "strata/backends/llvm/loops", "docs/concepts/kernels.md"),
    "software pipelining": (
        "strata/backends/llvm/loops/software_pipeline.py",
        "strata/kernel",
        "docs/concepts/kernels.md",
    ),
    "non-temporal store": ("strata/backends/llvm/loops", "strata/kernel/choose.py", "docs/concepts/kernels.md"),
    "prefetch": ("strata/backends/llvm/loops", "strata/kernel/schedule.py", "docs/concepts/kernels.md"),
    "horizontal fusion": ("strata/lir/siblings.py", "docs/guides/fusion.md"),
    "donation": ("strata/lir/donation.py",),
}


@pytest.mark.parametrize("word", PLACES)
def test_a_search_finds_where_it_is(word: str) -> None:
    assert [place for place in PLACES[word] if word.lower() not in text_of(ROOT / place)] == []


def text_of(place: Path) -> str:
    """A page, a module, or all modules of a folder, in small letters and on one line."""
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return " ".join(" ".join(f.read_text("utf-8") for f in files).lower().replace("*", "").split())


def test_every_module_begins_with_a_sentence_on_its_subject() -> None:
    wrong = []
    for path in sorted((ROOT / "strata").rglob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        first, _, _ = said.partition("\n\n")
        if "\n" in first or not first.endswith((".", "…")) or len(first) > 120:
            wrong.append(f"{path.relative_to(ROOT)}: {first}")
    assert wrong == []


def test_commands_say_it_too() -> None:
    commands: Any = next(a.choices for a in make_parser()._actions if a.dest == "command")
    assert "speculative decoding" in commands["generate"].format_help().replace("\n", " ")
    assert "KV cache" in " ".join(commands["serve"].format_help().split())
