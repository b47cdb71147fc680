"""Blocks of state-space models: short convolutions and scans whose state is carried from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from strata.errors import FileError
from strata.mir import Value
from strata.models.blocks.activations import activated
from strata.models.cached import CachedGraph
from strata.models.weights import ops

ENDLESS = 1 << 20  # tokens: nothing in the model ends


def step_limits(found: Mapping[str, Any]) -> tuple[float, float]:
    """The limits of Mamba-2's time steps; JSON has no infinity, and says it in words."""
    given = found.get("time_step_limit") or (0.0, math.inf)
    if isinstance(given, (list, tuple)):
        words = [x.get("__float__") if isinstance(x, dict) else x for x in given]
        numbers = [math.inf if x == "Infinity" else x for x in words]
        limits = tuple(float(x) for x in numbers if isinstance(x, (int, float)))
        if len(limits) == len(given) == 2 and 0 <= limits[0] <= limits[1]:
            return limits[0], limits[1]
    raise FileError(f"the configuration has time_step_limit = {given!r:.60}, two numbers are needed", code="F140")


class RecurrentGraph(CachedGraph):
    """A decoder under construction some of whose layers carry a state of constant size: prefill is a scan over the
    tokens, decode is one step of it."""

    def short_conv(self, x: Value, name: str, slot: str, kernel: int) -> Value:
        """Each feature of x [B, S, C] convolved with the last `kernel` tokens; the tokens before are carried."""
        width = int(x.shape[-1])
        taps = self.param(f"{name}.weight", (width, 1, kernel))
        self.check()  # a term is made for each tap: they must be there
        rows = ops.concat([self.carried[slot], x], 1)
        self.carry(slot, ops.narrow(rows, 1, self.count, kernel - 1))
        parts = [
            ops.narrow(rows, 1, i, self.count) * ops.reshape(ops.narrow(taps, 2, i, 1), (1, 1, width))
            for i in range(kernel)
        ]
        found: Value = sum(parts[1:], parts[0])
        return found + self.param(f"{name}.bias", (width,)) if self.has(f"{name}.bias") else found

    def before(self, x: Value, slot: str) -> Value:
        """The token before each of x [B, S, C]; the last one is carried."""
        rows = ops.concat([self.carried[slot], x], 1)
        self.carry(slot, ops.narrow(rows, 1, self.count, 1))
        found: Value = ops.narrow(rows, 1, 0, self.count)
        return found

    def selective_scan(self, x: Value, delta: Value, a: Value, b: Value, c: Value, slot: str) -> Value:
        """Mamba's scan: x and delta [B, S, C], a [C, N], b and c [B, S, N]; the state is [B, C, N]."""

        def step(state: Value, row: tuple[Value, ...]) -> tuple[Value, Value]:
            xt, dt, bt, ct = row
            decay = ops.exp(ops.insert_axis(dt, -1) * a)
            state = decay * state + ops.insert_axis(dt * xt, -1) * ops.insert_axis(bt, 1)
            return state, ops.sum(state * ops.insert_axis(ct, 1), -1)

        return self._scanned(step, slot, (x, delta, b, c))

    def head_scan(self, x: Value, delta: Value, a: Value, b: Value, c: Value, slot: str) -> Value:
        """Mamba-2's scan: x [B, S, H, P], delta [B, S, H], a [H], b and c [B, S, H, N]; the state is [B, H, P, N]."""

        def step(state: Value, row: tuple[Value, ...]) -> tuple[Value, Value]:
            xt, dt, bt, ct = row
            decay = ops.insert_axis(ops.insert_axis(ops.exp(dt * a), -1), -1)
            moved = ops.insert_axis(xt * ops.insert_axis(dt, -1), -1) * ops.insert_axis(bt, 2)
            state = decay * state + moved
            return state, ops.sum(state * ops.insert_axis(ct, 2), -1)

        return self._scanned(step, slot, (x, delta, b, c))

    def vector_scan(self, r: Value, decay: Value, k: Value, v: Value, a: Value, b: Value, slot: str) -> Value:
        """RWKV-7's scan: v [B, S, H, m], all others [B, S, H, n]; the state [B, H, n, m] becomes
        decay · state + b (a · state) + k v."""

        def step(state: Value, row: tuple[Value, ...]) -> tuple[Value, Value]:
            rt, wt, kt, vt, at, bt = (ops.insert_axis(x, 2 if i == 3 else -1) for i, x in enumerate(row))
            moved = ops.sum(state * at, 2, keepdims=True)
            state = wt * state + bt * moved + kt * vt
            return state, ops.sum(state * rt, 2)

        return self._scanned(step, slot, (r, decay, k, v, a, b))

    def channels_mixed(
        self, x: Value, at: str, layer: int, inner: int, state: int, rank: int, kernel: int, activation: str,
        normal: Callable[[Value, str], Value] | None = None,
    ) -> Value:  # fmt: skip
        """The mixer of the first Mamba; `normal` is what time steps, inputs and outputs of the state go through."""
        hidden = int(x.shape[-1])
        both = self.linear(x, f"{at}in_proj", 2 * inner, hidden)
        x, gate = (ops.narrow(both, -1, i * inner, inner) for i in range(2))
        x = activated(self.short_conv(x, f"{at}conv1d", f"conv{layer}", kernel), activation)
        sizes = (rank, state, state)
        packed = self.linear(x, f"{at}x_proj", sum(sizes), inner)
        parts = [ops.narrow(packed, -1, sum(sizes[:i]), n) for i, n in enumerate(sizes)]
        if normal is not None:
            parts = [normal(part, f"{at}{name}_layernorm") for part, name in zip(parts, ("dt", "b", "c"), strict=True)]
        delta = ops.softplus(self.linear(parts[0], f"{at}dt_proj", inner, rank))
        rates = -ops.exp(self.param(f"{at}A_log", (inner, state)))
        y = self.selective_scan(x, delta, rates, parts[1], parts[2], f"state{layer}")
        y = (y + x * self.param(f"{at}D", (inner,))) * ops.silu(gate)  # whatever the activation is
        return self.linear(y, f"{at}out_proj", hidden, inner)

    def heads_mixed(
        self, x: Value, at: str, layer: int, heads: int, size: int, state: int, groups: int, kernel: int,
        limits: tuple[float, float], activation: str,
    ) -> tuple[Value, Value]:  # fmt: skip
        """The mixer of Mamba-2 up to its norm: what heads give, and the gate, both [B, S, heads · size]."""
        inner, hidden = heads * size, int(x.shape[-1])
        sizes = (inner, inner + 2 * groups * state, heads)
        packed = self.linear(x, f"{at}in_proj", sum(sizes), hidden)
        gate, mixed, step = (ops.narrow(packed, -1, sum(sizes[:i]), n) for i, n in enumerate(sizes))
        mixed = activated(self.short_conv(mixed, f"{at}conv1d", f"conv{layer}", kernel), activation)
        rows = (self.batch, self.count)
        values = ops.reshape(ops.narrow(mixed, -1, 0, inner), (*rows, heads, size))
        keys = []
        for i in range(2):
            own = ops.reshape(ops.narrow(mixed, -1, inner + i * groups * state, groups * state),
                              (*rows, groups, 1, state))  # fmt: skip
            wide = ops.broadcast_to(own, (*rows, groups, heads // groups, state))
            keys.append(ops.reshape(wide, (*rows, heads, state)))
        delta = ops.softplus(step + self.param(f"{at}dt_bias", (heads,)))
        if limits != (0.0, math.inf):
            delta = ops.clip(delta, *limits)
        rates = -ops.exp(self.param(f"{at}A_log", (heads,)))
        found = self.head_scan(values, delta, rates, keys[0], keys[1], f"state{layer}")
        found = found + values * ops.reshape(self.param(f"{at}D", (heads,)), (heads, 1))
        return ops.reshape(found, (*rows, inner)), gate

    def gated_norm(self, x: Value, gate: Value, name: str, groups: int, eps: float) -> Value:
        """The norm behind the mixer of Mamba-2: of each group of heads, after its gate."""
        batch, count, width = x.shape[0], x.shape[1], int(x.shape[-1])
        parts = ops.reshape(x * gate, (batch, count, groups, width // groups))
        whole = ops.reshape(ops.rms_norm(parts, eps=eps), (batch, count, width))
        found: Value = whole * self.param(f"{name}.weight", (width,))
        return found

    def delta_scan(self, q: Value, k: Value, v: Value, g: Value, beta: Value, slot: str) -> Value:
        """The gated delta rule: q and k [B, S, H, n], v [B, S, H, m], g and beta [B, S, H]; a state is [B, H, n, m]."""
        found: Value
        found, last = ops.gated_delta_net(q, k, v, g, beta, self.carried[slot])
        self.carry(slot, last)
        return found

    def _scanned(self, step: object, slot: str, rows: tuple[Value, ...]) -> Value:
        last, found = ops.scan(step, self.carried[slot], tuple(ops.moveaxis(row, 1, 0) for row in rows))
        self.carry(slot, last)
        return ops.moveaxis(found, 0, 1)
