"""The serving engine on a GPU: many requests of many lengths at once, on a decoder with random weights.

python -m benchmarks.serve_gpu --device cuda

Writes a folder of the sizes of Qwen3-0.6B (or, with `--small`, of a few thousand weights) with random weights in bf16
and a tokenizer of letters. Then it measures how long the engine takes to be ready, generates for all requests at
once, and compares the logits of one request alone, among 16 and among 256, bit by bit. `--parts profile,python` tells
where the time of a step goes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata.backends import backend_for
from strata.core import bf16
from strata.models import PAGE, Decoder, PagedCache
from strata.models.generating.feeding import FedRow, FedSteps
from strata.serving import Engine

QWEN3: dict[str, Any] = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rope_theta=1e6,
    rms_norm_eps=1e-6, tie_word_embeddings=True, torch_dtype="bfloat16",
)  # fmt: skip
SMALL = QWEN3 | dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
)  # fmt: skip
EOS = "<end>"
DRAWN = (1 << 24) + 43  # random numbers that weights repeat; a prime, so that no two rows are the same


def write_model(folder: Path, sizes: dict[str, Any], seed: int = 0) -> Path:
    """A folder with random weights in bf16 and a tokenizer of single letters; what is there already is kept."""
    if (folder / "config.json").exists():
        return folder
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    wide, narrow = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (sizes["vocab_size"], hidden), "norm": (hidden,)}
    for i in range(sizes["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes |= {
            f"{at}self_attn.q_proj": (wide, hidden), f"{at}self_attn.k_proj": (narrow, hidden),
            f"{at}self_attn.v_proj": (narrow, hidden), f"{at}self_attn.o_proj": (hidden, wide),
            f"{at}self_attn.q_norm": (dim,), f"{at}self_attn.k_norm": (dim,),
            f"{at}mlp.gate_proj": (inner, hidden), f"{at}mlp.up_proj": (inner, hidden),
            f"{at}mlp.down_proj": (hidden, inner),
            f"{at}input_layernorm": (hidden,), f"{at}post_attention_layernorm": (hidden,),
        }  # fmt: skip
    weights = {}
    drawn = (rng.standard_normal(DRAWN, np.float32) * 0.02).astype(bf16.np)  # drawing all of them takes its time
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[f"model.{name}.weight"] = (1 + 0.1 * rng.standard_normal(shape, np.float32)).astype(bf16.np)
        else:
            weights[f"model.{name}.weight"] = np.resize(np.roll(drawn, rng.integers(DRAWN)), shape)
    st.io.save_safetensors(folder / "model.safetensors", weights)
    letters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz .,!?")} | {EOS: 31, "<unk>": 32}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(sizes | {"eos_token_id": 31}))
    return folder


def prompts_of(count: int, vocab: int, most: int, seed: int = 1) -> list[tuple[list[int], int]]:
    """Prompts of 100 to 1,024 tokens, or a tenth of `most` to `most`, each with a number of tokens to generate."""
    rng = np.random.default_rng(seed)
    least = max(most // 10, 1)
    lengths = rng.integers(least, most + 1, (count, 2))
    return [(rng.integers(33, vocab, a).tolist(), int(b)) for a, b in lengths]


def throughput(engine: Engine, work: list[tuple[list[int], int]], **options: Any) -> dict[str, Any]:
    """All requests at once, with options of `submit`."""
    start = time.perf_counter()
    requests = [engine.submit(ids, max_tokens=n, ignore_eos=True, **options) for ids, n in work]
    engine.run()
    seconds = time.perf_counter() - start
    for request in requests:
        request.check()
    made = sum(len(r.tokens) for r in requests)
    assert made == sum(n for _, n in work)
    firsts = sorted(r.first_token or 0.0 for r in requests)
    told = engine.metrics.snapshot()
    counted, waits = told["counters"], told["histograms"].get("wait_microseconds", {})
    return {
        "seconds": round(seconds, 3), "generated": made, "prompt": sum(len(ids) for ids, _ in work),
        "tokens_per_second": round(made / seconds, 1),
        "first_token_p50": round(firsts[len(firsts) // 2], 3),
        "first_token_p95": round(firsts[len(firsts) * 19 // 20], 3),
        "steps": counted.get("steps"), "preemptions": counted.get("preemptions", 0),
        "waited_seconds": round(waits.get("sum", 0.0) / 1e6, 3),
    }  # fmt: skip


def logits_among(model: Decoder, others: int, steps: int, *, most: int, cut: int = 0) -> list[np.ndarray]:
    """Logits of one request among others, each with a prompt of its own: behind its prompt, and at each step after it.

    With `cut`, its prompt is read in two parts.
    """
    vocab = model.config.vocab
    mine = np.random.default_rng(7).integers(33, vocab, most * 3 // 5).tolist()
    prompts = [mine, *(ids for ids, _ in prompts_of(others, vocab, most, seed=8))]
    room = sum(-(-(len(ids) + steps + 1) // PAGE) for ids in prompts)
    cache = PagedCache(model, room)
    tables = [cache.table() for _ in prompts]
    for table, ids in zip(tables, prompts, strict=True):
        assert table.reserve(len(ids) + steps + 1)
    found = []
    if not cache.is_fed:
        last = []
        for table, ids in zip(tables, prompts, strict=True):
            for part in (ids[:cut], ids[cut:]) if cut else (ids,):
                logits = cache.step([table], np.array([part], np.int32))
            last.append(int(logits[0].argmax()))
            found += [logits[0]] if table is tables[0] else []
        for _ in range(steps):
            logits = cache.step(tables, np.array(last, np.int32)[:, None])
            last = logits.argmax(1).tolist()
            found.append(logits[0])
        return found
    fed = FedSteps(cache, len(prompts))
    slots = [fed.take_slot() for _ in prompts]
    if cut:
        fed.prefill([FedRow(tables[0], None, mine[:cut])])
    for at in range(0, len(prompts), 4):
        which = range(at, min(at + 4, len(prompts)))
        fed.prefill([FedRow(tables[i], slots[i], prompts[i][cut if i == 0 else 0 :]) for i in which])
        found += [fed.logits_of([0])[0]] if at == 0 else []
    for _ in range(steps):
        fed.decode([FedRow(table, slot, ()) for table, slot in zip(tables, slots, strict=True)])
        found.append(fed.logits_of([0])[0])
    return found


def invariance(model: Decoder, batches: tuple[int, ...], steps: int, most: int) -> dict[str, Any]:
    """Whether the logits of a request are the same bits alone and among others, and with its prompt in two parts."""
    alone = logits_among(model, batches[0] - 1, steps, most=most)
    told: dict[str, Any] = {"steps": steps, "finite": bool(all(np.isfinite(x).all() for x in alone))}
    cases = [(f"batch {n}", n - 1, 0) for n in batches[1:]] + [("cut prompt", 0, most * 3 // 10 // PAGE * PAGE)]
    for name, others, cut in cases:
        found = logits_among(model, others, steps, most=most, cut=cut)
        same = [a.tobytes() == b.tobytes() for a, b in zip(alone, found, strict=True)]
        gap = max(float(np.abs(a - b).max()) for a, b in zip(alone, found, strict=True))
        told[name] = "equal" if all(same) else f"differs at {[i for i, ok in enumerate(same) if not ok]} by {gap:.3g}"
    return told


def profile_decode(model: Decoder, batch: int, length: int, steps: int = 20) -> dict[str, Any]:
    """A decode step of so many sequences of so many tokens: seconds of the host, of the device, kernels by name."""
    cache = PagedCache(model, batch * (-(-(length + 4 * steps) // PAGE)))
    fed = FedSteps(cache, batch)
    rows = []
    for _ in range(batch):
        table = cache.table()
        assert table.reserve(length + 4 * steps)
        table.length = length
        rows.append(FedRow(table, fed.take_slot(), ()))
    wait = backend_for(model.device).home.wait  # type: ignore[union-attr]
    for _ in range(3):
        fed.decode(rows)
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        fed.decode(rows)
    asked = time.perf_counter() - start
    wait()
    told = {"batch": batch, "length": length, "host_ms": round(asked / steps * 1e3, 3),
            "step_ms": round((time.perf_counter() - start) / steps * 1e3, 3)}  # fmt: skip
    return told | {"kernels": kernels_of(lambda: [fed.decode(rows), wait()])}


def kernels_of(run: Any) -> list[tuple[str, int, float]]:
    """Kernels that a call launches, by PyTorch's profiler: name, number, microseconds in all; nothing without it."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if not torch.cuda.is_available():
            return []
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
    except ImportError:
        return []
    found = [(e.key[:60], e.count, round(e.self_device_time_total, 1)) for e in seen.key_averages()]
    return sorted(found, key=lambda row: -row[2])[:24]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/strata-serve-gpu"))
    parser.add_argument("--small", action="store_true", help="a decoder of a few thousand weights")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--most", type=int, default=1024, help="tokens of the longest prompt and answer")
    parser.add_argument("--steps", type=int, default=8, help="decoded before logits are compared")
    parser.add_argument("--parts", default="ready,bits,throughput", help="of these, and sampled, profile, python")
    given = parser.parse_args()
    sizes = SMALL if given.small else QWEN3
    folder = write_model(given.folder / ("small" if given.small else "qwen3-0.6b"), sizes)
    parts = given.parts.split(",")

    start = time.perf_counter()
    model = st.load(folder, device=given.device, context=min(2 * given.most, sizes["max_position_embeddings"]))
    loaded = time.perf_counter() - start
    room = given.requests * 2 * given.most * 5 // 8
    engine = Engine(model, max_requests=given.requests, cache_tokens=room, queue=given.requests, speculate=False)
    engine.warm_up()
    warm = time.perf_counter() - start
    engine.submit([40, 41, 42, 43, 44, 45], max_tokens=2, ignore_eos=True).wait()
    print(json.dumps({"part": "ready", "load": round(loaded, 3), "warm": round(warm, 3),
                      "first_answer": round(time.perf_counter() - start, 3)}), flush=True)  # fmt: skip
    if "throughput" in parts:
        for turn in range(2):  # the first one meets all sizes for the first time
            work = prompts_of(given.requests, sizes["vocab_size"], given.most, seed=turn)
            print(json.dumps({"part": "throughput", **throughput(engine, work)}), flush=True)
    if "sampled" in parts:  # with the settings that model cards have, by the device
        for turn in range(2):
            work = prompts_of(given.requests, sizes["vocab_size"], given.most, seed=turn)
            options = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": turn}
            print(json.dumps({"part": "sampled", **throughput(engine, work, **options)}), flush=True)
    if "python" in parts:
        import cProfile
        import pstats

        work = prompts_of(given.requests, sizes["vocab_size"], given.most // 4)
        with cProfile.Profile() as seen:
            throughput(engine, work)
        pstats.Stats(seen).sort_stats("tottime").print_stats(30)
    if "bits" in parts:
        batches = tuple(dict.fromkeys((1, min(16, given.requests), given.requests)))
        print(json.dumps({"part": "bits", **invariance(model, batches, given.steps, given.most)}), flush=True)
    if "profile" in parts:
        for batch in sorted({1, given.requests}):
            told = profile_decode(model, batch, given.most * 3 // 4)
            kernels = told.pop("kernels")
            print(json.dumps({"part": "profile", **told}), flush=True)
            for row in kernels:
                print("   ", *row)


if __name__ == "__main__":
    main()
