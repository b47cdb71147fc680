"""`strata explain CODE`: the section of the documentation about an error."""

from __future__ import annotations

import re

from strata.cli import show
from strata.cli.installed import own_folder
from strata.cli.parser import Mistake
from strata.core import read_text

CODE = re.compile(r"[A-Z]\d{3}")


def explain_code(code: str, *, as_json: bool) -> None:
    """Print what an error means, with a program that fails and its repair."""
    folder = own_folder("docs/errors", "share/strata/errors", "shapes.md")
    if folder is None:
        raise Mistake("explain: the pages of errors are not installed; they are in docs/errors of the source tree")
    for page in sorted(folder.glob("*.md")):
        found = re.search(rf"^## {code}\b(.*?)(?=^## |\Z)", read_text(page), re.DOTALL | re.MULTILINE)
        if found is None:
            continue
        title, _, text = found[1].partition("\n")
        if as_json:
            anchor = re.sub(r"[^\w\- ]", "", f"{code}{title}".lower()).strip().replace(" ", "-")
            link = f"errors/{page.name}#{anchor}"
            show.as_json({"code": code, "title": title.lstrip(": "), "page": link, "text": text.strip()})
        else:
            print(f"{code}{title}\n{text.rstrip()}")
        return
    raise Mistake(f"explain: no error has the code {code}")
