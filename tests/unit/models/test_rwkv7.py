"""RWKV-7 against its formula in NumPy's f64, written for one token and one head at a time; transformers has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import FileError
from strata.finetuning import TrainingStep
from strata.io import save_safetensors
from strata.models import Decoder, PagedCache, Sampler, load
from strata.quantizing.calibrate import collect_activations
from strata.serving import Engine
from tests.families.decoders import LENGTHS, LIMIT, NEW, paged, pieces, saved_again

HIDDEN, LAYERS, HEADS, INNER, VOCAB = 32, 2, 4, 56, 128
KEYS, VALUES = HIDDEN // HEADS, 10
RANKS = {"w": 6, "a": 5, "v": 3, "g": 7}
CONFIG: dict[str, Any] = dict(
    model_type="rwkv7", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, head_dim=KEYS,
    value_dim=[HEADS * VALUES] * LAYERS, intermediate_size=INNER, norm_eps=1e-5, decay_low_rank_dim=RANKS["w"],
    a_low_rank_dim=RANKS["a"], v_low_rank_dim=RANKS["v"], gate_low_rank_dim=RANKS["g"], hidden_act="sqrelu",
)  # fmt: skip
Arrays = dict[str, np.ndarray]


def weights(rng: np.random.Generator) -> Arrays:
    """Weights under the names of checkpoints."""
    wide = HEADS * VALUES
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    norms = [("model.norm", HIDDEN), ("model.layers.0.pre_norm", HIDDEN)]
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        norms += [(f"{at}attn_norm", HIDDEN), (f"{at}ffn_norm", HIDDEN), (f"{at}attn.g_norm", wide)]
        shapes |= {f"{at}attn.x_{kind}": (1, 1, HIDDEN) for kind in "rwkvag"}
        shapes |= {f"{at}attn.{kind}": (HIDDEN,) for kind in ("k_k", "k_a")}
        shapes |= {f"{at}attn.{kind}_proj.weight": (n, HIDDEN) for kind, n in zip("rkv", (HIDDEN, HIDDEN, wide),
                                                                                   strict=True)}  # fmt: skip
        for kind, n in (("w", HIDDEN), ("a", HIDDEN), ("v", wide), ("g", wide)):
            if kind == "v" and i == 0:
                continue
            low = f"{at}attn.{kind}_lora.lora."
            shapes |= {f"{low}0.weight": (RANKS[kind], HIDDEN), f"{low}2.weight": (n, RANKS[kind])}
            shapes |= {} if kind == "g" else {f"{low}2.bias": (n,)}
        shapes |= {f"{at}attn.r_k": (HEADS, KEYS), f"{at}attn.o_proj.weight": (HIDDEN, wide)}
        shapes |= {f"{at}ffn.x_k": (HIDDEN,), f"{at}ffn.key.weight": (INNER, HIDDEN)}
        shapes[f"{at}ffn.value.weight"] = (HIDDEN, INNER)
    made = {name: rng.standard_normal(shape) * 0.4 for name, shape in shapes.items()}
    made |= {f"{name}.weight": 1 + rng.standard_normal(n) * 0.2 for name, n in norms}
    made |= {f"{name}.bias": rng.standard_normal(n) * 0.2 for name, n in norms}
    return {name: np.asarray(x, np.float32) for name, x in made.items()}


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def normal(x: np.ndarray, scale: Any, shift: Any, eps: float) -> np.ndarray:
    found: np.ndarray = (x - x.mean()) / np.sqrt(x.var() + eps) * scale + shift
    return found


class Oracle:
    """One sequence, a token at a time; a head's state is a matrix from keys to values."""

    def __init__(self, made: Arrays) -> None:
        self.w = {name.removeprefix("model."): x.astype(np.float64).squeeze() for name, x in made.items()}
        self.shifts = np.zeros((LAYERS, 2, HIDDEN))
        self.states = np.zeros((LAYERS, HEADS, VALUES, KEYS))

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return normal(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"], 1e-5)

    def low(self, x: np.ndarray, name: str, between: Any = lambda x: x) -> np.ndarray:
        y: np.ndarray = self.w[f"{name}.lora.2.weight"] @ between(self.w[f"{name}.lora.0.weight"] @ x)
        return y + self.w.get(f"{name}.lora.2.bias", 0.0)

    def token(self, number: int) -> np.ndarray:
        w, x = self.w, self.norm(self.w["embeddings.weight"][number], "layers.0.pre_norm")
        for i in range(LAYERS):
            at = f"layers.{i}.attn."
            y = self.norm(x, f"layers.{i}.attn_norm")
            old, self.shifts[i, 0] = self.shifts[i, 0].copy(), y
            xr, xw, xk, xv, xa, xg = (y + (old - y) * w[f"{at}x_{kind}"] for kind in "rwkvag")
            r, k, v = (w[f"{at}{n}_proj.weight"] @ z for n, z in (("r", xr), ("k", xk), ("v", xv)))
            if i == 0:
                first = v
            else:
                share = sigmoid(self.low(xv, f"{at}v_lora"))
                v = (1 - share) * v + share * first
            decay = np.exp(-np.exp(-0.5) * sigmoid(self.low(xw, f"{at}w_lora", np.tanh)))
            rate, gate = sigmoid(self.low(xa, f"{at}a_lora")), self.low(xg, f"{at}g_lora", sigmoid)
            removed = k * w[f"{at}k_k"]
            k = k * (1 + (rate - 1) * w[f"{at}k_a"])
            out = []
            for h in range(HEADS):
                own, vown = slice(h * KEYS, (h + 1) * KEYS), slice(h * VALUES, (h + 1) * VALUES)
                kk = removed[own] / np.linalg.norm(removed[own])
                change = np.diag(decay[own]) - np.outer(kk, kk * rate[own])
                self.states[i, h] = self.states[i, h] @ change + np.outer(v[vown], k[own])
                z = normal(self.states[i, h] @ r[own], w[f"{at}g_norm.weight"][vown], w[f"{at}g_norm.bias"][vown],
                           KEYS * 1e-5)  # fmt: skip
                out.append(z + (r[own] * k[own] * w[f"{at}r_k"][h]).sum() * v[vown])
            x = x + w[f"{at}o_proj.weight"] @ (np.concatenate(out) * gate)
            at, y = f"layers.{i}.ffn.", self.norm(x, f"layers.{i}.ffn_norm")
            old, self.shifts[i, 1] = self.shifts[i, 1].copy(), y
            inner = w[f"{at}key.weight"] @ (y + (old - y) * w[f"{at}x_k"])
            x = x + w[f"{at}value.weight"] @ np.maximum(inner, 0) ** 2
        found: np.ndarray = w["lm_head.weight"] @ self.norm(x, "norm")
        return found


def logits(made: Arrays, ids: np.ndarray) -> np.ndarray:
    """Of every token of many sequences."""
    oracles = [Oracle(made) for _ in ids]
    return np.stack([[oracle.token(int(t)) for t in row] for oracle, row in zip(oracles, ids, strict=True)])


def greedy(made: Arrays, ids: np.ndarray, count: int) -> list[int]:
    oracle = Oracle(made)
    last = [oracle.token(int(t)) for t in ids][-1]
    found = [int(last.argmax())]
    while len(found) < count:
        found.append(int(oracle.token(found[-1]).argmax()))
    return found


def folder(path: Path, made: Arrays, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes), "utf-8")
    save_safetensors(path / "model.safetensors", made)
    return path


