"""docs/errors: a section for every code that the package raises, written from the cases beside this file.

`make golden` writes the pages, and the list of all codes at the end of index.md. A code that no short program can raise
has its section in a page that is written by hand: index.md, classes.md, internal.md, files.md or serving.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strata.testing import GoldenCase, find_cases, read_case

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs/errors"
PRELUDE = (Path(__file__).parent / "prelude.txt").read_text("utf-8")
PAGES = {
    "shapes": ("S", "Shapes and sizes"),
    "dtypes": ("D", "Element types"),
    "indices": ("I", "Indices"),
    "names": ("N", "Names"),
    "options": ("O", "Options and arguments"),
    "texts": ("P", "Texts"),
    "tracing": ("T", "Graphs, traces and tensors"),
    "rules": ("RV", "Rules and checks of ops"),
    "budgets": ("B", "Budgets"),
    "devices": ("CEGLF", "Blocks, targets, devices and settings"),
    "runs": ("X", "Failures while a program runs"),
}
CODE = re.compile(r"""["']([SDINOPVRTLCEXFGBZ][0-9]{3})["']""")
SECTION = re.compile(r"^## ([A-Z][0-9]{3}): ", re.MULTILINE)
TITLE = re.compile(r"^## ([A-Z][0-9]{3}): (.+)$", re.MULTILINE)
LIST = "## Every code\n"


def cases_by_code() -> dict[str, list[GoldenCase]]:
    found: dict[str, list[GoldenCase]] = {}
    for path in find_cases(Path(__file__).parent / "cases", "*.case"):
        case = read_case(path)
        if re.fullmatch(r"[A-Z][0-9]{3}", case.header["error"]):
            found.setdefault(case.header["error"], []).append(case)
    return found


def section(code: str, cases: list[GoldenCase]) -> str:
    title = cases[0].path.stem.partition("_")[2].replace("_", " ")
    parts = [f"## {code}: {title}"]
    for case in cases:
        parts.append(f"```python\n{case.program}\n```")
        parts.append(f"```text\n{case.expected}\n```")
        repair = case.header["repair"]
        parts.append(f"{repair[0].upper()}{repair[1:]}.")
    return "\n\n".join(parts)


def page(letters: str, title: str) -> str:
    found = cases_by_code()
    head = f"# {title}\n\nEvery program here starts after\n\n```python\n{PRELUDE.strip()}\n```"
    return "\n\n".join([head, *(section(c, found[c]) for c in sorted(found) if c[0] in letters)]) + "\n"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name: str, request: pytest.FixtureRequest) -> None:
    path, text = DOCS / f"{name}.md", page(*PAGES[name])
    if request.config.getoption("--update-golden"):
        path.write_text(text, "utf-8")
    assert path.exists(), f"{path} is missing; `make golden` writes it"
    assert path.read_text("utf-8") == text, f"{path} does not follow from the cases; `make golden` writes it"


def list_of_codes() -> str:
    """Every code with its mistake, as links to the sections, a line a code."""
    rows = []
    for path in DOCS.glob("*.md"):
        for code, title in TITLE.findall(path.read_text("utf-8")):
            anchor = re.sub(r"[^\w\- ]", "", f"{code} {title}".lower()).replace(" ", "-")
            rows.append(f"- [{code}]({path.name}#{anchor}) {title}")
    return "\n".join([LIST, *sorted(rows, key=lambda row: row[3:7])]) + "\n"


def test_the_list_of_codes_is_current(request: pytest.FixtureRequest) -> None:
    path = DOCS / "index.md"
    written, _, _ = path.read_text("utf-8").partition(LIST)
    if request.config.getoption("--update-golden"):
        path.write_text(written + list_of_codes(), "utf-8")
    assert path.read_text("utf-8") == written + list_of_codes(), "`make golden` writes it"


def test_every_letter_has_a_page() -> None:
    letters = "".join(letters for letters, _ in PAGES.values())
    assert sorted(letters) == sorted(set(letters))
    assert {code[0] for code in cases_by_code()} <= set(letters)


def raised_codes() -> dict[str, str]:
    """Every code in the source of the package, and a file that has it."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "strata").rglob("*.py")):
        for code in CODE.findall(path.read_text("utf-8")):
            found.setdefault(code, str(path.relative_to(ROOT)))
    return found


def test_every_code_has_a_section() -> None:
    documented = {code for path in DOCS.glob("*.md") for code in SECTION.findall(path.read_text("utf-8"))}
    missing = {code: file for code, file in raised_codes().items() if code not in documented}
    assert not missing, f"add tests/errors/cases/<code>_<mistake>.case and run `make golden`: {missing}"


def test_no_section_outlives_its_code() -> None:
    known = raised_codes()
    documented = {code for path in DOCS.glob("*.md") for code in SECTION.findall(path.read_text("utf-8"))}
    assert sorted(documented - set(known)) == []
