"""AdamW on models of the zoo, compiled by strata, beside eager from the same start: losses, gradients, buffers.

    python -m tests.torch_models --train [names …] [--steps 100]

Strictly right is what follows eager: losses within 1e-3 of it in every step, gradients of the first step, buffers after
it and in the end. Where small differences grow from step to step, eager does not follow itself in f64 either: a run of
eager in f64 then says how far both have gone from it, and ours may be at most twice as far as eager in f32.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from tests.torch_zoo import MODELS, begin, leaves, wide

NEAR = 1e-3  # of losses in every step, and of buffers in the end
RATE = 1e-4


class Trained(NamedTuple):
    """What came of training: losses, gradients of the first step, buffers after it and in the end."""

    losses: list[float]
    gradients: dict[str, Any]
    first: dict[str, Any]
    buffers: dict[str, Any]


def train_model(name: str, steps: int = 100) -> dict[str, Any]:
    """One model, in this process."""
    import torch

    import strata as st

    begin()
    model, args, kwargs = MODELS[name]()
    model = model.train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    twin, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    ours = _trained(model, torch.compile(model, backend="strata"), args, kwargs, steps)
    eager = _trained(twin, twin, args, kwargs, steps)
    assert ours.gradients.keys() == eager.gradients.keys(), "other parameters have gradients"
    scale = max(g.abs().max().item() for g in eager.gradients.values())
    gradients = max((ours.gradients[n] - g).abs().max().item() for n, g in eager.gradients.items()) / scale
    losses, buffers = _losses_apart(ours, eager), _apart(ours.buffers, eager.buffers)
    first = _apart(ours.first, eager.first)
    found = {"name": name, "losses": losses, "gradients": gradients, "buffers_at_once": first, "buffers": buffers}
    begins_well = gradients < 1e-4 and first < 1e-5
    strict = begins_well and losses < NEAR and buffers < NEAR
    right = strict
    if begins_well and not strict:
        exact = _trained(truth, truth, wide(args), wide(kwargs), steps)
        both = [(_losses_apart(run, exact), _apart(run.buffers, exact.buffers)) for run in (ours, eager)]
        (found["losses_f64"], found["buffers_f64"]), (found["eager_losses_f64"], found["eager_buffers_f64"]) = both
        right = all(mine <= max(2 * theirs, NEAR) for mine, theirs in zip(*both, strict=True))
    return {**found, "stayed": st.torch.report().stayed, "strict": strict, "right": right}


def _trained(module: Any, call: Any, args: Any, kwargs: Any, steps: int) -> Trained:
    import torch

    def buffers() -> dict[str, Any]:
        return {n: b.clone().double() for n, b in module.named_buffers() if b.is_floating_point()}

    optimiser = torch.optim.AdamW(module.parameters(), RATE)
    losses: list[float] = []
    gradients, first = {}, {}
    for step in range(steps):
        torch.manual_seed(step)
        optimiser.zero_grad()
        loss = sum((t.square().mean() for t in leaves(call(*args, **kwargs))), torch.zeros(()))
        loss.backward()
        if not step:
            gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
            first = buffers()
        optimiser.step()
        losses.append(loss.item())
    return Trained(losses, gradients, first, buffers())


def _losses_apart(ours: Trained, theirs: Trained) -> float:
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(ours.losses, theirs.losses, strict=True))


def _apart(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    return max([(ours[n] - b).abs().max().item() / max(b.abs().max().item(), 1) for n, b in theirs.items()] or [0.0])