@pytest.fixture
def made(rng: np.random.Generator) -> Arrays:
    return weights(rng)


def test_every_way_gives_what_the_formula_gives(tmp_path: Path, made: Arrays, rng: np.random.Generator) -> None:
    """One prefill, pieces with single steps, pages; 32 tokens alone and in a batch of several lengths; saved again."""
    model: Decoder = load(folder(tmp_path / "model", made), context=128)
    ids = rng.integers(3, VOCAB, (2, 72)).astype(np.int32)
    wanted = logits(made, ids)
    first = model.run(input_ids=ids)["logits"]
    for found in (first, pieces(model, ids), paged(model, ids)):
        assert np.abs(found - wanted).max() <= LIMIT * np.abs(wanted).max()
    prompts = [ids[i % 2, :n].tolist() for i, n in enumerate(LENGTHS)]
    alone = [greedy(made, np.array(p), NEW) for p in prompts]
    assert [list(model.tokens(p, NEW, Sampler())) for p in prompts] == alone
    rows = list(model.token_rows(prompts, NEW, Sampler()))
    assert [[row[i] for row in rows] for i in range(len(prompts))] == alone
    saved_again(tmp_path / "model", tmp_path / "again")
    assert np.array_equal(load(tmp_path / "again", context=128).run(input_ids=ids)["logits"], first)


def lost(made: Arrays, ids: np.ndarray) -> float:
    """The mean loss of the tokens of many sequences, each foretold from those before it."""
    found = logits(made, ids[:, :-1])
    found -= found.max(-1, keepdims=True)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    return -float(np.take_along_axis(found, ids[:, 1:, None].astype(np.int64), -1).mean())


