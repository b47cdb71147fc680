"""Texts of graphs, modules of blocks and plans: `st.parse`, the interpreter, and now and then the whole compiler."""

from __future__ import annotations

import random
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata.core import ALL_DTYPES, substitute
from strata.hir import BLOCKS
from strata.lir import Lir
from strata.mir import REGISTRY, Draw, Graph
from tests.fuzz.mutate.base import Files, Format
from tests.fuzz.mutate.changes import change_text, text_bytes

MOST_ELEMENTS = 1 << 12  # of any value: larger graphs are read, not run
PLAIN_GRAPHS = (
    """mir @score(x: f32[B, 8], param w: f32[8, 2]) -> f32[B, 2] where B in 1..64 {
  %0 = matmul(x, w) : f32[B, 2]
  %1 = softmax(%0) {axis = 1} : f32[B, 2]
  return %1
}""",
    """mir @sizes(x: f32[S + 1, max(S, 4)], y: i64[(S + 1)*max(S, 4)]) -> f32[(S + 1)*max(S, 4)] where S in 1..16 {
  %0 = reshape(x) {shape = (<(S + 1)*max(S, 4)>,)} : f32[(S + 1)*max(S, 4)]
  %1 = cast(y) {dtype = f32} : f32[(S + 1)*max(S, 4)]
  %2 = add(%0, %1) : f32[(S + 1)*max(S, 4)]
  return %2
}""",
)
MODULE = """\
hir @ffn(x: f32[S, 8], param w: f32[8, 6], param "h0": f32[6], param w2: f32[6, 3]) -> f32[S, 6], f32[S, 3] fusion \
fusable where S in 1..64 {
  h0 = linear(x, w, "h0") {act = "gelu"} : f32[S, 6] as "layer0.up"
  h1 = mir.exp(h0) : f32[S, 6]
  h2 = mir.constant() {data = dense(f32[], [2.0])} : f32[]
  h3 = mir.multiply(h1, h2) : f32[S, 6]
  h4 = shared_linear_pair(h3, w2, w2) : f32[S, 3], f32[S, 3]
  return h3, h4.1
}"""


@cache
def graph_texts() -> tuple[str, ...]:
    """A graph of one op for a sample or two of every op, and a few by hand."""
    made = list(PLAIN_GRAPHS)
    for name in sorted(REGISTRY):
        kind = REGISTRY[name]
        for sample in list(kind.samples())[:2]:
            try:
                made.append(_sample_text(name, kind, sample))
            except st.errors.StrataError:  # a sample that is there to be refused
                continue
    return tuple(text for text in made if len(text) < 4096)


def _sample_text(name: str, kind: Any, sample: Any) -> str:
    graph = Graph(name)
    inputs = []
    for i, given in enumerate(sample.inputs):
        shape, dtype = (given.type.shape, given.type.dtype) if isinstance(given, Draw) else (given.shape, given.dtype)
        inputs.append(graph.input(f"x{i}", shape, dtype))
    made = kind(**sample.fields)(*inputs)
    graph.outputs(*(made if isinstance(made, tuple) else (made,)))
    return str(graph)


class _Texts(Format):
    file = "x.mir"
    words: tuple[str, ...] = ()

    def sound(self) -> tuple[str, ...]:
        raise NotImplementedError

    def prepare(self, folder: Path) -> None:
        self.texts = self.sound()
        for text in self.texts[:: max(1, len(self.texts) // 20)]:
            (folder / self.file).write_text(text)
            self.attempt(folder, random.Random(0))

    def mutant(self, rng: random.Random) -> Files:
        return {self.file: text_bytes(change_text(rng.choice(self.texts), rng, self.words), rng)}

    def attempt(self, folder: Path, rng: random.Random) -> str:
        text = (folder / self.file).read_bytes().decode("utf-8", "surrogatepass")
        made = st.parse(text)
        str(made)
        return self.use(made, rng)

    def use(self, made: Any, rng: random.Random) -> str:
        raise NotImplementedError


class Graphs(_Texts):
    name = "graph"

    def sound(self) -> tuple[str, ...]:
        self.words = (*REGISTRY, *(d.name for d in ALL_DTYPES))
        return graph_texts()

    def use(self, made: Any, rng: random.Random) -> str:
        return run_graph(made, rng) if isinstance(made, Graph) else "read"


class Modules(_Texts):
    name = "hir"
    file = "x.hir"

    def sound(self) -> tuple[str, ...]:
        self.words = (*BLOCKS, "direct", "fusable", "fusion", "where", "mir.exp", "mir.add")
        m = st.hir.Module("block", fusion="direct")
        x = m.input("x", (st.sym("n", 1, 8), 8))
        w, up, down = m.param("w", (8, 24)), m.param("up", (8, 12)), m.param("down", (12, 8))
        both = m.linear(x, w)
        q, k, v = (m.narrow(both, 1, 8 * i, 8) for i in range(3))
        y = m.attention(q.reshape((1, -1, 8)), k.reshape((1, -1, 8)), v.reshape((1, -1, 8)), num_heads=2, layout="bsd")
        m.outputs(m.swiglu_ffn(m.rms_norm(y.reshape((-1, 8)), m.param("g", (8,))), up, up, down))
        return (MODULE, MODULE, str(m))

    def use(self, made: Any, rng: random.Random) -> str:
        return run_graph(made.lower(), rng) if hasattr(made, "lower") else "read"


class Plans(_Texts):
    name = "lir"
    file = "x.lir"

    def sound(self) -> tuple[str, ...]:
        self.words = ("run", "host", "module", "scratch", "result", "input", "param", "constant", "nodes", "views")
        pipe = st.CompilePipeline("cpu")
        texts = (*PLAIN_GRAPHS, *[t for t in graph_texts()[2:] if len(t) < 600][::40])
        return tuple(str(pipe.compile(st.parse(t)).lir) for t in texts)

    def use(self, made: Any, rng: random.Random) -> str:
        if not isinstance(made, Lir):
            return "read"
        made.summary()
        made.memory_report()
        made.fingerprint()
        return "read"


def run_graph(graph: Graph, rng: random.Random) -> str:
    """Interpret a graph on small random inputs, and compile one in sixteen."""
    sizes = {n: rng.choice((s.lo, min(s.lo + 2, s.hi or s.lo + 2))) for n, s in graph.symbols().items()}
    every = [t for node in graph.nodes() for t in node.types]
    if len(every) > 200 or any(_elements(t, sizes) > MOST_ELEMENTS for t in every):
        return "large"
    feeds = {}
    for x in (*graph.inputs, *graph.params):
        shape = [int(substitute(d, sizes)) for d in x.type.shape]
        feeds[st.mir.leaf_name(x)] = _array(shape, x.type.dtype, rng)
    device = "cpu" if rng.random() < 0.06 else "reference"
    compiled = st.Session(device).compile(graph)
    compiled.set_params({st.mir.leaf_name(x): feeds.pop(st.mir.leaf_name(x)) for x in graph.params})
    compiled.run(feeds)
    return "ran"


def _elements(kind: Any, sizes: dict[str, int]) -> int:
    return prod(max(1, int(substitute(d, sizes))) for d in kind.shape)


def _array(shape: list[int], dtype: Any, rng: random.Random) -> np.ndarray:
    values = np.array([rng.randrange(4) for _ in range(prod(shape))]).reshape(shape)
    return values.astype(dtype.np)
