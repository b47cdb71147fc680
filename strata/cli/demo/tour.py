"""The tour of `strata demo`: a minute or two; models are shown where their packages are installed."""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from strata.cli import show
from strata.cli.bench.turns import in_turns
from strata.cli.demo.digits import SIDE, draw, sketch
from strata.cli.installed import MINILM, OCR, SMOLLM, find
from strata.cli.text import similarity_table
from strata.config import config, using
from strata.core import available_threads, progress
from strata.viewer import picture, plot

OCR_FILES = ("ch_PP-OCRv4_det_infer.onnx", "ch_PP-OCRv4_rec_infer.onnx")
RECEIPT = Path(__file__).with_name("receipt.png")
SENTENCES = [
    "A cat sleeps on the warm windowsill.",
    "The kitten naps in a patch of sunlight.",
    "Interest rates rose again this quarter.",
    "The central bank tightened monetary policy.",
    "How do I sort a list in Python?",
]


# -------------------------------------------------------------------------------------------------------- a compile


def compile_story() -> None:
    """A transformer's feed-forward block: stages, kernels, memory, time, and the clock beside what is installed."""
    from strata.runtime import CompilePipeline, Session

    graph = _feed_forward()
    print(graph)
    rows = []
    with tempfile.TemporaryDirectory() as folder, using(cache_dir=Path(folder)):
        pipe = CompilePipeline("cpu")
        pipe.optimize(graph)  # the first compile of a process also loads the code generator
        start = time.perf_counter()
        optimized, _ = pipe.optimize(graph)
        rows.append(("passes", f"{len(graph.nodes())} → {len(optimized.nodes())} nodes", time.perf_counter() - start))
        start = time.perf_counter()
        lir = pipe.plan(optimized)
        rows.append(("plan", f"{len(lir.schedule)} steps, {len(lir.kernels)} kernels", time.perf_counter() - start))
        start = time.perf_counter()
        compiled = Session("cpu").compile(graph)
        rows.append(("all, to machine code, cold", "nothing on disk", time.perf_counter() - start))
        start = time.perf_counter()
        Session("cpu").compile(_feed_forward())
        rows.append(("the same again", "machine code is there", time.perf_counter() - start))
    show.table(("stage", "result", ">time"), [(a, b, show.duration(t)) for a, b, t in rows])
    show.table(("kernel", "what it computes"), [(s.name, s.label) for s in lir.schedule])
    placed = lir.placement({"batch": 128})
    arena, least = show.size(placed.arena_size), show.size(placed.lower_bound)
    print(f"scratch memory at batch 128: {arena}; no plan can do with less than {least}\n")
    weights = _weights()
    compiled.set_params(weights)
    timed: list[tuple[Any, ...]] = []
    for batch in (1, 16, 128):
        x = np.random.default_rng(batch).standard_normal((batch, 384), np.float32)
        runs: dict[str, Callable[[], Any]] = {"strata": partial(compiled.run, x=x), **_peers(x, weights)}
        expected = runs["NumPy"]()
        worst = max(float(np.abs(np.asarray(run()) - expected).max()) for run in runs.values())
        times = {name: min(found) for name, found in in_turns(runs, 0.2).items()}
        others = [f"{t * 1e3:.3f}" for name, t in times.items() if name != "strata"]
        best = min(t for name, t in times.items() if name != "strata")
        timed.append((batch, f"{times['strata'] * 1e3:.3f}", *others, f"{best / times['strata']:.2f}×", f"{worst:.1e}"))
    names = [f">{name} ms" for name in runs if name != "strata"]
    show.table(
        (">batch", ">strata ms", *names, ">best other / strata", ">largest difference"),
        timed,
        title="one compile, any batch; best of many runs, in bursts by turns",
    )
    _warn_if_busy()


