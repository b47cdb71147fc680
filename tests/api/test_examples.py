"""Every public name has an example that runs, on a page that says what its docstring says.

`python docs/reference.py --compare` runs all of them; here one in twelve.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PART = "0/12"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_public_name_has_an_example(reference: ModuleType) -> None:
    lost = {page: found for page in reference.PAGES if (found := reference.without_example(page))}
    assert lost == {}, (
        "run `python docs/reference.py PAGE`, write `>>>` lines in a pycon block below the name, run it again"
    )


def test_pages_say_what_docstrings_say(reference: ModuleType) -> None:
    for page in reference.PAGES:
        text = (ROOT / f"docs/{page}.md").read_text("utf-8")
        assert text == reference.composed(page, reference.examples(text)), f"python docs/reference.py {page}"


def test_examples_show_what_the_pages_show() -> None:
    # a process of its own: they register ops, passes and devices
    command = [sys.executable, str(ROOT / "docs/reference.py"), "--compare", "--part", PART]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_session_is_played_statement_by_statement(reference: ModuleType) -> None:
    session = ">>> for i in range(2):\n...     print(i)\n0\n1\n>>> i + 1\n2\n>>> x = 3"
    assert reference.statements(session) == ["for i in range(2):\n    print(i)", "i + 1", "x = 3"]
    assert reference.played(session, {}) == session
    assert reference.played(">>> 1 + 1\n3", {}) == ">>> 1 + 1\n2"
