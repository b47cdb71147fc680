"""Training: one compiled step (forward, backward, update), and a loop that can be stopped and resumed.

    trainer = nn.Trainer(loss, st.optim.AdamW(1e-3), clip_norm=1.0, precision="bf16", accumulate=4)
    state = trainer.init(model)
    state = trainer.fit(state, batches, steps=1000, checkpoints="runs/a", save_every=100)

`loss(model, *batch)` gives a float, or (float, model) where layers keep statistics. With a parameter named `key` it
gets its own key for every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import strata.tensor as tensors
from strata.config import config
from strata.core import flatten, here, tree_map, unflatten
from strata.core import progress as progress_bar
from strata.errors import OptionError
from strata.nn import optim
from strata.nn.checkpoint import latest, save_checkpoint
from strata.nn.module import Module, beside, cast_floats, trainable
from strata.tensor import Tensor, asarray, jit, random, value_and_grad

ops: Any = tensors
State = dict[str, Any]


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling: halved when a gradient overflows, doubled after `interval` steps without one."""

    start: float = 2.0**16
    factor: float = 2.0
    interval: int = 2000

    def init(self) -> State:
        return {"scale": asarray(self.start, "f32"), "good": asarray(0, "i32")}

    def update(self, state: State, finite: Any) -> State:
        full = state["good"] + 1 >= self.interval
        grown = ops.where(full, state["scale"] * self.factor, state["scale"])
        good = ops.where(full, 0, state["good"] + 1)
        return {
            "scale": ops.where(finite, grown, state["scale"] / self.factor),
            "good": ops.where(finite, good, 0).cast("i32"),
        }


