"""`strata search`: passages of the files of a folder by meaning. Vectors are kept in the disk cache."""

from __future__ import annotations

import os
import re
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from strata.cache import default_store, digest
from strata.cli import show
from strata.cli.installed import MINILM, given_or_installed
from strata.cli.parser import Mistake
from strata.cli.text import load_model
from strata.config import using
from strata.core import progress, read_text

TEXTS = (".md", ".txt", ".rst", ".py", ".toml", ".yml", ".yaml", ".json", ".html", ".tex", ".org", ".csv", ".js", ".ts",
         ".c", ".h", ".cpp", ".rs", ".go", ".java", ".sh", ".sql", ".mir")  # fmt: skip
LARGEST = 4 << 20  # bytes of a file that is still read
PASSAGE = 700  # characters of a passage, about


@dataclass(frozen=True)
class Passage:
    """Some lines of a file."""

    file: Path
    line: int
    text: str


def search(options: Namespace) -> None:
    """Print the passages that are nearest to a query."""
    folder = Path(options.folder)
    if not folder.is_dir():
        raise Mistake(f"there is no folder {options.folder}" if not folder.exists() else f"{folder} is not a folder")
    path = given_or_installed(options.model, MINILM, "--model")
    query = " ".join(options.query).strip()
    if not query:
        raise Mistake("search: the query is empty")
    start = time.perf_counter()
    passages = list(passages_of(folder, options.glob))
    if not passages:
        raise Mistake(f"{folder}: there is no text in it" + (f" that fits {options.glob}" if options.glob else ""))
    model = load_model(path, "embed", options.device)
    with using(**({"num_threads": options.threads} if options.threads else {})):
        vectors, made = vectors_of(model, path, [p.text for p in passages])
        near = vectors @ model.embed(query)
    best = np.argsort(-near, kind="stable")[: options.top]
    seconds = time.perf_counter() - start
    found = [{"file": os.fspath(passages[i].file), "line": passages[i].line, "score": round(float(near[i]), 4),
              "text": passages[i].text} for i in best]  # fmt: skip
    if options.json:
        show.as_json({"query": query, "passages": len(passages), "embedded": made, "seconds": seconds, "found": found})
        return
    out = show.console()
    for one in found:
        out.print(f"[bold]{one['file']}:{one['line']}[/bold]  {one['score']:.2f}", soft_wrap=True)
        out.print("\n".join(f"    {line}" for line in shortened(str(one["text"]))), markup=False, soft_wrap=True)
    files = len({p.file for p in passages})
    print(f"\n{len(passages)} passages of {files} files in {show.duration(seconds)}, {made} read for the first time")


def passages_of(folder: Path, glob: str | None) -> Iterator[Passage]:
    """Paragraphs of text files, joined up to a passage; hidden files and folders are left out."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__", "node_modules")))
        for name in sorted(names):
            file = Path(place, name)
            fits = fnmatch(name, glob) if glob else file.suffix.lower() in TEXTS
            if not fits or name.startswith(".") or not file.is_file() or file.stat().st_size > LARGEST:
                continue
            try:
                yield from split(file, read_text(file))
            except UnicodeDecodeError:
                continue


def split(file: Path, text: str) -> Iterator[Passage]:
    """Passages of a text: whole paragraphs, and of long ones whole lines."""
    held, at = "", 1
    for match in re.finditer(r"(?:.*\S.*(?:\n|$))+", text):
        first = text.count("\n", 0, match.start()) + 1
        for offset, part in _parts(match[0]):
            if held and len(held) + len(part) > PASSAGE:
                yield Passage(file, at, held.strip())
                held = ""
            if not held:
                at = first + offset
            held += part + "\n"
    if held.strip():
        yield Passage(file, at, held.strip())


def _parts(paragraph: str) -> Iterator[tuple[int, str]]:
    """Lines of a paragraph, joined up to a passage, each with the number of lines before."""
    held, at = "", 0
    for i, line in enumerate(paragraph.splitlines()):
        if held and len(held) + len(line) > PASSAGE:
            yield at, held
            held, at = "", i
        held += line[: 4 * PASSAGE] + "\n"
    if held:
        yield at, held


def vectors_of(model: Any, path: str, texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """A vector for each text, and how many were not in the cache."""
    store, own = default_store(), _identity(path)
    keys = [digest("search", own, text) for text in texts]
    found = {
        key: np.frombuffer(data, np.float32) for key in dict.fromkeys(keys) if (data := store.get(key)) is not None
    }
    missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
    if missing:
        done = 0
        with progress("passages", len(missing)) as advance:

            def told(count: int, total: int) -> None:
                nonlocal done
                advance(count - done)
                done = count

            made = model.embed(list(missing.values()), progress=told)
        for key, vector in zip(missing, made, strict=True):
            found[key] = vector
            store.put(key, np.ascontiguousarray(vector, np.float32).tobytes(), {"kind": "passage"})
    return np.stack([found[key] for key in keys]), len(missing)


def _identity(path: str) -> str:
    """What tells one model from another: its files, their sizes and times."""
    place = Path(path).resolve()
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return repr([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()])


def shortened(text: str, lines: int = 4, width: int = 116) -> list[str]:
    """The beginning of a passage."""
    kept = [line for line in text.splitlines() if line.strip()]
    cut = [line if len(line) <= width else line[: width - 1] + "…" for line in kept[:lines]]
    return [*cut, "…"] if len(kept) > lines else cut
