"""Documentation: runs the code of pages and checks their links.

    python docs/check.py            write the site's table of pages and the manual page, then check every page
    python docs/check.py PAGE...    run the code of these pages and show what it prints
    python docs/check.py --compare PAGE...   exit code 1 where that is not what the pages show
    python docs/check.py --update PAGE...    and write it into the pages; read the diff
    python docs/check.py --follow PAGE...    edit this tree as these guides say
    python docs/check.py --followed PAGE...  as --compare, in a tree that was edited so

The Python blocks of a page are one program, run in order. A `text` block right behind one is its output: it must be
equal, and `...` in it stands for anything on that line (a time, a path).

A guide that adds to the source tree says where: "```python strata/passes/fuse/mine.py" is a new file, or the end of one
that exists; "```diff" changes the file behind `---`, which has the block's old lines in one place.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A Python block: its code, the line it starts at, its expected output and its file, if the page shows them."""

    code: str
    line: int
    expected: str | None
    file: str = ""


def pages() -> list[Path]:
    """Every page of the documentation."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def runnable_pages() -> list[Path]:
    """Pages with Python blocks that are run; those of docs/errors are the cases of tests/errors."""
    return [p for p in pages() if "errors" not in p.parts and blocks(p)]


def blocks(page: Path) -> list[Block]:
    """The Python blocks of a page, in order."""
    text = page.read_text("utf-8")
    found = list(FENCE.finditer(text))
    made = []
    for at, match in enumerate(found):
        if match[1] != "python":
            continue
        follower = found[at + 1] if at + 1 < len(found) else None
        is_output = follower is not None and follower[1] == "text" and not text[match.end() : follower.start()].strip()
        expected = follower[3] if is_output and follower is not None else None
        made.append(Block(match[3], text.count("\n", 0, match.start(3)), expected, match[2].strip()))
    return made


def edited(page: Path) -> list[str]:
    """The files that a guide touches."""
    diffs = [
        m[3].split("\n", 1)[0].removeprefix("--- ") for m in FENCE.finditer(page.read_text("utf-8")) if m[1] == "diff"
    ]
    return list(dict.fromkeys([*(b.file for b in blocks(page) if b.file), *diffs]))


def follow(page: Path) -> None:
    """Edit this tree as a guide says."""
    for block in blocks(page):
        if block.file:
            place = ROOT / block.file
            before = place.read_text("utf-8") + "\n\n" if place.exists() else ""
            place.write_text(before + block.code, "utf-8")
    for match in FENCE.finditer(page.read_text("utf-8")):
        if match[1] == "diff":
            name, *lines = match[3].splitlines()
            place = ROOT / name.removeprefix("--- ")
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in f" {sign}") for sign in "-+")
            text = place.read_text("utf-8")
            if text.count(old) != 1:
                raise ValueError(f"{page.name}: {place.name} has these lines {text.count(old)} times:\n{old}")
            place.write_text(text.replace(old, new), "utf-8")


def run_page(page: Path, *, followed: bool = False) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page in their own folder; gives each with what it printed.

    Where the page was followed, what it puts into files is there already."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in blocks(page):
            if followed and block.file:
                continue
            code = compile(
                "\n" * block.line + block.code, str(page), "exec", dont_inherit=True
            )  # lines are the page's own
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)  # noqa: S102 - our own page
            yield block, printed.getvalue()


def differences(page: Path, *, followed: bool = False) -> list[str]:
    """Blocks whose output is not what the page shows."""
    found = []
    for block, printed in run_page(page, followed=followed):
        if block.expected is not None and not agrees(block.expected, printed):
            found.append(
                f"{page.relative_to(ROOT)}:{block.line}: the page shows\n{block.expected}\nbut it prints\n{printed}"
            )
    return found


def update(page: Path) -> None:
    """Write what the blocks print into the page, where it shows something else."""
    text = page.read_text("utf-8")
    for block, printed in run_page(page):
        if block.expected is not None and not agrees(block.expected, printed):
            lines = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
            text = text.replace(
                f"{block.code}```\n\n```text\n{block.expected}```", f"{block.code}```\n\n```text\n{lines}\n```"
            )
    page.write_text(text, "utf-8")


def agrees(expected: str, printed: str) -> bool:
    """Whether an output is the expected one, line by line; `...` stands for anything within a line."""
    wanted, got = ([line.rstrip() for line in text.strip().splitlines()] for text in (expected, printed))
    patterns = [".*".join(map(re.escape, line.split("..."))) for line in wanted]
    return len(wanted) == len(got) and all(re.fullmatch(p, line) for p, line in zip(patterns, got, strict=True))


def broken_links(page: Path) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    found = []
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (heading and target.suffix == ".md" and heading not in headings(target)):
            found.append(link)
    return found


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub spells them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


# ---------------------------------------------------------------------------------------------------------- api.md

API_HEAD = """# Public names

