"""Recurrent layers on scan: LSTM, GRU and plain RNN, by ONNX's operators and by torch's modules.

Inside, weights follow ONNX: gates are stacked i, o, f, c (LSTM) and z, r, h (GRU), biases of input and state are apart.
The matmuls with the input are taken for all steps at once; only the recurrent half is in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from strata.core import Dim, floordiv, i64
from strata.errors import OptionError, ShapeError
from strata.mir import METHODS, Value, constant, function
from strata.ops.base.creation import iota, zeros
from strata.ops.base.frontend import Operand, as_value, promoted
from strata.ops.base.movement import concat, moveaxis, narrow, reshape, split, stack, swapaxes
from strata.ops.control.looping import scan
from strata.ops.elementwise.activation import hard_sigmoid

Activation = Callable[[Value], Value]
State = tuple[Value, ...]


# ---------------------------------------------------------------------------------------------------------- activations

# what ONNX calls them: the function of (x, alpha, beta), and the default alpha and beta; None where there is none
_ACTIVATIONS: dict[str, tuple[Callable[..., Value], float | None, float | None]] = {
    "relu": (lambda x, alpha, beta: METHODS["relu"](x), None, None),
    "tanh": (lambda x, alpha, beta: METHODS["tanh"](x), None, None),
    "sigmoid": (lambda x, alpha, beta: METHODS["sigmoid"](x), None, None),
    "affine": (lambda x, alpha, beta: x * alpha + beta, 1.0, 0.0),
    "leakyrelu": (lambda x, alpha, beta: METHODS["leaky_relu"](x, alpha), 0.01, None),
    "thresholdedrelu": (lambda x, alpha, beta: METHODS["thresholded_relu"](x, alpha), 1.0, None),
    "scaledtanh": (lambda x, alpha, beta: METHODS["tanh"](x * beta) * alpha, 1.0, 1.0),
    "hardsigmoid": (hard_sigmoid, 0.2, 0.5),
    "elu": (lambda x, alpha, beta: METHODS["elu"](x, alpha), 1.0, None),
    "softsign": (lambda x, alpha, beta: METHODS["softsign"](x), None, None),
    "softplus": (lambda x, alpha, beta: METHODS["softplus"](x), None, None),
}


def _activations(
    names: Sequence[str] | None,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    defaults: Sequence[str],
    directions: int,
    what: str,
) -> list[list[Activation]]:
    """The functions of each direction; alpha and beta are taken in order by the functions that have them."""
    given = list(names) if names else list(defaults) * directions
    if len(given) != len(defaults) * directions:
        raise OptionError(
            f"{what}: {len(given)} activations, {directions} directions need {len(defaults)} each", code="O249"
        )
    alpha, beta = iter(alphas or ()), iter(betas or ())
    made: list[Activation] = []
    for name in given:
        if name.lower() not in _ACTIVATIONS:
            raise OptionError(f"{what}: activation {name!r} is not one of {', '.join(_ACTIVATIONS)}", code="O249")
        apply, a, b = _ACTIVATIONS[name.lower()]
        first = next(alpha, a) if a is not None else 0.0
        second = next(beta, b) if b is not None else 0.0
        made.append(partial(apply, alpha=first, beta=second))
    size = len(defaults)
    return [made[i * size : (i + 1) * size] for i in range(directions)]


# ---------------------------------------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class Weights:
    """One direction of one layer: w[gates · H, I], r[gates · H, H], biases [gates · H] or None."""

    w: Value
    r: Value
    w_bias: Value | None = None
    r_bias: Value | None = None
    peephole: Value | None = None  # [3 · H]: i, o, f
    projection: Value | None = None  # [P, H]


@dataclass(frozen=True)
class Cell:
    """A step's formula and its options. `order` says which part of the weights each gate is, where not in ours."""

    kind: str
    functions: Sequence[Activation]
    order: tuple[int, ...] = ()
    clip: float | None = None
    input_forget: bool = False
    linear_before_reset: bool = False

    @property
    def gates(self) -> int:
        return {"lstm": 4, "gru": 3, "rnn": 1}[self.kind]

    def step(self, x: Value, state: State, weights: Weights) -> State:
        """The next state from the input's share of the gates [B, gates · H]."""
        match self.kind:
            case "lstm":
                return self._lstm(x, state, weights)
            case "gru":
                return self._gru(x, state, weights)
        return (self.functions[0](self._clipped(x + _affine(state[0], weights.r, weights.r_bias))),)

    def _clipped(self, x: Value) -> Value:
        return METHODS["clip"](x, -self.clip, self.clip) if self.clip else x

    def _lstm(self, x: Value, state: State, weights: Weights) -> State:
        f, g, h = self.functions
        hidden, cell = state
        parts = split(x + _affine(hidden, weights.r, weights.r_bias), 4, 1)
        i, o, forget, c = (parts[at] for at in self.order or range(4))
        peephole = None if weights.peephole is None else split(weights.peephole, 3)

        def gate(value: Value, memory: Value, which: int) -> Value:
            return f(self._clipped(value if peephole is None else value + peephole[which] * memory))

        take = gate(i, cell, 0)
        keep = 1.0 - take if self.input_forget else gate(forget, cell, 2)
        new_cell = keep * cell + take * g(self._clipped(c))
        new_hidden = gate(o, new_cell, 1) * h(new_cell)
        if weights.projection is not None:
            new_hidden = _affine(new_hidden, weights.projection, None)
        return new_hidden, new_cell

    def _gru(self, x: Value, state: State, weights: Weights) -> State:
        f, g = self.functions
        (hidden,) = state
        size = hidden.shape[1]
        x_gates, x_new = narrow(x, 1, 0, size * 2), narrow(x, 1, size * 2, size)
        if self.linear_before_reset:
            shares = _affine(hidden, weights.r, weights.r_bias)
            gates, new = narrow(shares, 1, 0, size * 2), narrow(shares, 1, size * 2, size)
        else:
            r_gates, r_new = narrow(weights.r, 0, 0, size * 2), narrow(weights.r, 0, size * 2, size)
            bias_gates = None if weights.r_bias is None else narrow(weights.r_bias, 0, 0, size * 2)
            bias_new = None if weights.r_bias is None else narrow(weights.r_bias, 0, size * 2, size)
            gates = _affine(hidden, r_gates, bias_gates)
        parts = split(self._clipped(x_gates + gates), 2, 1)
        update, reset = (f(parts[at]) for at in self.order[:2] or range(2))
        if self.linear_before_reset:
            candidate = x_new + reset * new
        else:
            candidate = x_new + _affine(reset * hidden, r_new, bias_new)
        return ((1.0 - update) * g(self._clipped(candidate)) + update * hidden,)


