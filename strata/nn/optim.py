"""Optimisers as pure functions: `init` makes a state, `update` gives new parameters and a new state.

    opt = st.optim.AdamW(1e-3)
    state = opt.init(model)
    model, state = opt.update(model, grads, state)

The formulas are torch's, so that losses follow each other to rounding. A learning rate is a number or a schedule, a
function from the step (0, 1, …) to a number. Buffers of modules and integers are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import strata.tensor as tensors
from strata.core import flatten, here, unflatten
from strata.errors import OptionError
from strata.nn.module import beside, trainable
from strata.tensor import Tensor, asarray, zeros

ops: Any = tensors
Rate = float | Callable[[Any], Any]
State = dict[str, Any]


@dataclass(frozen=True)
class Optimizer:
    """What all optimisers share: which leaves they change, the count of steps, weight decay."""

    lr: Rate = 1e-3
    slots: tuple[str, ...] = ()  # names of the tensors that are kept for each parameter

    def init(self, params: Any) -> State:
        """A state for these parameters, on their device: zeros, and a count of 0."""
        leaves, masks = flatten(params)[0], trainable(params)
        with beside(params):
            state: State = {"count": asarray(0, "i32")}
            for name in self.slots:
                state[name] = [
                    zeros(asarray(x).shape, asarray(x).dtype).realize() if m else None
                    for x, m in zip(leaves, masks, strict=True)
                ]
        return state

    def update(self, params: Any, grads: Any, state: State) -> tuple[Any, State]:
        """Parameters and state after one step."""
        leaves, structure = flatten(params)
        slopes, other = flatten(grads)
        if other != structure and len(slopes) != len(leaves):
            raise OptionError(f"update: the structures {structure} and {other} differ", code="O131", place=here())
        step = state["count"] + 1
        rate = self.lr(state["count"]) if callable(self.lr) else self.lr
        made: list[Any] = []
        slots: dict[str, list[Any]] = {name: [] for name in self.slots}
        shared = self.prepare(step, rate)
        for i, (p, g, mask) in enumerate(zip(leaves, slopes, trainable(params), strict=True)):
            if not mask:
                made.append(p)
                for name in self.slots:
                    slots[name].append(None)
                continue
            kept = {name: state[name][i] for name in self.slots}
            new, changed = self.one(asarray(p), asarray(g), kept, shared)
            made.append(new)
            for name in self.slots:
                slots[name].append(changed[name])
        return unflatten(structure, made), {"count": step, **slots}

    def prepare(self, step: Any, rate: Any) -> dict[str, Any]:
        """Numbers that all parameters share."""
        return {"lr": rate, "step": step}

    def one(self, p: Tensor, g: Tensor, kept: dict[str, Any], shared: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """One parameter and what is kept for it, after a step."""
        raise NotImplementedError


def like(x: Any, p: Tensor) -> Any:
    """A number in the dtype of a parameter; Python numbers adapt by themselves."""
    return x.cast(p.dtype) if isinstance(x, Tensor) else x


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent, with momentum, Nesterov's form of it, dampening and L2 decay as in torch."""

    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.nesterov and (self.momentum <= 0 or self.dampening):
            raise OptionError("SGD: nesterov needs momentum and no dampening", code="O283", place=here())
        object.__setattr__(self, "slots", ("momentum_buffer",) if self.momentum else ())

    def one(self, p: Tensor, g: Tensor, kept: dict[str, Any], shared: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        if self.weight_decay:
            g = g + p * self.weight_decay
        if not self.momentum:
            return p - g * like(shared["lr"], p), {}
        fresh = g * (1 - self.dampening) if self.dampening else g
        buffer = kept["momentum_buffer"] * self.momentum + fresh
        if self.dampening:  # the first step is not dampened
            buffer = ops.where(shared["step"] == 1, g, buffer)
        direction = g + buffer * self.momentum if self.nesterov else buffer
        return p - direction * like(shared["lr"], p), {"momentum_buffer": buffer}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, with L2 decay added to the gradient as in torch."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    decoupled: bool = False

    def prepare(self, step: Any, rate: Any) -> dict[str, Any]:
        t = step.cast("f64")
        first, second = (1 - ops.power(ops.full_like(t, beta), t) for beta in self.betas)
        lr = rate.cast("f64") if isinstance(rate, Tensor) else rate
        return {"lr": rate, "size": lr / first, "scale": 1.0 / second.sqrt()}

    def one(self, p: Tensor, g: Tensor, kept: dict[str, Any], shared: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        b1, b2 = self.betas
        if self.weight_decay and not self.decoupled:
            g = g + p * self.weight_decay
        mean = kept["exp_avg"] + (g - kept["exp_avg"]) * (1 - b1)
        square = kept["exp_avg_sq"] * b2 + g * g * (1 - b2)
        if self.weight_decay and self.decoupled:
            p = p * (1 - like(shared["lr"], p) * self.weight_decay)
        spread = square.sqrt() * like(shared["scale"], p) + self.eps  # one division for each element, below
        return p - like(shared["size"], p) * mean / spread, {"exp_avg": mean, "exp_avg_sq": square}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    weight_decay: float = 1e-2
    decoupled: bool = True


@dataclass(frozen=True)
class Lion(Optimizer):
    """The sign of an interpolated momentum, with decoupled weight decay."""

    lr: Rate = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    slots: tuple[str, ...] = ("exp_avg",)

    def one(self, p: Tensor, g: Tensor, kept: dict[str, Any], shared: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        b1, b2 = self.betas
        rate = like(shared["lr"], p)
        direction = (kept["exp_avg"] * b1 + g * (1 - b1)).sign()
        if self.weight_decay:
            p = p * (1 - rate * self.weight_decay)
        return p - direction * rate, {"exp_avg": kept["exp_avg"] * b2 + g * (1 - b2)}


# --------------------------------------------------------------------------------------------------- gradients together


def global_norm(tree: Any) -> Tensor:
    """√ of the sum of squares of all float leaves, in f32 at least."""
    parts = [asarray(g) for g, m in zip(flatten(tree)[0], trainable(tree), strict=True) if m]
    total = sum(((g.cast("f32") if g.dtype.bits < 32 else g) ** 2).sum() for g in parts)
    root: Tensor = ops.sqrt(total)
    return root


def clip_by_global_norm(grads: Any, max_norm: float) -> tuple[Any, Tensor]:
    """Gradients scaled down to a global norm of at most `max_norm` by torch's rule, and the norm that they had."""
    norm = global_norm(grads)
    factor = ops.minimum(max_norm / (norm + 1e-6), 1.0)
    leaves, structure = flatten(grads)
    masks = trainable(grads)
    scaled = [g * factor.cast(g.dtype) if m else g for g, m in zip(leaves, masks, strict=True)]
    return unflatten(structure, scaled), norm


def clip_by_value(grads: Any, limit: float) -> Any:
    """Gradients cut to -limit .. limit, element by element."""
    leaves, structure = flatten(grads)
    masks = trainable(grads)
    return unflatten(structure, [g.clip(-limit, limit) if m else g for g, m in zip(leaves, masks, strict=True)])


# ------------------------------------------------------------------------------------------------------------ schedules


def _float(step: Any) -> Tensor:
    return asarray(step).cast("f32")


def constant_schedule(value: float) -> Callable[[Any], Any]:
    return lambda step: ops.full_like(_float(step), value)


def linear_schedule(start: float, end: float, steps: int) -> Callable[[Any], Any]:
    """From start to end in a straight line, then end."""
    return lambda step: start + (end - start) * ops.clip(_float(step) / max(1, steps), 0.0, 1.0)


def cosine_schedule(start: float, steps: int, end: float = 0.0) -> Callable[[Any], Any]:
    """From start to end along half a cosine, then end."""
    pi = 3.141592653589793
    return lambda step: (
        end + (start - end) * 0.5 * (1.0 + ops.cos(pi * ops.clip(_float(step) / max(1, steps), 0.0, 1.0)))
    )


def exponential_schedule(start: float, rate: float, every: int = 1) -> Callable[[Any], Any]:
    """start · rate^(step / every)."""
    return lambda step: start * ops.power(ops.full_like(_float(step), rate), _float(step) / every)


def step_schedule(start: float, rate: float, every: int) -> Callable[[Any], Any]:
    """start · rate^⌊step / every⌋."""
    return lambda step: start * ops.power(ops.full_like(_float(step), rate), ops.floor(_float(step) / every))


def warmup(schedule: Callable[[Any], Any], steps: int) -> Callable[[Any], Any]:
    """A schedule after a straight rise from 0 to its first value."""
    first = schedule(asarray(0, "i32"))
    return lambda step: ops.where(
        _float(step) < steps, first * _float(step) / max(1, steps), schedule(ops.maximum(asarray(step) - steps, 0))
    )


def join_schedules(schedules: Sequence[Callable[[Any], Any]], ends: Sequence[int]) -> Callable[[Any], Any]:
    """One schedule after another; `ends` says at which steps the later ones begin, each counting from 0."""
    if len(schedules) != len(ends) + 1:
        raise OptionError(
            f"join_schedules: {len(schedules)} schedules need {len(schedules) - 1} ends, got {len(ends)}",
            code="O283",
            place=here(),
        )

    def joined(step: Any) -> Any:
        rate = schedules[0](step)
        for schedule, start in zip(schedules[1:], ends, strict=True):
            rate = ops.where(_float(step) < start, rate, schedule(ops.maximum(asarray(step) - start, 0)))
        return rate

    return joined