Made from docstrings by `make docs`; a test fails when a public name has no docstring, no example, or is missing here.
What `strata.__all__` lists is on this page. [Functions of tensors](reference/functions.md) (`st.softmax(x)`,
`x.softmax()`, and `st.ops.softmax(v)` on values of a graph), the [Array API](reference/xp.md), [layers and
optimisers](reference/nn.md), [blocks, transforms and passes](reference/compiler.md), [running, caches and
settings](reference/runtime.md), [files](reference/files.md), [models](reference/models.md), [ONNX Runtime's
interface](reference/ort.md) and [errors](reference/errors.md) have their own pages. Each example starts after this
one.
"""
SECTIONS = {
    "strata.tensor": "Tensors and functions", "strata.mir": "Graphs", "strata.texts": "Texts",
    "strata.runtime": "Compiling and running",
    "strata.models": "Models", "strata.core": "Types", "strata.config": "Settings", "strata.backends": "Devices",
    "strata.torch": "Tensors of PyTorch",
}  # fmt: skip
# modules whose names are on the page, too
NAMESPACES = {"torch": "PyTorch", "serving": "Serving", "distributed": "Collectives"}


def api_page() -> str:
    """The page of public names."""
    import strata

    table = dict(strata._TABLE)
    by_module: dict[str, list[str]] = {}
    for name, (module, _) in table.items():
        by_module.setdefault(module, []).append(name)
    parts = [API_HEAD]
    for module in [*SECTIONS, *sorted(set(by_module) - set(SECTIONS))]:
        if module not in by_module:
            continue
        parts.append(f"## {SECTIONS.get(module, module)}\n")
        parts += [_entry(name, getattr(strata, name), table[name][1]) for name in by_module[module]]
    for name, title in NAMESPACES.items():
        module = importlib.import_module(f"strata.{name}")
        parts.append(f"## {title}: `strata.{name}`\n")
        entries = (_entry(n, getattr(module, n), n) for n in module.__all__)
        parts += [entry.replace("### `", f"### `st.{name}.", 1) for entry in entries]  # names of two modules are alike
    parts.append("## Modules\n")
    rows = []
    for name in strata._MODULES:
        doc = (importlib.import_module(f"strata.{name}").__doc__ or "").strip().split("\n\n")[0]
        rows.append(f"- `strata.{name}`: {' '.join(doc.split())}")
    return "\n".join([*parts, *rows]) + "\n"


def _entry(name: str, thing: Any, own: str) -> str:
    if name != own:
        return f"- `{name}`: another spelling of `{own}`."
    if not (inspect.isclass(thing) or callable(thing) or inspect.ismodule(thing)) or type(thing).__name__ == "DType":
        return f"- `{name}`: {_plain(thing)}"
    doc = inspect.getdoc(thing) or ""
    lines = [f"### `{name}`\n", f"`{name}{_signature(thing)}`\n", doc, ""]
    if inspect.isclass(thing) and not issubclass(thing, tuple):
        for method, function in inspect.getmembers(thing, lambda m: inspect.isfunction(m) or isinstance(m, property)):
            described = inspect.getdoc(function)
            if method.startswith("_") or method not in vars(thing) or not described:
                continue
            call = "" if isinstance(function, property) else _signature(function, skip_self=True)
            lines.append(f"- `.{method}{call}`: {' '.join(described.split())}")
        lines.append("")
    return "\n".join(lines)


def _plain(thing: Any) -> str:
    if type(thing).__name__ == "DType":
        return f"the element type {thing}."
    return " ".join((inspect.getdoc(thing) or repr(thing)).split())


def _signature(thing: Any, *, skip_self: bool = False) -> str:
    if inspect.ismodule(thing):
        return ""
    if inspect.isclass(thing) and issubclass(thing, Enum):
        return "(value)"  # what Python itself says of it changes from version to version
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(…)"
    shown = []
    for i, p in enumerate(signature.parameters.values()):
        if skip_self and i == 0 and p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not any(s.startswith("*") for s in shown):
            shown.append("*")
        default = "" if p.default is p.empty else f"={p.default!r}" if len(repr(p.default)) < 24 else "=…"
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        shown.append(f"{stars}{p.name}{default}")
    return f"({', '.join(shown)})"


# Tabs of the site: pages by name, and folders with all of their pages, the index first.
TABS = {
    "Home": ("index.md",),
    "Start": ("quickstart.md", "gallery.md"),
    "Guides": ("guides/",),
    "Concepts": ("concepts/",),
    "Reference": ("cli.md", "api.md", "reference/", "ops.md", "numerics.md", "onnx.md", "stability.md"),
    "Errors": ("errors/",),
    "Benchmarks": ("benchmarks.md", "benchmarks-gpu.md", "training.md", "comparison.md"),
    "Design": ("design/",),
}


def site_config() -> str:
    """mkdocs.yml with its table of pages; a page that is in no tab is at the end of the reference."""
    docs = ROOT / "docs"
    text, _, _ = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")
    found: dict[str, list[str]] = {}
    for tab, parts in TABS.items():
        found[tab] = [
            page
            for part in parts
            for page in (
                [part]
                if part[-1] != "/"
                else [f"{part}{p.name}" for p in sorted(docs.joinpath(part).glob("*.md"), key=_index_first)]
            )
        ]
    placed = {page for listed in found.values() for page in listed}
    found["Reference"] += [p.name for p in sorted(docs.glob("*.md")) if p.name not in placed]
    lines = ["", "nav:"]
    for tab, listed in found.items():
        lines += [f"  - {tab}: {listed[0]}"] if len(listed) == 1 else [f"  - {tab}:", *(f"      - {p}" for p in listed)]
    return text + "\n".join(lines) + "\n"


def _index_first(page: Path) -> tuple[bool, str]:
    return page.name != "index.md", page.name


def undocumented() -> list[str]:
    """Public names without a docstring."""
    import strata

    missing = []
    for name, (_, own) in strata._TABLE.items():
        thing = getattr(strata, name)
        if name == own and (inspect.isclass(thing) or callable(thing)) and not (inspect.getdoc(thing) or "").strip():
            missing.append(name)
    return missing


def main(argv: list[str]) -> int:
    """All pages, or those named."""
    sys.path.insert(0, str(ROOT))
    if argv[:1] == ["--update"]:
        for page in map(Path, argv[1:]):
            update(page.resolve())
        return 0
    if argv[:1] == ["--follow"]:
        for page in map(Path, argv[1:]):
            follow(page)
        return 0
    if argv[:1] in (["--compare"], ["--followed"]):
        followed = argv[0] == "--followed"
        found = [told for page in map(Path, argv[1:]) for told in differences(page.resolve(), followed=followed)]
        print("\n".join(found))
        return bool(found)
    if argv:
        for page in map(Path, argv):
            for block, printed in run_page(page.resolve()):
                state = "" if block.expected is None else "   ok" if agrees(block.expected, printed) else "   DIFFERS"
                print(f"--- {page}:{block.line}{state}\n{printed}", end="")
        return 0
    (ROOT / "mkdocs.yml").write_text(site_config(), "utf-8")
    from strata.cli.shell.manual import page as manual_page

    (ROOT / "docs/strata.1").write_text(manual_page(), "utf-8")
    problems = [f"{page.relative_to(ROOT)}: {link} leads nowhere" for page in pages() for link in broken_links(page)]
    problems += [f"{name} has no docstring" for name in undocumented()]
    for page in runnable_pages():
        print(os.path.relpath(page, ROOT), flush=True)
        problems += differences(page)
    print("\n".join(problems) or "all pages hold")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
