"""strata/testing/golden.py: reading, comparing and rewriting golden cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.errors import FileError
from strata.testing import GoldenCase, check_case, find_cases, read_case

TEXT = """\
# pass: upper{times=1}
# target: cpu
# a comment of the program
mir @f {
  x
}
# becomes
MIR @F {
  X
}
"""


def upper(case: GoldenCase) -> str:
    return case.program.removeprefix("# a comment of the program\n").upper() + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "a.mir"
    file.write_text(TEXT)
    return file


def test_reads_and_prints_back(path: Path) -> None:
    case = read_case(path)
    assert dict(case.header) == {"pass": "upper{times=1}", "target": "cpu"}
    assert case.program == "# a comment of the program\nmir @f {\n  x\n}"
    assert case.expected == "MIR @F {\n  X\n}"
    assert str(case) == TEXT


def test_equal_text_passes_and_is_left_alone(path: Path) -> None:
    check_case(path, upper)
    check_case(path, upper, update=True)
    assert path.read_text() == TEXT


def test_difference_fails_with_a_diff(path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        check_case(path, lambda case: upper(case).replace("X", "Y"))
    assert "-  X\n+  Y" in str(caught.value)
    assert path.read_text() == TEXT


def test_update_rewrites_the_lower_half(path: Path) -> None:
    check_case(path, lambda case: upper(case).replace("X", "Y"), update=True)
    assert path.read_text() == TEXT.replace("  X", "  Y")


def test_missing_half_fails_until_written(path: Path) -> None:
    path.write_text(TEXT.partition("# becomes")[0])
    with pytest.raises(AssertionError, match="make golden"):
        check_case(path, upper)
    check_case(path, upper, update=True)
    assert path.read_text() == TEXT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mir @f {}\n# becomes\nmir @f {}\n", ":1: a golden case opens with a line such as '# pass: name'"),
        ("# pass: a\n# pass: b\nx\n# becomes\ny\n", ":2: 'pass' is given twice"),
        ("# pass: a\n\n# becomes\ny\n", ":2: the program is missing"),
        ("# pass: a\nx\n# becomes\ny\n# becomes\nz\n", ":5: a second '# becomes'"),
    ],
)
def test_malformed_case_is_named_by_line(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(FileError) as caught:
        read_case(path)
    assert str(caught.value).split("\n")[0] == f"{path}{message}   [F191]"


def test_an_empty_folder_is_an_error(path: Path) -> None:
    assert find_cases(path.parent) == [path]
    with pytest.raises(FileError, match="no golden case"):
        find_cases(path.parent, "*.lir")
