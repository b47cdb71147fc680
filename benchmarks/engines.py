"""Generation beside llama.cpp and speech beside CTranslate2 (faster-whisper's engine), by seconds of a processor.

python -m benchmarks.engines decode q4_k q6_k q8_0 iq4_xs mxfp4 mixtral
python -m benchmarks.engines speech

Both engines are in one process with one thread each and take turns, so that a machine with other work does them the
same harm; shown is the least of some rounds. Weights are random, texts have to be equal. `mixtral` has 0.3 · 10⁹ active
weights of 1.1 · 10⁹; `mixtral-large` 10⁹ of 3.4 · 10⁹.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from benchmarks.language import LARGE, _llama_cpp_generates, _strata_generates
from benchmarks.random_models import kept

Run = Callable[[], Any]
PROMPT = [1, 300, 400, 500, 600, 700, 800, 900]
MIXTURES: dict[str, dict[str, int]] = {
    "mixtral": dict(layers=12, hidden=1024, inner=3584, experts=8), "mixtral-large": dict(experts=8, inner=4096),
}  # fmt: skip
TINY: dict[str, Any] = dict(
    d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6, decoder_attention_heads=6,
    encoder_ffn_dim=1536, decoder_ffn_dim=1536, max_source_positions=1500, max_target_positions=448, num_mel_bins=80,
    vocab_size=51865, decoder_start_token_id=50258, eos_token_id=50257, pad_token_id=50257, bos_token_id=50257,
)  # fmt: skip
SPOKEN = [50258, 50259, 50359, 50363]  # a text in English without times
WINDOW = 30.0  # seconds of sound


def in_turns(runs: dict[str, Run], rounds: int) -> dict[str, tuple[float, float]]:
    """The least seconds of a processor, and of the clock, that each takes."""
    best = dict.fromkeys(runs, (np.inf, np.inf))
    for _ in range(rounds):
        for name, run in runs.items():
            before = time.process_time(), time.perf_counter()
            run()
            spent = time.process_time() - before[0], time.perf_counter() - before[1]
            best[name] = (min(best[name][0], spent[0]), min(best[name][1], spent[1]))
    return best


def decode(kind: str, tokens: int, rounds: int) -> str:
    """One row: seconds of a processor that a token takes, and how many come in a second of the clock."""
    path = kept(LARGE, "q4_k", **MIXTURES[kind]) if kind in MIXTURES else kept(LARGE, kind)
    makers = {"strata": _strata_generates, "llama.cpp": _llama_cpp_generates}
    runs = {(name, n): make(path, PROMPT, n, 1) for name, make in makers.items() for n in (1, tokens)}
    said = {name: bytes(runs[name, tokens]()) for name in makers}
    best = in_turns({f"{name} {n}": run for (name, n), run in runs.items()}, rounds)
    cost = {
        name: [(a - b) / (tokens - 1) for a, b in zip(best[f"{name} {tokens}"], best[f"{name} 1"], strict=True)]
        for name in makers
    }
    ours, theirs = cost["strata"], cost["llama.cpp"]
    size = path.stat().st_size / 1e9
    texts = "equal" if len(set(said.values())) == 1 else "differ"
    return (f"| {kind} | {size:.2f} GB | {1e3 * ours[0]:.1f} | {1e3 * theirs[0]:.1f} | **{theirs[0] / ours[0]:.2f}** | "
            f"{1 / ours[1]:.1f} | {1 / theirs[1]:.1f} | {texts} |")  # fmt: skip


def whisper_folder(folder: Path) -> Path:
    """A Whisper of tiny's size with random weights, as transformers writes it."""
    from transformers import (  # type: ignore[import-not-found,unused-ignore]
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    WhisperForConditionalGeneration(WhisperConfig(**TINY)).save_pretrained(folder)
    words = {f"t{i}": i for i in range(50257)}
    marks = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|l{i}|>" for i in range(99)), "<|translate|>",
             "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
             *(f"<|{i * 0.02:.2f}|>" for i in range(1501))]  # fmt: skip
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def speech(tokens: int, rounds: int) -> str:
    """Rows: seconds of a processor for a second of sound, of a window with so many tokens and of its encoder."""
    import ctranslate2  # type: ignore[import-not-found,unused-ignore]

    from strata.models import Sampler
    from strata.models.seq2seq.rules import TokenRules

    heard = np.random.default_rng(0).standard_normal((1, 80, 3000)).astype(np.float32)
    with tempfile.TemporaryDirectory() as place:
        folder, made = whisper_folder(Path(place) / "model"), Path(place) / "converted"
        ctranslate2.converters.TransformersConverter(str(folder)).convert(str(made))
        ours = st.load(folder)
        theirs = ctranslate2.models.Whisper(str(made), device="cpu", compute_type="float32", intra_threads=1)
        rules = TokenRules(start=tuple(SPOKEN))

        def by_strata(count: int) -> list[int]:
            source = ours.encode({"input_features": heard})[1]
            return [row[0] for row in ours.tokens(source, count, Sampler(), rules)]

        def by_ctranslate2(count: int) -> list[int]:
            found = theirs.generate(
                ctranslate2.StorageView.from_array(heard), [SPOKEN], beam_size=1, max_length=2 * count,
                suppress_blank=False, suppress_tokens=[TINY["eos_token_id"]],
            )  # fmt: skip
            return list(found[0].sequences_ids[0])

        engines = {"strata": by_strata, "CTranslate2": by_ctranslate2}
        said = [run(tokens) for run in engines.values()]
        rows = []
        for what, count in (("a window", tokens), ("its encoder", 1)):
            best = in_turns({name: partial(run, count) for name, run in engines.items()}, rounds)
            a, b = (best[name][0] / WINDOW for name in engines)
            rows.append(f"| {what}, {count} tokens | {a:.4f} | {b:.4f} | **{b / a:.2f}** |")
        rows.append(f"\ntokens are {'equal' if said[0] == said[1] else 'different'}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("decode", "speech"))
    parser.add_argument("kinds", nargs="*", help="block types, or mixtral; q4_k by default")
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with st.config.using(num_threads=1):
        if options.what == "speech":
            print("| | strata | CTranslate2 | ratio |\n|---|---|---|---|")
            print(speech(options.tokens or 100, options.rounds))
            return
        print("| weights | file | strata, ms of CPU a token | llama.cpp | ratio | strata, tokens a second "
              "| llama.cpp | texts |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
        for kind in options.kinds or ["q4_k"]:
            print(decode(kind, options.tokens or 17, options.rounds), flush=True)


if __name__ == "__main__":
    main()
