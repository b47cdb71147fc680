"""LoRA fine-tuning: low-rank changes of matmuls are trained, the weights stay as they are, quantised or not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from strata.arguments import own_checks
from strata.errors import MemoryLimitError, OptionError
from strata.finetuning.step import TrainingStep
from strata.io import save_safetensors
from strata.kinds import with_article
from strata.models import Decoder, LowRank, load

Progress = Callable[[int, int, float], None]
BETAS = (0.9, 0.999)
EPSILON = 1e-8


@dataclass(frozen=True)
class LoraOptions:
    """What is trained, and how."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    steps: int = 100
    batch: int = 4
    length: int = 128
    warmup: int = 0
    max_norm: float = 1.0  # of all gradients together; 0 means no limit
    seed: int = 0
    memory_limit: int | None = None  # bytes

    def __post_init__(self) -> None:
        counts = {"rank": self.rank, "steps": self.steps, "batch": self.batch, "length": self.length}
        wrong = next((name for name, value in counts.items() if value < 1), None)
        if wrong is not None:
            raise OptionError(f"finetune: {wrong} is {counts[wrong]}, at least 1 is wanted", code="O685")


@dataclass
class Finetuned:
    """What a run gave: the loss of each step, the changes, and the memory that was planned before it."""

    options: LoraOptions
    changes: dict[str, LowRank]
    losses: list[float] = field(default_factory=list)
    planned_bytes: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0


@own_checks("model", "texts")
def finetune(
    model: Any, texts: Sequence[str], *, options: LoraOptions | None = None,
    output: str | os.PathLike[str] | None = None, start: Mapping[str, LowRank] | None = None,
    progress: Progress | None = None,
) -> Finetuned:  # fmt: skip
    """Train a LoRA adapter of a decoder on texts; with `output`, save it in a folder as PEFT does.

    `start` are changes to begin with; otherwise A is random and B is zero. The memory of a step is planned before the
    first one, and refused where it is more than `memory_limit`.
    """
    chosen = options or LoraOptions()
    given = load(model) if isinstance(model, (str, os.PathLike)) else model
    if not isinstance(given, Decoder):
        raise OptionError(f"finetune: {with_article(type(given))} generates no text", code="O685")
    changes = dict(start) if start is not None else first_changes(given, chosen)
    step = TrainingStep(given, changes, batch=chosen.batch, length=chosen.length)
    if chosen.memory_limit is not None and step.planned_bytes > chosen.memory_limit:
        raise MemoryLimitError(
            f"finetune: a step needs {step.planned_bytes} bytes, the limit is {chosen.memory_limit}", code="C200",
            fix="a smaller batch or length",
        )  # fmt: skip
    found = Finetuned(chosen, changes, [], step.planned_bytes, step.weight_bytes, step.activation_bytes)
    tokens = token_rows(given, texts, chosen)
    _train(step, tokens, chosen, found, progress)
    for name, change in changes.items():
        changes[name] = LowRank(step.values[f"{name}.lora_A"], step.values[f"{name}.lora_B"], change.scale)
    if output is not None:
        save_adapter(output, given, found)
    return found


def first_changes(model: Decoder, options: LoraOptions) -> dict[str, LowRank]:
    """A random A, as PEFT draws it, and a zero B for each matmul whose name ends with one of the targets."""
    builder = model._build(options.length, every=True)
    builder.watched = {}
    builder.build()
    rng = np.random.default_rng(options.seed)
    found: dict[str, LowRank] = {}
    for name in builder.watched:
        if name.rpartition(".")[2] not in options.targets:
            continue
        n, k = builder.weights[f"{name}.weight"].shape
        bound = 1 / np.sqrt(k)  # Kaiming's uniform with a = √5
        a = rng.uniform(-bound, bound, (options.rank, k)).astype(np.float32)
        found[name] = LowRank(a, np.zeros((n, options.rank), np.float32), options.alpha / options.rank)
    if not found:
        known = sorted({name.rpartition(".")[2] for name in builder.watched})
        raise OptionError(
            f"finetune: no matmul is named {', '.join(options.targets)}; known: {', '.join(known)}", code="O685"
        )
    return found


