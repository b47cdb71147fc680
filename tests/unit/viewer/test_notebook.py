"""What notebooks show: a line for each kind of object, whose text opens, and no markup from the user's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st
from strata.core import folded
from strata.hir import Module


def shown() -> dict[str, Any]:
    g = st.Graph("layer")
    g.outputs((g.input("x", (4, 8)) @ g.input("w", (8, 2))).tanh())
    m = Module("ffn")
    m.outputs(m.linear(m.input("x", (4, 8)), m.param("w", (8, 16)), None))
    compiled = st.Session("cpu").compile(g)
    explanation = compiled.explain()
    return {
        "graph": g, "module": m, "compiled": compiled, "plan": compiled.lir, "explanation": explanation,
        "fusion": explanation.fusion,
        "profile": compiled.profile(x=np.ones((4, 8), np.float32), w=np.ones((8, 2), np.float32)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["graph", "module", "compiled", "plan", "explanation", "fusion", "profile"])
def test_objects_open_in_a_notebook(kind: str) -> None:
    text = shown()[kind]._repr_html_()
    assert text.startswith("<details><summary>")
    assert text.endswith("</pre></details>")
    assert "&lt;" in text or "layer" in text or "ffn" in text or "nodes" in text


def test_a_long_text_is_cut_and_says_so() -> None:
    text = folded("many", "\n".join(map(str, range(1000))))
    assert "… and 600 lines more" in text
    assert len(text.splitlines()) < 450


def test_names_are_escaped() -> None:
    assert "<b>" not in folded("<b>", "<b> & more")
    g = st.Graph("<img src=x>")
    g.outputs(g.input("x", (2,)) + 1)
    assert "<img" not in g._repr_html_()
