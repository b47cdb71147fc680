"""A small language model, trained here on the guides: what quantising and fine-tuning are measured on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from strata.finetuning import TrainingStep
from strata.io import save_safetensors
from strata.models import Decoder, load

ROOT = Path(__file__).parents[3]
HIDDEN, INNER, LAYERS, LENGTH, BATCH = 256, 512, 2, 48, 8
VOCAB = 384


def corpus() -> list[str]:
    return [path.read_text("utf-8") for path in sorted((ROOT / "docs" / "guides").glob("*.md"))]


def make_folder(folder: Path, seed: int = 0) -> Path:
    """A random model with a tokenizer of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(seed)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)) * 0.05}
    tensors["model.norm.weight"] = np.ones(HIDDEN)
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (128, HIDDEN),
              "self_attn.v_proj": (128, HIDDEN),
              "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
              "mlp.down_proj": (HIDDEN, INNER)}  # fmt: skip
    for i in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = rng.standard_normal(shape) * shape[1] ** -0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = np.ones(HIDDEN)
    save_safetensors(folder / "model.safetensors", {n: a.astype(np.float32) for n, a in tensors.items()})
    config = dict(
        model_type="llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5,
        tie_word_embeddings=True, eos_token_id=0, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def train(folder: Path, steps: int, seed: int = 0) -> Decoder:
    """All weights of a folder's model, trained on the guides with Adam and written back."""
    model = load(folder, context=128)
    names = [n for n in model._build(LENGTH, every=True).build().bound if not n.startswith("rope")]
    step = TrainingStep(model, {}, batch=BATCH, length=LENGTH, trained=names)
    tokens = np.array([i for text in corpus() for i in model.tokenizer.encode(text)], np.int32)
    first, second = ({n: np.zeros_like(a) for n, a in step.values.items()} for _ in range(2))
    rng = np.random.default_rng(seed)
    for number in range(1, steps + 1):
        rows = np.stack([tokens[a : a + LENGTH + 1] for a in rng.integers(0, len(tokens) - LENGTH - 1, BATCH)])
        _, grads = step.run(rows, np.ones((BATCH, LENGTH), np.float32))
        made = {}
        for name, value in step.values.items():
            first[name] = 0.9 * first[name] + 0.1 * grads[name]
            second[name] = 0.95 * second[name] + 0.05 * grads[name] ** 2
            size = np.sqrt(second[name] / (1 - 0.95**number)) + 1e-8
            made[name] = (value - 2e-3 * first[name] / (1 - 0.9**number) / size).astype(np.float32)
        step.update(made)
    save_safetensors(folder / "model.safetensors", {f"model.{n}": a for n, a in step.values.items()})
    return load(folder, context=128)  # type: ignore[no-any-return]