@dataclass
class Trainer:
    """A loss, an optimiser, and how steps are taken."""

    loss: Callable[..., Any]
    optimizer: optim.Optimizer
    accumulate: int = 1
    clip_norm: float | None = None
    precision: str | None = None  # "bf16" or "f16": forward and backward in it, parameters and update in f32
    loss_scale: LossScale | None = None  # by default one for f16, none otherwise
    seed: int = 0
    step: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.precision not in (None, "f32", "bf16", "f16"):
            raise OptionError(
                f"Trainer: precision is 'f32', 'bf16' or 'f16', got {self.precision!r}", code="O284", place=here()
            )
        if self.accumulate < 1:
            raise OptionError(f"Trainer: accumulate is {self.accumulate}", code="O284", place=here())
        if self.precision == "f16" and self.loss_scale is None:
            self.loss_scale = LossScale()
        self._wants_key = "key" in inspect.signature(self.loss).parameters
        self.step = jit(self._step, donate_argnums=(0,))

    def init(self, model: Any) -> State:
        """What a step takes and gives: model, optimiser state, loss scale, key, and the count of steps.

        All of it is on the device of the model, or on the default device where the model is on the host."""
        with beside(model):
            state = {"model": model, "optimizer": self.optimizer.init(model), "key": random.key(self.seed)}
            if self.loss_scale is not None:
                state["scale"] = self.loss_scale.init()
            own: State = tree_map(_own, state)
        return own

    # one step

    def _step(self, state: State, batch: Any) -> tuple[State, State]:
        count = state["optimizer"]["count"]
        scale = state["scale"]["scale"] if "scale" in state else None
        total, grads, model = asarray(0.0), None, state["model"]
        for i, part in enumerate(_parts(batch, self.accumulate)):
            key = random.fold_in(state["key"], count * self.accumulate + i) if self._wants_key else None
            value, slopes, model = self._gradient(model, part, key, scale)
            total = value if i == 0 else total + value
            grads = slopes if grads is None else tree_map(lambda a, b: a + b, grads, slopes)
        factor = 1.0 / self.accumulate
        weight = factor if scale is None else factor / scale
        grads = tree_map(lambda g: g * weight, grads)
        metrics: State = {"loss": total * factor}
        if self.clip_norm is not None:
            grads, metrics["grad_norm"] = optim.clip_by_global_norm(grads, self.clip_norm)
        model, slots = self.optimizer.update(model, grads, state["optimizer"])
        new = {**state, "model": model, "optimizer": slots}
        if self.loss_scale is not None:
            finite = _all_finite(grads)
            new = tree_map(lambda a, b: ops.where(finite, a, b), new, state)  # a step that overflowed changes nothing
            new["scale"] = self.loss_scale.update(state["scale"], finite)
            metrics["scale"] = new["scale"]["scale"]
        return new, metrics

    def _gradient(self, model: Any, batch: Any, key: Any, scale: Any) -> tuple[Any, Any, Any]:
        def scaled(model: Any) -> tuple[Any, Any]:
            used, inputs = model, batch
            if self.precision in ("bf16", "f16"):
                used, inputs = cast_floats((model, batch), self.precision)
            named = {"key": key} if self._wants_key else {}
            result = self.loss(used, *inputs, **named)
            loss, after = result if isinstance(result, tuple) else (result, used)
            loss = loss.cast("f32")
            return (loss if scale is None else loss * scale), (loss, _keep_buffers(model, after))

        (_, (loss, after)), grads = value_and_grad(scaled, has_aux=True)(model)
        return loss, grads, after

    # the loop

    def fit(
        self,
        state: State,
        batches: Iterable[Sequence[Any]],
        steps: int,
        *,
        checkpoints: str | Path | None = None,
        save_every: int = 1000,
        keep: int = 3,
        progress: bool = True,
        on_step: Callable[[int, State], None] | None = None,
    ) -> State:
        """Run up to `steps` steps in all. With `checkpoints`, start from the newest one and save as it goes.

        Batches that earlier runs have used are skipped, so that a resumed run sees what it would have seen.
        """
        done = 0
        if checkpoints is not None:
            found = latest(checkpoints)
            if found is not None:
                state, done = found.load(state), found.step
        source = iter(batches)
        for _ in range(done):
            if next(source, None) is None:
                return state
        with progress_bar("training", steps, wanted=None if progress else False) as advance:
            advance(done)
            for batch in source:
                if done >= steps:
                    break
                state, metrics = self.step(state, tuple(batch))
                done += 1
                advance(1, partial(_shown, metrics))
                if on_step is not None:
                    on_step(done, metrics)
                if checkpoints is not None and (done % save_every == 0 or done == steps):
                    save_checkpoint(checkpoints, done, state, keep=keep)
        return state


def _shown(metrics: State) -> str:
    return f"loss {metrics['loss'].item():.4f}"


def _own(x: Any) -> Tensor:
    """A tensor that a step may take over, on the default device: donating it must not touch the caller's array."""
    held = asarray(x).realize()
    there = held.to(config().device)
    return copy(held) if there is held else there.realize()


def _parts(batch: Any, count: int) -> list[Any]:
    """A batch in equal parts along the leading axis."""
    if count == 1:
        return [batch]
    leaves, structure = flatten(batch)
    for x in leaves:
        if not x.shape or x.shape[0] % count:
            raise OptionError(f"Trainer: a batch {x.type} does not split into {count} parts", code="O285", place=here())
    sizes = [x.shape[0] // count for x in leaves]
    return [
        unflatten(structure, [x[i * n : (i + 1) * n] for x, n in zip(leaves, sizes, strict=True)]) for i in range(count)
    ]


def _keep_buffers(model: Any, after: Any) -> Any:
    """The model with the statistics that its layers have after the forward pass, in their own types."""
    if not isinstance(after, Module):
        return model
    leaves, structure = flatten(model)
    new = flatten(after)[0]
    masks = trainable(model)
    return unflatten(structure, [p if m else b.cast(p.dtype) for p, b, m in zip(leaves, new, masks, strict=True)])


def _all_finite(tree: Any) -> Any:
    checks = [x.isfinite().all() for x in flatten(tree)[0]]
    result = checks[0]
    for check in checks[1:]:
        result = result & check
    return result
