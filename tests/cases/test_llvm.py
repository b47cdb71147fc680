"""Golden cases of LLVM IR: one file a case, for named targets: a change of what is generated is a diff."""

from pathlib import Path

import pytest

from strata.testing import find_cases, read_case
from tests.cases.texts import TARGETS, functions_of, llvm_text, whole_text

CASES = find_cases(Path(__file__).parent / "llvm", "*.txt")


@pytest.mark.parametrize("path", CASES, ids=[p.stem for p in CASES])
def test_becomes(path: Path, golden) -> None:
    golden(path, llvm_text)


@pytest.mark.parametrize("target", TARGETS)
def test_the_whole_text_is_well_formed(target: str) -> None:
    text = whole_text(read_case(Path(__file__).parent / "llvm" / "softmax.txt"), target)
    functions = {line.partition("@")[2].partition("(")[0] for line in text.splitlines() if line.startswith("define")}
    assert functions == {"kernel"}
    assert text.count("\n}") == len(functions)


def test_names_of_values_do_not_matter() -> None:
    one = "define void @f(ptr %x) {\nentry:\n  %a = load i64, ptr %x\n  br label %done\ndone:\n  ret void\n}"
    assert functions_of(one) == functions_of(one.replace("%a", "%b").replace("done", "end"))
    assert functions_of(one) != functions_of(one.replace("i64", "i32"))