def _affine(x: Value, weight: Value, bias: Value | None) -> Value:
    """x · weightᵀ + bias."""
    out = METHODS["matmul"](x, swapaxes(weight, 0, 1))
    return out if bias is None else out + bias


def run_layer(
    cell: Cell, x: Value, state: State, weights: Weights, lengths: Value | None, *, reverse: bool
) -> tuple[Value, State]:
    """x[T, B, I] through one direction: hidden states [T, B, H], zero after each sequence's end, and the last state."""
    shares = _affine(x, weights.w, weights.w_bias)
    if lengths is None:

        def step(carry: State, row: Value) -> tuple[State, Value]:
            new = cell.step(row, carry, weights)
            return new, new[0]

        last, hidden = scan(step, state, shares, reverse=reverse)
        return hidden, last
    steps, batch = x.shape[0], x.shape[1]
    alive = reshape(iota((steps,)), (steps, 1, 1)) < reshape(METHODS["cast"](lengths, i64), (1, batch, 1))

    def masked_step(carry: State, row: tuple[Value, Value]) -> tuple[State, Value]:
        share, here = row
        new = cell.step(share, carry, weights)
        kept = tuple(METHODS["where"](here, a, b) for a, b in zip(new, carry, strict=True))
        return kept, METHODS["where"](here, new[0], constant(0, new[0].dtype))

    last, hidden = scan(masked_step, state, (shares, alive), reverse=reverse)
    return hidden, last


# ----------------------------------------------------------------------------------------------------------------- onnx


