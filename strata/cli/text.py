"""`strata embed` and `strata generate`."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

import numpy as np

from strata.cli import show
from strata.cli.parser import Mistake
from strata.cli.programs import kind_of
from strata.config import using
from strata.core import progress


def embed(options: Namespace) -> None:
    """Embeddings of texts."""
    texts = options.texts or [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise Mistake("embed: there is no text, neither as an argument nor on standard input")
    if options.output and not options.output.endswith(".npy"):
        raise Mistake(f"--output {options.output}: vectors are written as .npy")
    model = load_model(options.model, "embed", options.device)
    with using(**({"num_threads": options.threads} if options.threads else {})):
        start, done = time.perf_counter(), 0
        with progress("texts", len(texts)) as advance:

            def told(count: int, total: int) -> None:
                nonlocal done
                advance(count - done)
                done = count

            vectors = model.embed(texts, progress=told)
        seconds = time.perf_counter() - start
    if options.output:
        np.save(options.output, vectors)
    similarity = vectors @ vectors.T
    if options.json:
        shown = {"similarity": similarity.round(6).tolist()} if options.similarity else {"vectors": vectors.tolist()}
        show.as_json({"texts": texts, **shown})
    elif options.similarity:
        similarity_table(texts, similarity)
    elif options.output:
        count, width = vectors.shape
        print(f"{count} vectors of {width} numbers in {show.duration(seconds)}, written to {options.output}")
    else:
        rows = [(_short(t), " ".join(f"{x:+.4f}" for x in v[:6]) + " …") for t, v in zip(texts, vectors, strict=True)]
        show.table(("text", f"vector of {vectors.shape[1]}"), rows)


def similarity_table(texts: list[str], similarity: np.ndarray) -> None:
    """Cosines of pairs."""
    rows = [(i + 1, _short(t), *(f"{x:.2f}" for x in similarity[i])) for i, t in enumerate(texts)]
    show.table((">", "text", *(f">{i + 1}" for i in range(len(texts)))), rows)


def generate(options: Namespace) -> None:
    """Text that follows a prompt, printed as it is made."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    model = load_model(options.model, "generate", options.device, context=options.context)
    draft = None
    if options.draft:
        draft = load_model(options.draft, "generate", options.device, context=options.context)
    asked: Any = [{"role": "user", "content": prompt}] if options.chat else prompt
    pieces: list[str] = []
    with using(**({"num_threads": options.threads} if options.threads else {})):
        start = time.perf_counter()
        stream = model.generate(
            asked, max_tokens=options.max_tokens, temperature=options.temperature, top_k=options.top_k,
            top_p=options.top_p, seed=options.seed, stream=True, draft=draft,
        )  # fmt: skip
        for piece in stream:
            pieces.append(piece)
            if not options.json:
                print(piece, end="", flush=True)
        seconds = time.perf_counter() - start
    if options.json:
        show.as_json({"prompt": prompt, "text": "".join(pieces), "pieces": len(pieces), "seconds": seconds})
    else:
        print()


def load_model(path: str, method: str, device: str, **more: Any) -> Any:
    """A model that can do what is asked for."""
    from strata.models import load

    kind_of(path)  # says what is wrong with the path in the words of the command line
    model = load(path, device=device, **{k: v for k, v in more.items() if v is not None})
    if not hasattr(model, method):
        raise Mistake(f"{path}: {type(model).__name__} does not {method}; strata run runs it on arrays")
    return model


def _short(text: str, width: int = 48) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
