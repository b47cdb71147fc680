"""The site: docs/ with notebooks, sources and links between them, built by zensical into build/site.

    python docs/site.py            build, then check every link; exit code 1 where one leads nowhere
    python docs/site.py --check    check a site that is built

Pages are staged in build/docs: notebooks become pages with their outputs, public names get a link to their source, the
guide to the viewer has the page that its program writes, and links to files of the source tree lead to pages that show
them, line by line.

A version has its own folder, build/site/0.2.0. Folders of other versions stay, and every page has a menu of them;
build/site/index.html leads to the newest, as errors/S102.html does to its section about S102.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import functools
import html
import inspect
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
STAGED, SITE = BUILD / "docs", BUILD / "site"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCED = re.compile(r"(^```.*?^```[ \t]*$)", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^### `([\w.]+)\b.*$", re.MULTILINE)
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>
:root {{ color-scheme: light dark }} body {{ font: 14px system-ui, sans-serif; margin: 1rem auto; max-width: 75rem }}
pre {{ font: 13px/1.45 ui-monospace, monospace; counter-reset: line }} a {{ color: #4477cc }}
pre span {{ display: block; padding-left: 3.6rem; min-height: 1.45em; counter-increment: line; position: relative }}
pre span::before {{ content: counter(line); position: absolute; left: 0; width: 3rem; text-align: right; opacity: .4 }}
pre span:target {{ background: #ffd54a55 }}</style></head><body><p><a href="{up}index.html">strata</a> / {name}</p>
<pre>{body}</pre></body></html>
"""
LEADS = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>
<meta http-equiv="refresh" content="0; url={to}"></head><body><a href="{to}">{name}</a></body></html>
"""


def stage() -> None:
    """Copy the pages, and rewrite what differs on the site."""
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGED, ignore=shutil.ignore_patterns("*.py", "__pycache__", "strata.1"))
    viewer_page(STAGED / "guides/view.md")
    titles = [notebook_page(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    for page, up in [(STAGED / "api.md", "../"), *((p, "../../") for p in (STAGED / "reference").glob("*.md"))]:
        text = with_sources(page.read_text("utf-8"))
        page.write_text(text.replace("[source](", f"[source]({up}"), "utf-8")
    shown: set[Path] = set()
    for page in sorted(STAGED.rglob("*.md")):
        parts = FENCED.split(page.read_text("utf-8"))
        parts[::2] = [LINK.sub(lambda m, page=page: _relink(m, page, shown), part) for part in parts[::2]]
        page.write_text("".join(parts), "utf-8")
    for path in shown:
        source_page(path)
    config = runpy.run_path(str(ROOT / "docs/check.py"))["site_config"]()
    listed = "".join(f"      - {name}\n" for name in titles)
    config = config.replace("site_dir: build/site", f"site_dir: site/{version()}").replace(
        "  - Guides:\n", f"  - Notebooks:\n{listed}  - Guides:\n"
    )
    (BUILD / "mkdocs.yml").write_text(config, "utf-8")


def _relink(match: re.Match[str], page: Path, shown: set[Path]) -> str:
    """A link to a file of the source tree leads to its page; others stay."""
    link, _, anchor = match[2].partition("#")
    if "://" in link or not link or link.startswith("mailto:"):
        return match[0]
    original = (ROOT / "docs" / page.relative_to(STAGED).parent / link).resolve()
    if original.suffix == ".ipynb":
        name = f"notebooks/{original.stem}.md"
    elif original.is_file() and (ROOT / "docs" not in original.parents or original.suffix == ".py"):
        shown.add(original)
        name = f"source/{original.relative_to(ROOT).as_posix()}.html"
    elif original.is_dir() and ROOT in original.parents and ROOT / "docs" not in [original, *original.parents]:
        shown |= {original, *(f for f in original.iterdir() if f.is_file())}
        name = f"source/{original.relative_to(ROOT).as_posix()}.html"
    else:
        return match[0]
    to = os.path.relpath(STAGED / name, page.parent).replace(os.sep, "/")
    return f"{match[1]}{to}{'#' + anchor if anchor else ''}{match[3]}"


def source_page(path: Path) -> None:
    """A file with a name for each line, or the files of a folder."""
    name = path.relative_to(ROOT).as_posix()
    place = STAGED / "source" / f"{name}.html"
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        files = sorted(f.name for f in path.iterdir() if f.is_file())
        body = "".join(f'<span><a href="{path.name}/{f}.html">{html.escape(f)}</a></span>' for f in files)
    else:
        lines = path.read_text("utf-8").splitlines()
        body = "".join(f'<span id="L{i + 1}">{html.escape(line)}</span>' for i, line in enumerate(lines))
    place.write_text(PAGE.format(name=html.escape(name), up="../" * (name.count("/") + 1), body=body), "utf-8")


def with_sources(text: str) -> str:
    """A page of names with a link from each heading to where it is defined."""
    return HEADING.sub(lambda m: m[0] if (found := source_of(m[1])) is None else f"{m[0]}\n\n[source]({found})", text)


def source_of(name: str) -> str | None:
    """The file and line of a public name, which a page writes as `jit`, `st.sin` or `st.nn.Linear`."""
    import strata
    import strata.ops
    from strata.mir import METHODS

    address, _, own = name.removeprefix("st.").rpartition(".")
    if not address and own in strata._TABLE:
        found = defined(*strata._TABLE[own])
    elif not address and own in METHODS:
        function = inspect.unwrap(METHODS[own])
        file = Path(inspect.getsourcefile(function) or "").resolve()
        found = (file.relative_to(ROOT).as_posix(), function.__code__.co_firstlineno) if ROOT in file.parents else None
    else:
        first, _, rest = address.partition(".")
        module, inner = strata._TABLE.get(first, ("strata", first))
        found = defined(f"{module}.{inner}.{rest}".rstrip("."), own)
    return None if found is None else f"{found[0]}#L{found[1]}"


@functools.cache
def _top_level(module: str) -> tuple[Path, dict[str, tuple[int, str, str]]] | None:
    """The file of a module and its names: the line, and the module and name where it is imported from."""
    place = ROOT / module.replace(".", "/")
    file = next((f for f in (place / "__init__.py", place.with_suffix(".py")) if f.exists()), None)
    if file is None:
        return None
    names: dict[str, tuple[int, str, str]] = {}
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.col_offset == 0:
            names[node.name] = (node.lineno, "", "")
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names.setdefault(alias.asname or alias.name, (node.lineno, node.module, alias.name))
    return file, names


def defined(module: str, name: str) -> tuple[str, int] | None:
    """File and line of a class or function of ours, read from the sources: packages that they import may be missing."""
    known = _top_level(module)
    line, source, own = known[1].get(name, (0, "", "")) if known else (0, "", "")
    if known is None or not line:
        return None
    if not source:
        return known[0].relative_to(ROOT).as_posix(), line
    inner = _top_level(f"{source}.{own}")  # a module has no line of its own
    return (inner[0].relative_to(ROOT).as_posix(), 1) if inner else defined(source, own)


def notebook_page(path: Path) -> str:
    """A notebook as a page; its name among the pages."""
    book = json.loads(path.read_text("utf-8"))
    folder = STAGED / "notebooks"
    folder.mkdir(exist_ok=True)
    parts, pictures = [], 0
    for cell in book["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/svg+xml" in data or "image/png" in data:
                kind = "svg" if "image/svg+xml" in data else "png"
                name, pictures = f"{path.stem}-{pictures}.{kind}", pictures + 1
                drawn = (
                    "".join(data["image/svg+xml"]).encode() if kind == "svg" else base64.b64decode(data["image/png"])
                )
                (folder / name).write_bytes(drawn)
                parts.append(f"![output of the cell above]({name})")
            elif "text/html" in data:
                parts.append("".join(data["text/html"]).replace("\n\n", "\n&#8203;\n"))
            else:
                parts.append(f"```text\n{''.join(data['text/plain'])}\n```")
        if cell is book["cells"][0]:
            parts.append(f'<a href="{path.name}" download>Download this notebook</a>')
    (folder / f"{path.stem}.md").write_text("\n\n".join(parts) + "\n", "utf-8")
    shutil.copy(path, folder / path.name)
    return f"notebooks/{path.stem}.md"


def viewer_page(guide: Path) -> None:
    """The page that the guide's program writes, beside the guide, and a link to it."""
    text = guide.read_text("utf-8")
    program = re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert program is not None
    made: dict[str, Any] = {}
    with contextlib.chdir(guide.parent), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(program[1], "layer.py", "exec"), made)  # noqa: S102 - our own page
    shown = f"```text\n{made['page']}\n```\n"
    assert text.count(shown) == 1
    link = f"[Open this page]({made['page']}): it is part of this site.\n"
    guide.write_text(text.replace(shown, f"{shown}\n{link}"), "utf-8")


