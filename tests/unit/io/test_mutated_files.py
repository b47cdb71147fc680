"""A few hundred mutants of each format; tests/fuzz/mutate_files.py runs many more by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "fuzz" / "mutate_files.py"


def test_mutants_are_refused_or_read(seed: int) -> None:
    spec = importlib.util.spec_from_file_location("mutate_files", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    refused = module.run(300, seed)
    assert all(count > 100 for count in refused.values()), refused