def _onnx(
    what: str,
    kind: str,
    x: Operand,
    w: Operand,
    r: Operand,
    b: Operand | None,
    sequence_lens: Operand | None,
    initial: Sequence[Operand | None],
    peephole: Operand | None,
    direction: str,
    layout: int,
    defaults: Sequence[str],
    activations: tuple[Sequence[str] | None, Sequence[float] | None, Sequence[float] | None],
    **options: Any,
) -> tuple[Value, ...]:
    if direction not in ("forward", "reverse", "bidirectional"):
        raise OptionError(f"{what}: direction {direction!r} is not one of forward, reverse, bidirectional", code="O249")
    directions = 2 if direction == "bidirectional" else 1
    value, weight, recurrent = promoted(x, w, r)
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[kind]
    if value.ndim != 3 or weight.ndim != 3 or recurrent.ndim != 3:
        raise ShapeError(
            f"{what}: needs x, w and r of three axes, got {value.type}, {weight.type}, {recurrent.type}", code="S316"
        )
    hidden = recurrent.shape[2]
    wanted = ((directions, hidden * gates, value.shape[2]), (directions, hidden * gates, hidden))
    if (weight.shape, recurrent.shape) != wanted:
        raise ShapeError(
            f"{what}: {value.type} and a hidden size of {hidden} need weights {wanted[0]} and {wanted[1]}, "
            f"got {weight.type} and {recurrent.type}", code="S317",
        )  # fmt: skip
    value = swapaxes(value, 0, 1) if layout else value
    batch = value.shape[1]
    starts = []
    for start in initial:
        if start is None:
            starts.append(zeros((directions, batch, hidden), value.dtype))
        else:
            given = METHODS["cast"](as_value(start), value.dtype)
            starts.append(swapaxes(given, 0, 1) if layout else given)
    lengths = None if sequence_lens is None else as_value(sequence_lens)
    functions = _activations(*activations, defaults, directions, what)
    bias = None if b is None else METHODS["cast"](as_value(b), value.dtype)
    holes = None if peephole is None else METHODS["cast"](as_value(peephole), value.dtype)

    outs, lasts = [], []
    for i in range(directions):
        biases = (None, None) if bias is None else split(_pick(bias, i), 2)
        hole = None if holes is None else _pick(holes, i)
        weights = Weights(_pick(weight, i), _pick(recurrent, i), biases[0], biases[1], hole)
        cell = Cell(kind, functions[i], **options)
        state = tuple(_pick(start, i) for start in starts)
        backwards = direction == "reverse" or i == 1
        out, last = run_layer(cell, value, state, weights, lengths, reverse=backwards)
        outs.append(out)
        lasts.append(last)
    y = stack(outs, 1)
    ends = [stack([last[j] for last in lasts], 0) for j in range(len(initial))]
    if layout:
        return moveaxis(y, 2, 0), *(swapaxes(end, 0, 1) for end in ends)
    return y, *ends


def _pick(x: Value, i: int) -> Value:
    return reshape(narrow(x, 0, i, 1), x.shape[1:])


@function()
def onnx_rnn(
    x: Operand,
    w: Operand,
    r: Operand,
    b: Operand | None = None,
    sequence_lens: Operand | None = None,
    initial_h: Operand | None = None,
    *,
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    layout: int = 0,
) -> tuple[Value, ...]:
    """ONNX's RNN: (Y[T, D, B, H], Y_h[D, B, H]), batch first when layout is 1."""
    names = (activations, activation_alpha, activation_beta)
    return _onnx(
        "onnx_rnn", "rnn", x, w, r, b, sequence_lens, [initial_h], None, direction, layout, ["tanh"], names, clip=clip
    )


@function()
def onnx_gru(
    x: Operand,
    w: Operand,
    r: Operand,
    b: Operand | None = None,
    sequence_lens: Operand | None = None,
    initial_h: Operand | None = None,
    *,
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    layout: int = 0,
    linear_before_reset: bool = False,
) -> tuple[Value, ...]:
    """ONNX's GRU: (Y[T, D, B, H], Y_h[D, B, H]), batch first when layout is 1."""
    names = (activations, activation_alpha, activation_beta)
    return _onnx(
        "onnx_gru", "gru", x, w, r, b, sequence_lens, [initial_h], None, direction, layout, ["sigmoid", "tanh"], names,
        clip=clip, linear_before_reset=bool(linear_before_reset),
    )  # fmt: skip


@function()
def onnx_lstm(
    x: Operand,
    w: Operand,
    r: Operand,
    b: Operand | None = None,
    sequence_lens: Operand | None = None,
    initial_h: Operand | None = None,
    initial_c: Operand | None = None,
    p: Operand | None = None,
    *,
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    input_forget: bool = False,
    layout: int = 0,
) -> tuple[Value, ...]:
    """ONNX's LSTM: (Y[T, D, B, H], Y_h[D, B, H], Y_c[D, B, H]), batch first when layout is 1."""
    names = (activations, activation_alpha, activation_beta)
    return _onnx(
        "onnx_lstm", "lstm", x, w, r, b, sequence_lens, [initial_h, initial_c], p, direction, layout,
        ["sigmoid", "tanh", "tanh"], names, clip=clip, input_forget=bool(input_forget),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- torch

_TORCH_ORDER = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}  # our i, o, f, c and z, r, n in torch's i, f, g, o and r, z, n