def test_a_training_step_has_the_slope_of_the_formula(tmp_path: Path, made: Arrays, rng: np.random.Generator) -> None:
    model: Decoder = load(folder(tmp_path / "model", made), context=32)
    names = ["layers.1.attn.k_proj.weight", "layers.0.attn.w_lora.lora.0.weight", "layers.1.ffn.key.weight"]
    step = TrainingStep(model, {}, batch=2, length=9, trained=names)
    ids = rng.integers(3, VOCAB, (2, 10)).astype(np.int32)
    for _ in range(2):  # the second step starts from the states that the first one started from
        loss, slopes = step.run(ids, np.ones((2, 9), np.float32))
        assert abs(loss - lost(made, ids)) <= 1e-5 * loss
    for name in names:
        way, size = rng.standard_normal(slopes[name].shape), 1e-5
        ends = [
            lost({**made, f"model.{name}": made[f"model.{name}"].astype(np.float64) + sign * size * way}, ids)
            for sign in (1, -1)
        ]
        wanted = (ends[0] - ends[1]) / (2 * size)
        assert abs(float((slopes[name] * way).sum()) - wanted) <= 2e-3 * np.linalg.norm(slopes[name])


class Spelled:
    """A tokenizer for which a text is its token ids."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [int(word) for word in text.split()]


def test_calibration_reads_each_piece_from_the_start(tmp_path: Path, made: Arrays, rng: np.random.Generator) -> None:
    model: Decoder = load(folder(tmp_path / "model", made), context=32)
    model._tokenizer = Spelled()  # type: ignore[assignment]
    parts = [rng.integers(3, VOCAB, count).tolist() for count in (9, 6, 7)]
    found = collect_activations(model, [" ".join(map(str, part)) for part in parts])
    seen: list[np.ndarray] = []

    class Watched(Oracle):
        def norm(self, x: np.ndarray, name: str) -> np.ndarray:
            y = super().norm(x, name)
            seen.extend([y] if name == "norm" else [])
            return y

    for part in parts:
        oracle = Watched(made)
        for number in part:
            oracle.token(number)
    wanted = np.square(seen).sum(0)
    assert found.tokens == len(seen) == 22
    assert np.abs(found.squares["lm_head"] - wanted).max() <= 1e-4 * wanted.max()


def test_the_engine_serves_it_with_states_of_constant_size(tmp_path: Path, made: Arrays) -> None:
    from tests.unit.serving.conftest import Letters

    model: Decoder = load(folder(tmp_path / "model", made), context=512)
    model._tokenizer = Letters()  # type: ignore[assignment]
    prompts = ["hello", "a", "something much longer " * 4, "xyz"]
    engine = Engine(model, cache_tokens=1024, max_requests=3, max_tokens=48)
    requests = [engine.submit(p, max_tokens=9) for p in prompts]
    engine.run()
    assert [r.text() for r in requests] == [model.generate(p, max_tokens=9) for p in prompts]
    sizes = []
    for n in (1, 400):
        state = model.start(1, n)
        model.step(state, np.ones((1, n), np.int32))
        sizes.append([cache.nbytes for cache in state.caches])
    assert sizes[0] == sizes[1]
    assert not PagedCache(model, 1).pools


def test_older_checkpoints_pack_the_shares(tmp_path: Path, made: Arrays) -> None:
    """Six shares in one tensor, ranks that only the weights say, the older name of the family."""
    old = dict(made)
    for i in range(LAYERS):
        at = f"model.layers.{i}.attn."
        old[f"{at}x_x"] = np.concatenate([old.pop(f"{at}x_{kind}")[0] for kind in "rwkvag"])
    none = dict.fromkeys([key for key in CONFIG if key.endswith("low_rank_dim")])
    ids = np.arange(3, 20, dtype=np.int32)[None]
    new = load(folder(tmp_path / "new", made), context=64).run(input_ids=ids)["logits"]
    packed = folder(tmp_path / "old", old, model_type="rwkv7_fla", **none)
    assert np.array_equal(load(packed, context=64).run(input_ids=ids)["logits"], new)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attn": {"layers": [1], "num_heads": 4}}, "asks for layers with attention"),
        ({"hidden_act": "zork"}, "hidden_act = 'zork'"),
        ({"head_dim": 5, "num_heads": 5}, "32 features and 40 values for 5 heads"),
        ({"num_hidden_layers": 4}, "4 layers, the weights have 2"),
        ({"intermediate_size": 40}, r"'layers.0.ffn.key.weight' is f32\[56, 32\], the configuration asks for \[40, 32"),
        ({"decay_low_rank_dim": 8}, r"w_lora.lora.0.weight' is f32\[6, 32\], the configuration asks for \[8, 32\]"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, made: Arrays, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(FileError, match=told):
        load(folder(tmp_path / "model", made, **changes), context=64).run(input_ids=[[1]])