def version() -> str:
    """The version of the sources, which names the folder."""
    import strata

    return strata.__version__


def versions(site: Path) -> list[str]:
    """Versions that the site has, newest first."""
    found = [p.parent.name for p in site.glob("*/index.html") if re.fullmatch(r"\d+(\.\d+)+\w*", p.parent.name)]
    return sorted(found, key=lambda name: [int(n) for n in re.findall(r"\d+", name)], reverse=True)


def entrances(site: Path) -> None:
    """What lies above the versions: their list, the way to the newest, and a page a code of its errors."""
    listed = versions(site)
    (site / "versions.js").write_text(f"window.strataVersions = {json.dumps(listed)};\n", "utf-8")
    (site / "index.html").write_text(LEADS.format(name="strata", to=f"{listed[0]}/index.html"), "utf-8")
    shutil.rmtree(site / "errors", ignore_errors=True)
    (site / "errors").mkdir()
    for name in listed:
        for page in sorted((site / name / "errors").glob("*.html")):
            for title in re.findall(r'<h2 id="([a-z]\d{3}-[^"]+)"', page.read_text("utf-8")):
                code, to = title[:4].upper(), f"{page.name}#{title}"
                (page.parent / f"{code}.html").write_text(LEADS.format(name=code, to=to), "utf-8")
                above = site / f"errors/{code}.html"
                if not above.exists():  # the newest version that has it
                    above.write_text(LEADS.format(name=code, to=f"../{name}/errors/{to}"), "utf-8")


