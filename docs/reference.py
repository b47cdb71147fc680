"""The reference: docs/api.md and a page a part in docs/reference, where each public name has an example that runs.

    python docs/reference.py [PAGE...]              run every example, write pages with docstrings and what they show
    python docs/reference.py --compare [PAGE...]    exit code 1 where an example fails or shows something else
    python docs/reference.py --compare --part 3/12  the same for one example in twelve

Names, signatures and docstrings come from the code. Examples are written by hand, in the page, behind `>>>`: below the
heading of a name, or of a section. Each runs by itself, after the first block of its page. `...` in what it shows
stands for anything within a line.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import inspect
import io
import re
import runpy
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHECK = runpy.run_path(str(ROOT / "docs/check.py"))
# Pages: title, and the modules whose names they have.
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "api": ("Public names", ("", "torch", "serving", "distributed")),
    "reference/functions": ("Functions of tensors", ("ops",)),
    "reference/xp": ("The Array API", ("xp", "xp.linalg", "xp.fft")),
    "reference/nn": ("Layers, optimisers, random numbers", ("nn", "nn.initial", "optim", "random")),
    "reference/compiler": ("Blocks, transforms, passes", ("hir", "transforms", "passes")),
    "reference/runtime": ("Running, caches, settings", ("runtime", "cache", "config")),
    "reference/files": ("Files", ("io", "onnx", "stablehlo")),
    "reference/models": ("Models", ("models", "quantizing", "finetuning", "sentence_transformers")),
    "reference/ort": ("ONNX Runtime's interface", ("ort",)),
    "reference/errors": ("Errors and checks", ("errors", "testing")),
}
NEEDED = ("tokenizers", "onnx", "torch", "gguf")  # by some examples
HEADING = re.compile(r"^##+ `?([\w.]+(?: [^`(]*)?)", re.MULTILINE)
BLOCK = re.compile(r"^```pycon\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
SECTIONS = re.compile(r"^(?=##+ )", re.MULTILINE)


# --------------------------------------------------------------------------------------------------------------- names


def names(address: str) -> dict[str, Any]:
    """Public names of a module as programs write them: what it lists, or the classes and functions made in it."""
    import strata
    import strata.ops  # which registers its functions
    from strata.mir import METHODS

    if not address:
        return {f"st.{name}": getattr(strata, name) for name in strata._TABLE}
    if address == "ops":
        return {f"st.{name}": METHODS[name] for name in sorted(METHODS) if name not in strata.__all__}
    module: Any = strata
    for part in address.split("."):
        module = getattr(module, part)
    listed = getattr(module, "__all__", None) or sorted(n for n in dir(module) if not n.startswith("_"))
    made_here = (module.__name__, *(("strata.ops.",) if address.startswith(("xp", "random")) else ()))
    return {
        f"st.{address}.{name}": thing
        for name, thing in ((name, getattr(module, name)) for name in listed if not name.startswith("_"))
        if callable(thing) and str(getattr(thing, "__module__", "")).startswith(made_here)
    }


def skeleton(page: str) -> str:
    """A page without its examples."""
    if page == "api":
        return CHECK["api_page"]()
    title, modules = PAGES[page]
    parts = [f"# {title}\n\nMade from docstrings by `make docs`. Each example starts after this one.\n"]
    for address in modules:
        found, first = names(address), dict[int, str]()
        if len(modules) > 1:
            parts.append(f"## `st.{address}`\n")
        for name, thing in found.items():
            own = first.setdefault(id(thing), name)
            doc = (inspect.getdoc(thing) or "") if own == name else f"Another spelling of `{own}`."
            if inspect.isclass(thing) and doc == inspect.getdoc(thing.__mro__[1]):
                said = re.search(
                    rf"── {thing.__name__}\b[^A-Z]*?(?:\(\w+\))? +(?:[A-Z]  )?(.+)$", _tree(), re.MULTILINE
                )
                doc = f"{said[1][0].upper()}{said[1][1:]}." if said else f"A `{thing.__mro__[1].__name__}`."
            call = f"{name.rpartition('.')[2]}{CHECK['_signature'](thing)}"
            parts.append(f"### `{name}`\n\n`{call}`\n\n{doc.strip()}\n")
    return "\n".join(parts)


def _tree() -> str:
    """What the classes of errors are for."""
    from strata import errors

    return errors.__doc__ or ""


# ------------------------------------------------------------------------------------------------------------ examples


def key_of(part: str) -> str:
    """The heading that a part of a page is under, without arguments; nothing is what comes before all headings."""
    found = HEADING.match(part)
    return found[1].strip() if found else ""


def examples(text: str) -> dict[str, str]:
    """The sessions of a page by their headings."""
    found = ((key_of(part), BLOCK.search(part)) for part in SECTIONS.split(text))
    return {key: block[1].rstrip() for key, block in found if block}


def composed(page: str, sessions: dict[str, str]) -> str:
    """A page with its examples; what has lost its heading goes."""
    made = []
    for part in SECTIONS.split(skeleton(page)):
        session = sessions.get(key_of(part))
        made.append(part if session is None else f"{part.rstrip()}\n\n```pycon\n{session}\n```\n\n")
    return "".join(made).rstrip() + "\n"


def statements(session: str) -> list[str]:
    """What was typed."""
    typed: list[str] = []
    for line in session.splitlines():
        if line.startswith(">>> "):
            typed.append(line[4:])
        elif re.match(r"\.\.\.( |$)", line) and typed and _is_open(typed[-1]):
            typed[-1] += f"\n{line[4:]}"
    return typed


def _is_open(source: str) -> bool:
    """Whether more lines belong to a statement."""
    try:
        ast.parse(source)
    except SyntaxError:
        return True
    return source.rstrip().endswith(":") or source.startswith(("with ", "def ", "class ", "for ", "@"))


def played(session: str, scope: dict[str, Any], *, fails: bool = False) -> str:
    """A session as it goes now; only where it may fail are its errors part of it."""
    from strata.errors import StrataError

    lines = []
    for source in statements(session):
        lines += [f"{'... ' if i else '>>> '}{line}".rstrip() for i, line in enumerate(source.splitlines())]
        printed, tree = io.StringIO(), ast.parse(source)
        with contextlib.redirect_stdout(printed):
            try:
                if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr):
                    value = eval(compile(source, "<example>", "eval"), scope)  # noqa: S307 - our own pages
                    if value is not None:
                        print(repr(value))
                else:
                    exec(compile(source, "<example>", "exec"), scope)  # noqa: S102
            except StrataError as error:
                if not fails:
                    raise
                print(
                    f"Traceback (most recent call last):\n  ...\n{type(error).__name__}: {str(error).splitlines()[0]}"
                )
        lines += [line.rstrip() for line in printed.getvalue().rstrip().splitlines()]
    return "\n".join(lines)


def run_page(page: str, part: tuple[int, int] = (0, 1)) -> Iterator[tuple[str, str, str]]:
    """Examples of a page: heading, the session of the page, and as it goes now, or the error that it ends in."""
    sessions = examples((ROOT / f"docs/{page}.md").read_text("utf-8"))
    shared: dict[str, Any] = {"__name__": "example"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        played(sessions.get("", ""), shared)
        for key, session in sessions.items():
            if zlib.crc32(f"{page} {key}".encode()) % part[1] != part[0] or not key:
                continue
            try:
                yield key, session, played(session, dict(shared), fails=page == "reference/errors")
            except Exception as error:  # noqa: BLE001 - told with its example
                yield key, session, f"{type(error).__name__}: {error}"


def without_example(page: str) -> list[str]:
    """Public names of a page that no example of it uses."""
    typed = "\n".join(
        source
        for session in examples((ROOT / f"docs/{page}.md").read_text("utf-8")).values()
        for source in statements(session)
    )
    return [
        name
        for address in PAGES[page][1]
        for name in names(address)
        if not re.search(rf"(?<![\w.]){re.escape(name)}\b", typed)
    ]


# ------------------------------------------------------------------------------------------------------------ commands


def main() -> int:
    parser = argparse.ArgumentParser(prog="python docs/reference.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", nargs="*", default=list(PAGES), help="such as api or reference/nn; all by default")
    parser.add_argument("--compare", action="store_true", help="write nothing; exit code 1 where a page is wrong")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="one example in N")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        print(f"pip install {' '.join(lacking)}", file=sys.stderr)
        return 2
    index, count = map(int, options.part.split("/"))
    begin, wrong, total = time.perf_counter(), 0, 0
    for page in options.pages:
        new = examples(path.read_text("utf-8")) if (path := ROOT / f"docs/{page}.md").exists() else {}
        for key, session, now in run_page(page, (index % count, count)):
            total += 1
            if not CHECK["agrees"](session, now):
                wrong += 1
                print(f"--- docs/{page}.md, {key}\n{session if options.compare else ''}\n+++\n{now}\n")
                if now.startswith(">>> "):
                    new[key] = now
        if not options.compare:
            path.parent.mkdir(exist_ok=True)
            path.write_text(composed(page, new), "utf-8")
        if count == 1:
            lost = without_example(page)
            wrong += len(lost)
            print("\n".join(f"docs/{page}.md: no example of {name}" for name in lost), end="\n" if lost else "")
    print(f"{total} examples in {time.perf_counter() - begin:.0f} s, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
