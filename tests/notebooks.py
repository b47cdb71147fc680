"""The notebooks, run cell by cell: `python -m tests.notebooks`.

    python -m tests.notebooks                  run all; exit code 1 where a cell fails or shows another kind of thing
    python -m tests.notebooks quickstart       those whose names contain the text
    python -m tests.notebooks --fast           those that take a few seconds and no model: what `make test` runs
    python -m tests.notebooks --write          and keep what they show in the files

A cell is run as Jupyter runs it: what it prints, and then the value of its last expression, as HTML, SVG, PNG and text.
Nothing but strata and what a notebook imports is needed. What a notebook needs beyond that is in its metadata.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import importlib.util
import io
import json
import linecache
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
Output = dict[str, Any]


def notebooks(text: str = "", *, fast: bool = False) -> list[Path]:
    """Notebooks by name, in order."""
    found = [p for p in sorted(FOLDER.glob("*.ipynb")) if text in p.stem]
    return [p for p in found if not fast or not about(read(p)).get("slow")]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def about(notebook: dict[str, Any]) -> dict[str, Any]:
    """What a notebook says of itself: `slow`, and the packages it `needs`."""
    found: dict[str, Any] = notebook["metadata"].get("strata", {})
    return found


def missing(notebook: dict[str, Any]) -> list[str]:
    return [name for name in about(notebook).get("needs", ()) if importlib.util.find_spec(name) is None]


def run(notebook: dict[str, Any]) -> list[list[Output]]:
    """The outputs of each code cell; an exception goes through, with the cell's number as a note."""
    shown: list[Output] = []
    names: dict[str, Any] = {"__name__": "__main__", "display": lambda value: shown.append(display(value))}
    made = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, cell in enumerate(c for c in notebook["cells"] if c["cell_type"] == "code"):
            shown.clear()
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    value = _value("".join(cell["source"]), f"cell {number + 1}", names)
            except Exception as error:
                error.add_note(f"in cell {number + 1}:\n{''.join(cell['source'])}")
                raise
            outputs: list[Output] = []
            if printed.getvalue():
                outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
            outputs += shown
            if value is not None:
                outputs.append(display(value) | {"output_type": "execute_result", "execution_count": number + 1})
            made.append(outputs)
    return made


def _value(source: str, name: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last expression, if that does not end in a semicolon."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # as Jupyter does, for reports
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), names)  # noqa: S102 - our own notebook
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)  # type: ignore[attr-defined]  # noqa: S307
    return None if source.rstrip().endswith(";") else value


def display(value: Any) -> Output:
    """A value in all the forms it has."""
    data: dict[str, Any] = {}
    for method, kind in (("_repr_html_", "text/html"), ("_repr_svg_", "image/svg+xml"), ("_repr_png_", "image/png")):
        shown = getattr(value, method, lambda: None)()
        if isinstance(shown, bytes):
            data[kind] = base64.b64encode(shown).decode()
        elif shown is not None:
            data[kind] = _lines(shown)
    data["text/plain"] = _lines(repr(value) if not data else f"<{type(value).__name__}>")
    return {"output_type": "display_data", "data": data, "metadata": {}}


def kinds(outputs: list[Output]) -> list[Any]:
    """What sort of things a cell shows."""
    return [sorted(o["data"]) if "data" in o else o["name"] for o in outputs]


def write(path: Path, notebook: dict[str, Any], made: list[list[Output]]) -> None:
    """Keep the outputs in the file."""
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(cells, made, strict=True)):
        cell["outputs"], cell["execution_count"] = outputs, number + 1
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


def differences(path: Path, *, keep: bool = False) -> list[str]:
    """Run a notebook; cells that show something of another kind than the file has."""
    notebook = read(path)
    made = run(notebook)
    if keep:
        write(path, notebook, made)
        return []
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    return [
        f"{path.name}, cell {i + 1}: the file shows {kinds(cell['outputs'])}, the run {kinds(outputs)}"
        for i, (cell, outputs) in enumerate(zip(cells, made, strict=True))
        if kinds(cell["outputs"]) != kinds(outputs)
    ]


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", nargs="?", default="", help="notebooks whose names contain it")
    parser.add_argument("--fast", action="store_true", help="those that take a few seconds")
    parser.add_argument("--write", action="store_true", help="keep the outputs in the files")
    options = parser.parse_args()
    bad = 0
    for path in notebooks(options.name, fast=options.fast):
        lacking = missing(read(path))
        if lacking:
            print(f"{path.name}: left out, needs {', '.join(lacking)}")
            continue
        start = time.perf_counter()
        try:
            found = differences(path, keep=options.write)
        except Exception:  # noqa: BLE001 - told, and the next notebook is run
            found = [traceback.format_exc()]
        print("\n".join([f"{path.name}: {time.perf_counter() - start:.1f} s", *found]), flush=True)
        bad += bool(found)
    return int(bad > 0)


if __name__ == "__main__":
    os.environ.setdefault("NO_COLOR", "1")
    sys.exit(main())