def _warn_if_busy() -> None:
    """Say so where other work takes the cores: the best of many runs is then luck for whoever wants all of them."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = available_threads(config().num_threads)
    if load > cores:
        print(f"this machine is busy (load {load:.1f} on {cores} cores): do not trust these times")


def _feed_forward() -> Any:
    import strata.ops  # noqa: F401 - a graph needs its ops
    from strata.core import sym
    from strata.mir import Graph

    g = Graph("feed_forward")
    x = g.input("x", (sym("batch", 1, 512), 384))
    w1, b1 = g.param("w1", (384, 1536)), g.param("b1", (1536,))
    w2, b2 = g.param("w2", (1536, 384)), g.param("b2", (384,))
    scale, shift = g.param("scale", (384,)), g.param("shift", (384,))
    h: Any = (x @ w1 + b1).gelu() @ w2 + b2 + x
    return g.outputs(h.layer_norm(scale, shift))


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"w1": (384, 1536), "b1": (1536,), "w2": (1536, 384), "b2": (384,), "scale": (384,), "shift": (384,)}
    return {
        n: rng.standard_normal(s, np.float32) / np.float32(s[0] ** 0.5 if len(s) > 1 else 4) for n, s in shapes.items()
    }


def _peers(x: np.ndarray, w: dict[str, np.ndarray]) -> dict[str, Callable[[], Any]]:
    from scipy.special import erf

    def with_numpy() -> np.ndarray:
        y = x @ w["w1"] + w["b1"]
        y = y * np.float32(0.5) * (1 + erf(y * np.float32(0.5**0.5)))
        z = y @ w["w2"] + w["b2"] + x
        z = z - z.mean(-1, keepdims=True)
        return z / np.sqrt((z * z).mean(-1, keepdims=True) + np.float32(1e-5)) * w["scale"] + w["shift"]

    found: dict[str, Callable[[], Any]] = {"NumPy": with_numpy, **_onnxruntime(x, w)}
    try:
        import torch
    except ImportError:
        return found
    t = {n: torch.from_numpy(a) for n, a in w.items()} | {"x": torch.from_numpy(x)}
    first, second = t["w1"].T.contiguous(), t["w2"].T.contiguous()
    F = torch.nn.functional

    def with_torch() -> Any:
        with torch.inference_mode():
            h = F.linear(F.gelu(F.linear(t["x"], first, t["b1"])), second, t["b2"]) + t["x"]
            return F.layer_norm(h, (384,), t["scale"], t["shift"]).numpy()

    return {**found, "torch": with_torch}


def _onnxruntime(x: np.ndarray, w: dict[str, np.ndarray]) -> dict[str, Callable[[], Any]]:
    """The same graph, written as an ONNX model, where its runtime is installed."""
    if importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxruntime") is None:
        return {}
    import onnxruntime

    from strata.io import onnx

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = available_threads(config().num_threads)
    options.log_severity_level = 4
    model = onnx.export(_feed_forward(), params=w).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return {"ONNX Runtime": lambda: session.run(None, {"x": x})}


# -------------------------------------------------------------------------------------------------------- training


def train(steps: int = 400, batch: int = 128) -> float:
    """A digit classifier, trained with a jitted step; returns the part of unseen digits that it gets right."""
    import strata.tensor as st

    images, labels = draw(8000, seed=1)
    unseen, answers = draw(2000, seed=2)
    rng = np.random.default_rng(0)
    shapes = {"w1": (SIDE * SIDE, 128), "b1": (128,), "w2": (128, 10), "b2": (10,)}
    params = {
        n: st.asarray((rng.standard_normal(s) * (s[0] ** -0.5 if len(s) > 1 else 0)).astype(np.float32))
        for n, s in shapes.items()
    }
    speed = {n: st.zeros(s) for n, s in shapes.items()}

    def logits(p: Any, x: Any) -> Any:
        return (x @ p["w1"] + p["b1"]).relu() @ p["w2"] + p["b2"]

    def loss(p: Any, x: Any, hot: Any) -> Any:
        return -(logits(p, x).log_softmax(-1) * hot).sum(-1).mean()

    @st.jit
    def step(p: Any, v: Any, x: Any, hot: Any) -> Any:
        value, slopes = st.value_and_grad(loss)(p, x, hot)
        v = {n: 0.9 * v[n] + slopes[n] for n in p}
        return {n: p[n] - 0.1 * v[n] for n in p}, v, value

    hot = np.eye(10, dtype=np.float32)[labels]
    times, losses = [], []
    with progress("training", steps) as advance:
        for _ in range(steps):
            rows = rng.integers(0, len(images), batch)
            start = time.perf_counter()
            params, speed, value = step(params, speed, images[rows], hot[rows])
            losses.append(value.item())
            times.append(time.perf_counter() - start)
            advance(1, f"loss {losses[-1]:.4f}")
    print(plot({"loss": losses}, title="training", x="step", log=True))
    answer = st.jit(logits)(params, unseen).numpy().argmax(-1)
    right = float((answer == answers).mean())
    steady = statistics.median(times[1:])
    print(f"{right:.1%} of {len(unseen)} unseen digits are right")
    print(f"first step {show.duration(times[0])} with its compile, then {show.duration(steady)} a step")
    sample = [sketch(image) for image in unseen[:3]]
    print("\n".join("   ".join(lines) for lines in zip(*sample, strict=True)))
    print("   ".join(f"read as {answer[i]}".center(2 * SIDE) for i in range(3)))
    return right


# ---------------------------------------------------------------------------------------------------------- models


def _model(package: str, name: str, how: str) -> Any:
    place = find(package, name)
    if place is None or importlib.util.find_spec("tokenizers") is None:
        print(f"left out: {how} brings the model")
        return None
    from strata.models import load

    return load(place)


def embed() -> None:
    """Sentences as vectors, and how near they are to each other."""
    model = _model(*MINILM)
    if model is None:
        return
    start = time.perf_counter()
    vectors = model.embed(SENTENCES)
    first = time.perf_counter() - start
    start = time.perf_counter()
    vectors = model.embed(SENTENCES)
    again = time.perf_counter() - start
    similarity_table(SENTENCES, vectors @ vectors.T)
    print(f"{len(SENTENCES)} sentences in {show.duration(first)} with the compile, {show.duration(again)} after that")


def generate() -> None:
    """Text from a small language model, as it is made."""
    model = _model(*SMOLLM)
    if model is None:
        return
    prompt: Any = "Explain in two sentences what a compiler does."
    if importlib.util.find_spec("jinja2") is not None:  # the language of chat templates
        prompt = [{"role": "user", "content": prompt}]
    start = time.perf_counter()
    first, count = 0.0, 0
    for piece in model.generate(prompt, max_tokens=80, stream=True):
        count += 1
        first = first or time.perf_counter() - start
        print(piece, end="", flush=True)
    rate = (count - 1) / max(time.perf_counter() - start - first, 1e-9)
    print(f"\n\nfirst piece after {show.duration(first)} with the compile, then {rate:.0f} pieces a second")


def read() -> None:
    """The lines of an image: one model finds them, another reads them."""
    package, folder, how = OCR
    place = find(package, folder)
    if place is None or importlib.util.find_spec("onnx") is None:
        print(f"left out: {how} brings the models")
        return
    from strata.io import load_image
    from strata.models import TextReader

    image = load_image(RECEIPT)
    print(picture(image))
    start = time.perf_counter()
    reader = TextReader(*(place / name for name in OCR_FILES))
    lines = reader.read(image)
    first = time.perf_counter() - start
    start = time.perf_counter()
    lines = reader.read(image)
    again = time.perf_counter() - start
    rows = [
        (line.text, f"{line.score:.0%}", f"{line.corners[0, 0]:.0f}, {line.corners[0, 1]:.0f}", f"{_slope(line):.0f}°")
        for line in lines
    ]
    show.table(("text", ">sure", ">at x, y", ">slope"), rows)
    print(f"{len(lines)} lines in {show.duration(first)} with two compiles, {show.duration(again)} after that")


def _slope(line: Any) -> float:
    """Degrees by which a line rises."""
    along = line.corners[1] - line.corners[0]
    return float(np.degrees(np.arctan2(-along[1], along[0]))) + 0.0


PARTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "compile": ("a feed-forward block, from graph to machine code", compile_story),
    "train": ("a digit classifier, trained", train),
    "embed": ("MiniLM: sentences that mean the same", embed),
    "generate": ("SmolLM2: text, token by token", generate),
    "read": ("PP-OCR: the text in an image", read),
}
