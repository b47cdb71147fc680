"""The first ten minutes of a new user, in a fresh clone and HOME: `python -m tests.newcomer --out FOLDER`.

    README → demo → notebook → an ONNX file of one's own in the viewer → what was fused, a trace, an explanation

Every command must succeed and print no error. FOLDER gets what each printed and a screenshot of each page. `--install`
follows the README to the letter (`make demo`, which needs a package index); without it, this interpreter is used.
"""

from __future__ import annotations

import argparse
import html
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser import CHROMIUM, screenshot

ROOT = Path(__file__).parents[1]
OWN = """
import numpy as np, onnx
from onnx import helper, numpy_helper
rng = np.random.default_rng(0)
shapes = {"w": (64, 128), "b": (128,), "v": (128, 10)}
weights = {n: rng.standard_normal(s).astype(np.float32) / 8 for n, s in shapes.items()}
nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["hb"]),
         helper.make_node("Relu", ["hb"], ["r"]), helper.make_node("MatMul", ["r", "v"], ["s"]),
         helper.make_node("Softmax", ["s"], ["y"], axis=-1)]
graph = helper.make_graph(nodes, "own", [helper.make_tensor_value_info("x", 1, ["batch", 64])],
                          [helper.make_tensor_value_info("y", 1, ["batch", 10])],
                          [numpy_helper.from_array(a, n) for n, a in weights.items()])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), "own.onnx")
"""
TERMINAL = """<!doctype html><meta charset="utf-8"><body style="background:#16191d;color:#d7dae0;margin:1rem">
<pre style="white-space:pre-wrap;font:13px/1.35 'DejaVu Sans Mono',monospace">{text}</pre>"""


class Visit:
    """A user in a clone, with a HOME of their own, and a record of what they saw."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.clone, self.home, self.out = folder / "strata", folder / "home", out
        self.home.mkdir()
        out.mkdir(parents=True, exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "XDG_", "PYTHON"))}
        self.env = kept | {"HOME": str(self.home), "COLUMNS": "120"}
        self.python, self.start = sys.executable, time.perf_counter()

    def run(self, name: str, *words: str | Path, cwd: Path | None = None) -> str:
        """A command that must succeed and print no error; its output is kept, as text and as a picture."""
        begin = time.perf_counter()
        done = subprocess.run(
            [str(w) for w in words], cwd=cwd or self.clone, env=self.env, capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        told = done.stdout + done.stderr
        (self.out / f"{name}.txt").write_text(told, "utf-8")
        print(f"{time.perf_counter() - begin:6.1f} s  {name}", flush=True)
        if done.returncode or "Traceback" in told or "Error" in done.stderr:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{told[-4000:]}")
        if told.strip() and CHROMIUM:
            page = self.out / f"{name}.html"
            page.write_text(TERMINAL.format(text=html.escape(told[:20000])), "utf-8")
            screenshot(page.resolve().as_uri(), self.out / f"{name}.png")
            page.unlink()
        return told

    def strata(self, name: str, *words: str) -> str:
        return self.run(name, self.python, "-m", "strata.cli", *words, cwd=self.home)

    def see(self, name: str, page: Path, at: str = "") -> None:
        """A screenshot of a page."""
        if CHROMIUM:
            screenshot(page.resolve().as_uri() + at, self.out / f"{name}.png")
            if (self.out / f"{name}.png").stat().st_size < 5000:
                raise SystemExit(f"{name}: an empty page")


def visit(folder: Path, out: Path, *, install: bool) -> float:
    """All of it; the seconds it took."""
    user = Visit(folder, out)
    user.run("1-clone", "git", "clone", "-q", "--depth", "1", ROOT.as_uri(), user.clone, cwd=folder)
    if install:
        user.run("2-demo", "make", "demo", f"PYTHON={sys.executable}")
        user.python = str(user.clone / ".venv/bin/python")
    else:
        user.env["PYTHONPATH"] = os.pathsep.join([str(user.clone), *filter(None, [os.environ.get("STRATA_MODELS")])])
        user.strata("2-demo", "demo", "--tour")
    user.run("3-readme", user.python, "docs/check.py", "--compare", "README.md")
    user.run("4-notebook", user.python, "-m", "tests.notebooks", "01-quickstart")
    user.strata("5-example", "demo", "heat_equation")
    user.run("6-own-model", user.python, "-c", OWN, cwd=user.home)
    user.strata("7-inspect", "inspect", "own.onnx")
    user.strata("8-run", "run", "own.onnx", "--size", "batch=4")
    told = user.strata("9-explain", "explain", "own.onnx", "--memory")
    if "add" not in told or "relu" not in told:
        raise SystemExit(f"explain does not say what was fused:\n{told}")
    user.strata("10-trace", "trace", "own.onnx", "-o", "run.json")
    user.strata("11-view", "view", "own.onnx", "-o", "own.html")
    user.strata("12-view-trace", "view", "run.json", "-o", "trace.html")
    for name, page, at in (("13-stages", "own.html", ""), ("14-plan", "own.html", "#tab=Plan&step=0"),
                           ("15-fusion", "own.html", "#tab=Fusion"), ("16-timeline", "trace.html", "")):  # fmt: skip
        user.see(name, user.home / page, at)
    return time.perf_counter() - user.start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.newcomer", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/newcomer"), help="default: build/newcomer")
    parser.add_argument("--install", action="store_true", help="install by make demo, as the README says")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = visit(Path(folder), options.out, install=options.install)
    print(f"{seconds / 60:.1f} minutes; what was seen is in {options.out}")
    return int(seconds > 600)


if __name__ == "__main__":
    sys.exit(main())
