"""What quantising costs: perplexity of a language model trained here, and accuracy of two nets, in other runtimes too.

python -m benchmarks.quantising --steps 200

The language model is trained on the guides, quantised to GGUF files, and read again; llama.cpp (xllamacpp) continues a
prompt with the same files. The convolutional nets are trained on scikit-learn's digits and quantised to int8 QDQ files.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

import strata as st
from benchmarks.language import SAME, _llama_cpp_generates, _strata_generates
from strata.models import load
from strata.quantizing import perplexity
from tests.unit.quantizing import test_onnx_static as nets
from tests.unit.quantizing.small_lm import corpus, make_folder, train

KINDS = ("q8_0", "q6_k", "q5_k", "q4_k", "iq4_xs")
CONTEXT = 48


def language(folder: Path, steps: int) -> None:
    """The table of block types."""
    model = train(make_folder(folder / "model"), steps)
    texts = [text[:3000] for text in corpus()]
    before = perplexity(model, texts, context=CONTEXT).value
    ids = model.tokenizer.encode("strata compiles a model, and runs it")[:16]
    print(f"perplexity after {steps} steps: {before:.4f}\n")
    print(f"| format | perplexity | change | bytes | the first {SAME} bytes of llama.cpp |\n|---|---|---|---|---|")
    for kind in KINDS:
        place = folder / f"{kind}.gguf"
        made = st.quantize(model, format=kind, calibration=texts[:4], context=CONTEXT, output=place)
        after = perplexity(load(place, context=CONTEXT), texts, context=CONTEXT).value
        ours, theirs = (make(place, ids, 16, 1)() for make in (_strata_generates, partial(_llama_cpp_generates)))
        share = made.report.bytes_after / made.report.bytes_before
        same = "equal" if bytes(ours) == bytes(theirs) else "differ"
        print(
            f"| {kind} | {after:.4f} | {100 * (after / before - 1):+.2f} % | {100 * share:.0f} % | {same} |", flush=True
        )


def convolutions(folder: Path) -> None:
    """The table of nets."""
    import onnxruntime  # type: ignore[import-not-found,unused-ignore]

    images, labels = nets.digits()
    held, wanted = images[1200:], labels[1200:]
    feeds = [{"x": images[i : i + 100]} for i in range(0, 300, 100)]
    print("\n| net | f32 | int8, strata | int8, ONNX Runtime |\n|---|---|---|---|")
    for residual in (False, True):
        path, small = nets.saved(folder / f"{residual}.onnx", residual), folder / f"{residual}.int8.onnx"
        st.quantize(path, format="int8", calibration=feeds, output=small)
        session = onnxruntime.InferenceSession(small, providers=["CPUExecutionProvider"])
        scores = [st.load(path).run(x=held)[0], st.load(small).run(x=held)[0], session.run(None, {"x": held})[0]]
        shown = " | ".join(f"{100 * float((np.asarray(s).argmax(-1) == wanted).mean()):.2f} %" for s in scores)
        print(f"| {'two convolutions and a sum' if residual else 'two convolutions'} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantising", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        language(Path(place), options.steps)
        convolutions(Path(place))


if __name__ == "__main__":
    main()
