"""A LoRA run of PEFT over the weights that a quantised model has, with the same start, rows and optimiser as ours.

`python -m tests.unit.quantizing.peft_run MODEL.gguf TEXTS.txt [steps]` prints both losses, step by step, and the memory
of our run beside what was planned before it.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from strata.finetuning import LoraOptions, finetune
from strata.finetuning.lora import first_changes, token_rows
from strata.models import Decoder, LowRank, load


def plain_rows(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys as transformers has them; GGUF files of Llama have pairs side by side."""
    return w.reshape(heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def reference(base: Decoder) -> Any:
    """The model in transformers, with the weights that the blocks of a Llama's GGUF file stand for."""
    import torch
    import transformers  # type: ignore[import-not-found,unused-ignore]

    c = base.config
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.inner, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, max_position_embeddings=c.positions,
        rms_norm_eps=c.eps, rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.is_tied,
    ))  # fmt: skip
    weights, state = base.weights(), {}
    for name, old in made.state_dict().items():
        held: Any = weights.get(name.removeprefix("model."), weights["embed_tokens.weight"])
        array = np.asarray(held.dequantize(), np.float32).reshape(tuple(old.shape))
        heads = {"q_proj.weight": c.heads, "k_proj.weight": c.kv_heads}.get(".".join(name.split(".")[-2:]))
        state[name] = torch.tensor(array if heads is None else plain_rows(array, heads))
    made.load_state_dict(state)
    return made.eval()


def peft_losses(
    model: Any, start: dict[str, LowRank], rows: np.ndarray, options: LoraOptions
) -> tuple[Any, list[float]]:
    """The model with PEFT's adapter after training, and the loss of each step."""
    import peft  # type: ignore[import-not-found,unused-ignore]
    import torch

    settings = peft.LoraConfig(
        r=options.rank, lora_alpha=options.alpha, target_modules=list(options.targets), lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    made = peft.get_peft_model(model, settings)
    for name, value in made.named_parameters():
        if ".lora_A." in name:
            key = name.removeprefix("base_model.model.model.").partition(".lora_A")[0]
            value.data.copy_(torch.tensor(start[key].a))
    trained = [p for p in made.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=options.weight_decay)
    rng, order, found = np.random.default_rng(options.seed), [], []
    for _ in range(options.steps):
        while len(order) < options.batch:
            order += rng.permutation(len(rows)).tolist()
        chosen, order = order[: options.batch], order[options.batch :]
        ids = torch.tensor(rows[chosen]).long()
        logits = made(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, options.max_norm)
        adam.step()
        found.append(float(loss))
    return made, found


def peak() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    path, texts = Path(sys.argv[1]), [Path(sys.argv[2]).read_text("utf-8")]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 8
    options = LoraOptions(rank=8, steps=steps, batch=2, length=48, learning_rate=1e-3)
    before = peak()
    base: Decoder = load(path, context=options.length)
    start = first_changes(base, options)
    with tempfile.TemporaryDirectory() as folder:
        run = finetune(base, texts, options=options, output=folder, start=start)
    used, plan = peak() - before, run.planned_bytes
    parts = [f"{n / 2**20:.1f}" for n in (plan, run.weight_bytes, run.activation_bytes, used)]
    print("MB planned {}, of weights {}, of activations {}; used {}".format(*parts), f"({used / plan:.2f})", flush=True)
    print("strata", [round(x, 4) for x in run.losses], flush=True)
    import torch

    torch.set_num_threads(1)
    _, losses = peft_losses(reference(base), start, token_rows(base, texts, options), options)
    print("PEFT  ", [round(x, 4) for x in losses])
    worst = max(abs(a - b) / b for a, b in zip(run.losses, losses, strict=True))
    print(f"largest relative difference {worst:.2e}")


if __name__ == "__main__":
    main()