def token_rows(model: Decoder, texts: Sequence[str], options: LoraOptions) -> np.ndarray:
    """All texts as rows of length + 1 tokens, one after the other, ends of texts marked."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise OptionError("finetune: texts are a list of texts", code="O685")
    flat: list[int] = []
    for text in texts:
        flat += [*model.tokenizer.encode(text), *model.tokenizer.eos[:1]]
    size = options.length + 1
    count = len(flat) // size
    if not count:
        raise OptionError(f"finetune: the texts have {len(flat)} tokens, a row has {size}", code="O685")
    return np.array(flat[: count * size], np.int32).reshape(count, size)


def _train(
    step: TrainingStep, tokens: np.ndarray, options: LoraOptions, found: Finetuned, progress: Progress | None
) -> None:
    """AdamW over rows in a random order."""
    rng = np.random.default_rng(options.seed)
    first = {name: np.zeros_like(a) for name, a in step.values.items()}
    second = {name: np.zeros_like(a) for name, a in step.values.items()}
    counts = np.ones((options.batch, options.length), np.float32)
    order: list[int] = []
    for number in range(1, options.steps + 1):
        while len(order) < options.batch:
            order += rng.permutation(len(tokens)).tolist()
        rows, order = order[: options.batch], order[options.batch :]
        loss, grads = step.run(tokens[rows], counts)
        found.losses.append(loss)
        step.update(_adamw(step.values, grads, first, second, number, options))
        if progress is not None:
            progress(number, options.steps, loss)


def _adamw(
    values: Mapping[str, np.ndarray], grads: Mapping[str, np.ndarray], first: dict[str, np.ndarray],
    second: dict[str, np.ndarray], number: int, options: LoraOptions,
) -> dict[str, np.ndarray]:  # fmt: skip
    size = float(np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values())))
    shrink = min(1.0, options.max_norm / (size + 1e-6)) if options.max_norm > 0 else 1.0
    rate = options.learning_rate * min(1.0, number / options.warmup if options.warmup else 1.0)
    made: dict[str, np.ndarray] = {}
    for name, value in values.items():
        g = grads[name] * np.float32(shrink)
        first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * g
        second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g * g
        step = first[name] / (1 - BETAS[0] ** number)
        spread = np.sqrt(second[name] / (1 - BETAS[1] ** number)) + EPSILON
        made[name] = (value * (1 - rate * options.weight_decay) - rate * step / spread).astype(np.float32)
    return made


def save_adapter(folder: str | os.PathLike[str], model: Decoder, found: Finetuned) -> None:
    """adapter_config.json and adapter_model.safetensors, as PEFT writes and reads them."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    permuted = getattr(model.config, "is_permuted", False)
    heads = {"q_proj": model.config.heads, "k_proj": model.config.kv_heads} if permuted else {}
    for name, change in found.changes.items():
        count = heads.get(name.rpartition(".")[2])
        b = change.b if count is None else _plain_rows(change.b, count)
        for part, array in (("A", change.a), ("B", b)):
            tensors[f"base_model.model.model.{name}.lora_{part}.weight"] = np.ascontiguousarray(array, np.float32)
    save_safetensors(place / "adapter_model.safetensors", tensors, {"format": "pt"})
    rank = next(iter(found.changes.values())).a.shape[0]
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": found.options.alpha, "bias": "none",
        "lora_dropout": 0.0, "target_modules": sorted({n.rpartition(".")[2] for n in found.changes}),
        "base_model_name_or_path": str(model.source or ""), "inference_mode": True, "fan_in_fan_out": False,
        "use_rslora": False, "use_dora": False, "init_lora_weights": True, "modules_to_save": None,
    }  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _plain_rows(b: np.ndarray, heads: int) -> np.ndarray:
    """Rows of GGUF files of Llama, pairs side by side, in the order of the original."""
    return b.reshape(heads, -1, 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