def _torch(
    what: str,
    cell: Cell,
    x: Operand,
    states: Sequence[Operand | None],
    params: Sequence[Operand],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    lengths: Operand | None,
    proj_size: int = 0,
) -> tuple[Value, State]:
    value, *values = promoted(x, *params)
    directions = 2 if bidirectional else 1
    each = 2 + 2 * has_biases + (proj_size > 0)
    if len(values) != each * directions * num_layers:
        raise OptionError(
            f"{what}: {num_layers} layers of {directions} directions take {each * directions * num_layers} parameters, "
            f"got {len(values)}", code="O249",
        )  # fmt: skip
    single = value.ndim == 2
    if value.ndim not in (2, 3):
        raise ShapeError(f"{what}: needs [T, B, I] or [T, I], got {value.type}", code="S316")
    if single:
        value = reshape(value, (value.shape[0], 1, value.shape[1]))
    elif batch_first:
        value = swapaxes(value, 0, 1)
    hidden = floordiv(values[0].shape[0], cell.gates)
    sizes: list[Dim] = [proj_size or hidden, hidden][: len(states)]
    starts = []
    for state, size in zip(states, sizes, strict=True):
        if state is None:
            starts.append(zeros((directions * num_layers, value.shape[1], size), value.dtype))
        else:
            given = METHODS["cast"](as_value(state), value.dtype)
            starts.append(reshape(given, (given.shape[0], 1, given.shape[1])) if single else given)
    ends: list[State] = []
    alive = None if lengths is None else as_value(lengths)
    for layer in range(num_layers):
        outs = []
        for side in range(directions):
            at = layer * directions + side
            group = values[at * each : (at + 1) * each]
            biases = group[2:4] if has_biases else [None, None]
            projection = group[-1] if proj_size else None
            weights = Weights(group[0], group[1], biases[0], biases[1], projection=projection)
            held = tuple(_pick(start, at) for start in starts)
            out, last = run_layer(cell, value, held, weights, alive, reverse=side == 1)
            outs.append(out)
            ends.append(last)
        value = outs[0] if directions == 1 else concat(outs, 2)
    finals = tuple(stack([end[j] for end in ends], 0) for j in range(len(states)))
    if single:
        return reshape(value, (value.shape[0], value.shape[2])), tuple(
            reshape(f, (f.shape[0], f.shape[2])) for f in finals
        )
    return (swapaxes(value, 0, 1) if batch_first else value), finals


def _named(*names: str) -> list[Activation]:
    return _activations(names, None, None, names, 1, "rnn")[0]


@function()
def lstm(
    x: Operand,
    state: tuple[Operand | None, Operand | None] | None,
    params: Sequence[Operand],
    *,
    bias: bool = True,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    proj_size: int = 0,
    lengths: Operand | None = None,
) -> tuple[Value, tuple[Value, Value]]:
    """torch's LSTM: (output, (h, c)) of x[T, B, I] and the parameters in the order of the module's `_flat_weights`.

    `lengths` gives each sequence its own end, as a packed sequence does.
    """
    cell = Cell("lstm", _named("sigmoid", "tanh", "tanh"), _TORCH_ORDER["lstm"])
    states = (None, None) if state is None else state
    out, last = _torch(
        "lstm", cell, x, states, params, bias, num_layers, bidirectional, batch_first, lengths, proj_size
    )
    return out, (last[0], last[1])


@function()
def gru(
    x: Operand,
    state: Operand | None,
    params: Sequence[Operand],
    *,
    bias: bool = True,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: Operand | None = None,
) -> tuple[Value, Value]:
    """torch's GRU: (output, h); parameters and `lengths` as in lstm."""
    cell = Cell("gru", _named("sigmoid", "tanh"), _TORCH_ORDER["gru"], linear_before_reset=True)
    out, last = _torch("gru", cell, x, [state], params, bias, num_layers, bidirectional, batch_first, lengths)
    return out, last[0]


@function()
def rnn(
    x: Operand,
    state: Operand | None,
    params: Sequence[Operand],
    *,
    nonlinearity: str = "tanh",
    bias: bool = True,
    num_layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: Operand | None = None,
) -> tuple[Value, Value]:
    """torch's RNN: (output, h); parameters and `lengths` as in lstm."""
    cell = Cell("rnn", _named(nonlinearity))
    out, last = _torch("rnn", cell, x, [state], params, bias, num_layers, bidirectional, batch_first, lengths)
    return out, last[0]