# --------------------------------------------------------------------------------------------------------------- links


class Links(HTMLParser):
    """Where a page leads, and the names in it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names |= {v for v in (given.get("id"), given.get("name")) if v}
        link = given.get("href") if tag in ("a", "link") else given.get("src") if tag in ("img", "script") else None
        if link:
            self.links.append(link)


def dead_links(site: Path = SITE) -> list[str]:
    """Links of the site to pages, files or names that are not there."""
    read: dict[Path, Links] = {}
    for page in site.rglob("*.html"):
        read[page] = Links()
        read[page].feed(page.read_text("utf-8"))
    found = []
    for page, links in sorted(read.items()):
        if page.name == "404.html":  # which is shown at any address
            continue
        for link in links.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            path, _, name = link.partition("#")
            target = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            is_there = target.exists() and (not name or target not in read or unquote(name) in read[target].names)
            if not is_there:
                found.append(f"{page.relative_to(site)}: {link}")
    return sorted(set(found))


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    if "--check" not in argv:
        stage()
        beside = shutil.which("zensical", path=str(Path(sys.executable).parent)) or shutil.which("zensical")
        if beside is None:
            print("zensical is not installed: pip install zensical, or make site", file=sys.stderr)
            return 2
        shutil.rmtree(SITE / version(), ignore_errors=True)
        done = subprocess.run([beside, "build", "--strict", "-f", str(BUILD / "mkdocs.yml")], check=False)
        if done.returncode:
            return done.returncode
        entrances(SITE)
    found = dead_links()
    pages = sum(1 for _ in SITE.rglob("*.html"))
    print("\n".join([*found, f"{pages} pages, {len(found)} dead links"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
