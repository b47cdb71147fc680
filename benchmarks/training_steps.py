"""Training steps as workloads: forward, backward and AdamW of the models of benchmarks/training.py, ours and peers'.

Everyone starts from the same weights and sees the same batch again and again; the first loss is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.registry import Case, Run, workload

NAMES = {
    "mlp": "training step: MLP 784-512-512-10, batch 128, AdamW",
    "conv": "training step: conv net 28x28, batch 64, AdamW",
    "transformer": "training step: 4-layer d256 transformer 8x128, AdamW",
}


def _both(name: str) -> Any:
    """The case of benchmarks/training.py, both models with the same weights."""
    import torch

    from benchmarks import training

    torch.manual_seed(0)
    case = {"mlp": training.mlp, "conv": training.conv, "transformer": training.transformer}[name]()
    for key, p in case.theirs.named_parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.05)
        else:
            torch.nn.init.constant_(p, float("norm" in key and key.endswith("weight")))
    case.ours.load_state_dict({k: v.detach().numpy().copy() for k, v in case.theirs.state_dict().items()})
    return case


def _strata(name: str, _: int) -> Run:
    from benchmarks.training import our_step

    case = _both(name)
    x, y = case.batch(np.random.default_rng(0))
    state, step = our_step(case)
    held = [state]

    def run() -> Any:
        held[0], loss = step(held[0], x, y)
        return np.asarray(loss.item())

    return run


def _torch(name: str, compiled: bool, _: int) -> Run:
    from benchmarks.training import their_step

    case = _both(name)
    x, y = case.batch(np.random.default_rng(0))
    step = their_step(case, compiled)
    return lambda: np.asarray(step(x, y))


def _jax(name: str, _: int) -> Run:
    import jax
    import jax.numpy as jnp

    case = _both(name)
    x, y = case.batch(np.random.default_rng(0))
    params = {n: jnp.asarray(p.detach().numpy()) for n, p in case.theirs.named_parameters()}
    forward: Callable[..., Any] = {"mlp": _jax_mlp, "conv": _jax_conv}[name]
    rate, decay, b1, b2, tiny = case.lr, 0.01, 0.9, 0.999, 1e-8

    def loss(p: Any) -> Any:
        scores = jax.nn.log_softmax(forward(p, x))
        return -jnp.take_along_axis(scores, y[:, None], 1).mean()

    def step(p: Any, first: Any, second: Any, t: Any) -> Any:
        value, g = jax.value_and_grad(loss)(p)
        first = jax.tree.map(lambda m, d: b1 * m + (1 - b1) * d, first, g)
        second = jax.tree.map(lambda v, d: b2 * v + (1 - b2) * d * d, second, g)
        fix1, fix2 = 1 - b1**t, 1 - b2**t
        p = jax.tree.map(
            lambda w, m, v: w * (1 - rate * decay) - rate * (m / fix1) / (jnp.sqrt(v / fix2) + tiny), p, first, second
        )
        return p, first, second, t + 1, value

    zeros = jax.tree.map(jnp.zeros_like, params)
    state: list[Any] = [params, zeros, jax.tree.map(jnp.zeros_like, params), jnp.float32(1)]
    compiled = jax.jit(step, donate_argnums=(0, 1, 2))

    def run() -> Any:
        *state[:], value = compiled(*state)
        return np.asarray(value)

    return run


def _jax_mlp(p: Any, x: Any) -> Any:
    import jax

    for i in (0, 2):
        x = jax.nn.relu(x @ p[f"{i}.weight"].T + p[f"{i}.bias"])
    return x @ p["4.weight"].T + p["4.bias"]


def _jax_conv(p: Any, x: Any) -> Any:
    import jax
    import jax.numpy as jnp

    for i in (0, 3):
        x = jax.lax.conv_general_dilated(
            x, p[f"{i}.weight"], (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        x = jax.nn.relu(x + p[f"{i}.bias"][:, None, None])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return x.reshape(len(x), -1) @ p["7.weight"].T + p["7.bias"]


def _case(name: str) -> Case:
    own = {
        "strata": partial(_strata, name),
        "torch": partial(_torch, name, False),
        "torch.compile": partial(_torch, name, True),
    }
    if name != "transformer":
        own["jax"] = partial(_jax, name)
    return Case({}, own=own)


if find_spec("torch"):  # which also makes the first weights
    for _name, _title in NAMES.items():
        # torch.compile takes a minute for the transformer: the full suite has it
        workload(_title, "training steps", compilers=_name != "transformer")(partial(_case, _name))
