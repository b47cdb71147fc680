"""The documentation holds together: links resolve, and every kind of error has its page section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strata import errors

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    local = [link.split("#")[0] for link in LINK.findall(text) if "://" not in link and not link.startswith("#")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_every_error_class_is_documented() -> None:
    page = (ROOT / "docs/errors/index.md").read_text("utf-8")
    classes = [c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.StrataError)]
    assert [name for name in classes if f"`{name}`" not in page] == []
