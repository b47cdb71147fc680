"""The page: one HTML file with its data inside, packed."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from strata.core import here
from strata.errors import FileError


def page_text(data: Mapping[str, Any]) -> str:
    """The page of some data: no part of it is loaded from elsewhere."""
    packed = base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6, mtime=0)).decode()
    assets = files("strata.viewer") / "assets"
    parts = {
        "TITLE": html.escape(str(data["name"])),
        "STYLE": (assets / "page.css").read_text("utf-8"),
        "SCRIPT": "".join((assets / name).read_text("utf-8") for name in ("drawing.js", "page.js")),
        "DATA": packed,
    }
    text = (assets / "page.html").read_text("utf-8")
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part, 1)
    return text


def write_page(data: Mapping[str, Any], path: Path) -> None:
    """The file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(page_text(data), "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise FileError(f"the page cannot be written: {error}", code="F401", place=here()) from None
