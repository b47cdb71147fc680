"""The site before it is built: notebooks and sources are pages, links lead to them, and dead links are found."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    made = module("site")
    made.BUILD = tmp_path_factory.mktemp("build")
    made.STAGED, made.SITE = made.BUILD / "docs", made.BUILD / "site"
    made.stage()
    return made


def test_every_link_of_a_staged_page_leads_to_a_file(site: ModuleType) -> None:
    lost = []
    for page in site.STAGED.rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for _, link, _ in site.LINK.findall(text):
            path = link.partition("#")[0]
            if path and "://" not in path and not path.startswith("mailto:") and not (page.parent / path).exists():
                lost.append(f"{page.relative_to(site.STAGED)}: {link}")
    assert lost == []


def test_notebooks_are_pages_with_their_pictures(site: ModuleType) -> None:
    pages = sorted(p.stem for p in (site.STAGED / "notebooks").glob("*.md"))
    assert pages == sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))
    config = (site.BUILD / "mkdocs.yml").read_text("utf-8")
    for name in pages:
        assert f"notebooks/{name}.md" in config
        text = (site.STAGED / f"notebooks/{name}.md").read_text("utf-8")
        shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
        assert shown
        assert all((site.STAGED / "notebooks" / picture).stat().st_size > 100 for picture in shown)


def test_the_guide_has_the_page_that_its_program_writes(site: ModuleType) -> None:
    assert "](layer.html)" in (site.STAGED / "guides/view.md").read_text("utf-8")
    assert "<title>layer" in (site.STAGED / "guides/layer.html").read_text("utf-8")


def test_the_first_page_has_the_numbers_of_the_newest_run() -> None:
    newest = json.loads((ROOT / "benchmarks/history.json").read_text("utf-8"))[-1]
    text = " ".join((ROOT / "docs/index.md").read_text("utf-8").split())
    one, two = newest["mean"]["1"], newest["mean"]["2"]
    workloads = newest["measurements"] // len(newest["mean"])
    assert f"On {workloads} [workloads]" in text
    assert f"{one:.1f} times as long on one thread and {two:.1f} times as long on two" in text


def test_names_lead_to_their_source(site: ModuleType) -> None:
    text = (site.STAGED / "api.md").read_text("utf-8")
    names = len(site.HEADING.findall(text))
    links = re.findall(r"^\[source\]\((source/\S+)\.html#L(\d+)\)$", text, re.MULTILINE)
    assert len(links) > 0.9 * names
    for name, line in links:
        page = (site.STAGED / f"{name}.html").read_text("utf-8")
        assert f'id="L{line}"' in page


def test_versions_are_listed_and_errors_lead_to_the_newest(site: ModuleType, tmp_path: Path) -> None:
    for version, codes in (("0.9.1", ("s102", "x900")), ("0.10.0", ("s102",)), ("0.2.0", ())):
        (tmp_path / version / "errors").mkdir(parents=True)
        (tmp_path / version / "index.html").write_text("<p>")
        page = "".join(f'<h2 id="{code}-mistake">{code}</h2>' for code in codes)
        (tmp_path / version / "errors/shapes.html").write_text(page)
    (tmp_path / "assets").mkdir()
    site.entrances(tmp_path)
    site.entrances(tmp_path)
    assert (tmp_path / "versions.js").read_text() == 'window.strataVersions = ["0.10.0", "0.9.1", "0.2.0"];\n'
    assert '"0.10.0/index.html"' in (tmp_path / "index.html").read_text()
    assert '"../0.10.0/errors/shapes.html#s102-mistake"' in (tmp_path / "errors/S102.html").read_text()
    assert '"../0.9.1/errors/shapes.html#x900-mistake"' in (tmp_path / "errors/X900.html").read_text()
    assert '"shapes.html#s102-mistake"' in (tmp_path / "0.9.1/errors/S102.html").read_text()
    assert site.dead_links(tmp_path) == []


def test_dead_links_are_found(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">a</h1><a href="b.html#x">b</a><a href="#top">up</a><img src="no.png">'
    )
    (tmp_path / "b.html").write_text('<p id="y"></p><a href="a.html">a</a><a href="https://example.org/">out</a>')
    assert site.dead_links(tmp_path) == ["a.html: b.html#x", "a.html: no.png"]


def test_the_film_shows_every_line_in_its_time() -> None:
    made = module("film").film([("strata doctor", ["one  <two>", "three"]), ("strata demo", ["four"])])
    begins = [float(v) for v in re.findall(r'begin="film.begin\+([\d.]+)s"', made)]
    assert begins == sorted(begins)
    assert "one\u00a0\u00a0&lt;two&gt;" in made
    assert made.count("<text") == 5
