"""Rotary position embeddings: rotations of feature pairs by tables of angles, and the tables' scaling rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Dim, DType, TensorType, as_dtype, divide_exactly, f16, f32, f64, floordiv, i32, known_le
from strata.errors import OptionError, ShapeError
from strata.mir import Op, Sample, UnaryOp, Value, constant, function, op
from strata.ops.base.creation import iota
from strata.ops.base.frontend import Operand, as_value, same_shape
from strata.ops.base.movement import broadcast_to, concat, insert_axis, narrow, reshape, stack
from strata.ops.elementwise.logic import cast
from strata.ops.indexing.indexing import take
from strata.ops.nn.attention import LAYOUTS

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


class Rotary(Op):
    """What the rotation and its backward share.

    x is [S, h·D], [B, S, h·D], [B, S, h, D] or [B, h, S, D]; the tables are [≥S, columns] or [B, ≥S, columns], where
    row s belongs to token s. A table has D/2 columns, of which the first n_rot/2 are used, or exactly n_rot/2. Features
    from n_rot on are copied. Pairs are (i, i + n_rot/2), or (2i, 2i + 1) when interleaved.
    """

    head_dim: int
    n_rot: int
    interleaved: bool = False
    layout: str = "bsd"

    def check(self, x: TensorType, cos: TensorType, sin: TensorType) -> None:
        self.require(
            self.layout in LAYOUTS,
            f"layout {self.layout!r} is not one of {', '.join(LAYOUTS)}",
            code="O220",
            error=OptionError,
        )
        even = 0 < self.n_rot <= self.head_dim and self.n_rot % 2 == 0
        self.require(
            even,
            f"n_rot {self.n_rot} is not an even number up to head_dim {self.head_dim}",
            code="O229",
            error=OptionError,
        )
        rank = LAYOUTS[self.layout]
        self.require(x.ndim == rank, f"layout {self.layout} needs rank {rank}, got {x}", code="S260")
        wide = x.shape[-1]
        fits = wide == self.head_dim if rank == 4 else divide_exactly(wide, self.head_dim) is not None
        self.require(fits, f"the last axis of {x} does not hold heads of size {self.head_dim}", code="S262")
        self.require_dtype(x.dtype.is_float, f"needs floats, got {x}", code="D104")
        for t in (cos, sin):
            ok = t.dtype in (x.dtype, x.dtype.accumulator)
            self.require_dtype(ok, f"the table {t} is neither {x.dtype} nor {x.dtype.accumulator}", code="D103")
        self.require(cos == sin, f"the tables differ, {cos} and {sin}", code="S267")
        columns = (self.head_dim // 2, self.n_rot // 2)
        ranks = cos.ndim == 2 or (cos.ndim == 3 and rank > 2 and same_shape(cos.shape[:1], x.shape[:1]))
        self.require(
            ranks and cos.shape[-1] in columns, f"{cos} is not a table for {x} with {columns[0]} columns", code="S267"
        )
        length = self.length(x)
        short = known_le(cos.shape[-2] + 1, length)
        self.require(not short, f"the table {cos} has {cos.shape[-2]} rows for {length} tokens", code="S268")

    def length(self, x: TensorType) -> Dim:
        return x.shape[{"sd": 0, "bsd": 1, "bshd": 1, "bhsd": 2}[self.layout]]

    def infer(self, x: TensorType, cos: TensorType, sin: TensorType) -> TensorType:
        self.check(x, cos, sin)
        return x

    def rotate(self, x: Value, cos: Value, sin: Value) -> Value:
        """x turned by the angles of the tables, computed in the accumulator's dtype."""
        wide = x.dtype.accumulator
        half = self.n_rot // 2
        c, s = (self._spread(t, x) for t in (cos, sin))
        y = cast(x, wide)
        if LAYOUTS[self.layout] < 4:
            y = reshape(y, (*x.shape[:-1], floordiv(x.shape[-1], self.head_dim), self.head_dim))
        turned = narrow(y, -1, 0, self.n_rot)
        if self.interleaved:
            pairs = reshape(turned, (*turned.shape[:-1], half, 2))
            first, second = (reshape(narrow(pairs, -1, i, 1), pairs.shape[:-1]) for i in (0, 1))
            rotated = reshape(stack([first * c - second * s, second * c + first * s], -1), turned.shape)
        else:
            first, second = narrow(turned, -1, 0, half), narrow(turned, -1, half, half)
            rotated = concat([first * c - second * s, second * c + first * s], -1)
        if self.n_rot < self.head_dim:
            rotated = concat([rotated, narrow(y, -1, self.n_rot, self.head_dim - self.n_rot)], -1)
        return cast(reshape(rotated, x.shape), x.dtype)

    def _spread(self, table: Value, x: Value) -> Value:
        """The rows and columns in use, with a head axis: [(B,) S, 1, n_rot/2] or [(B,) 1, S, n_rot/2]."""
        used = narrow(narrow(cast(table, x.dtype.accumulator), -1, 0, self.n_rot // 2), -2, 0, self.length(x.type))
        return insert_axis(used, -3 if self.layout == "bhsd" else -2)

    def numpy_rotate(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, direction: int) -> np.ndarray:
        """The rotation as a product of complex numbers."""
        heads = x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim) if LAYOUTS[self.layout] < 4 else x
        half = self.n_rot // 2
        axis = -3 if self.layout == "bhsd" else -2
        length = self.length(TensorType(as_dtype(x.dtype), x.shape))
        turn = np.expand_dims((cos + 1j * direction * sin)[..., :length, :half], axis)
        low, high = (
            (slice(0, self.n_rot, 2), slice(1, self.n_rot, 2))
            if self.interleaved
            else (slice(half), slice(half, self.n_rot))
        )
        z = (heads[..., low] + 1j * heads[..., high]) * turn
        out = heads.copy()
        out[..., low], out[..., high] = z.real, z.imag
        return out.reshape(x.shape)

    def batched_inputs(self, inputs: tuple[Value, ...], batched: tuple[bool, ...], size: Dim) -> list[Value]:
        """x and the tables with the vmap axis folded into the batch axis; shared tables stay as they are."""
        x, *tables = inputs
        if not batched[0]:
            x = broadcast_to(x, (size, *x.shape))
        if self.layout != "sd":
            batch = x.shape[1]
            x = reshape(x, (size * batch, *x.shape[2:]))
        if not any(batched[1:]) and tables[0].ndim == 2:
            return [x, *tables]
        full = [t if b else broadcast_to(t, (size, *t.shape)) for t, b in zip(tables, batched[1:], strict=True)]
        if self.layout != "sd":
            full = [t if t.ndim == 4 else broadcast_to(insert_axis(t, 1), (size, batch, *t.shape[1:])) for t in full]
            full = [reshape(t, (size * batch, *t.shape[2:])) for t in full]
        return [x, *full]

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        folded = type(self)(self.head_dim, self.n_rot, self.interleaved, "bsd" if self.layout == "sd" else self.layout)
        out = folded(*self.batched_inputs(inputs, batched, size))
        plain = inputs[0].shape[1:] if batched[0] else inputs[0].shape
        return reshape(out, (size, *plain))

    def lower_rotation(self, k: KernelBuilder, index: tuple[Expr, ...], direction: int, *inputs: View) -> Expr:
        x, cos, sin = inputs
        half, wide = self.n_rot // 2, x.dtype.accumulator
        token = index[{"sd": 0, "bsd": 1, "bshd": 1, "bhsd": 2}[self.layout]]
        feature = k.mod(index[-1], k.index(self.head_dim))
        if self.interleaved:
            is_low = k.eq(k.mod(feature, k.index(2)), k.index(0))
            column, step = k.floordiv(feature, k.index(2)), 1
        else:
            is_low = k.lt(feature, k.index(half))
            column, step = k.select(is_low, feature, feature - k.index(half)), half
        partner = (*index[:-1], index[-1] + k.select(is_low, k.index(step), k.index(-step)))
        row = (token, column) if len(cos.shape) == 2 else (index[0], token, column)

        def turned() -> Expr:
            s = k.cast(sin[row], wide)
            signed = k.select(is_low, -s, s) if direction > 0 else k.select(is_low, s, -s)
            return k.cast(x[index], wide) * k.cast(cos[row], wide) + k.cast(x[partner], wide) * signed

        inside = k.lt(feature, k.index(self.n_rot))
        value = turned() if self.n_rot == self.head_dim else k.guard(inside, turned, k.cast(x[index], wide))
        return k.cast(value, x.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[2, 3, 8], f32[3, 2], f32[3, 2], head_dim=4, n_rot=4),
            Sample(f32[3, 8], f32[5, 2], f32[5, 2], head_dim=4, n_rot=2, layout="sd"),
            Sample(f32[2, 3, 2, 6], f32[2, 3, 3], f32[2, 3, 3], head_dim=6, n_rot=4, interleaved=True, layout="bshd"),
            Sample(f32[2, 2, 3, 6], f32[4, 2], f32[4, 2], head_dim=6, n_rot=4, layout="bhsd"),
            Sample(f32[1, 0, 4], f32[2, 2], f32[2, 2], head_dim=4, n_rot=4),
            Sample(f32[1, 2], f32[1, 1], f32[1, 1], head_dim=2, n_rot=2, layout="sd"),
            Sample(f16[2, 2, 4], f32[2, 2], f32[2, 2], head_dim=4, n_rot=4, grad=False),
        ]  # fmt: skip


@op("rope")
class Rope(Rotary):
    """Feature pairs rotated by the angles of their token."""

    def numpy(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        return self.numpy_rotate(x, cos, sin, 1)

    def decompose(self, x: Value, cos: Value, sin: Value) -> Value:
        return self.rotate(x, cos, sin)

    def jvp(self, x: Value, cos: Value, sin: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Any:
        if dx[0] is not None and dx[1] is None and dx[2] is None:
            return self(dx[0], cos, sin)
        return super().jvp(x, cos, sin, out=out, dx=dx)

    def vjp(self, x: Value, cos: Value, sin: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        _, to_cos, to_sin = super().vjp(x, cos, sin, out=out, ct=ct)
        return RopeBackward(**self.static_fields())(ct, cos, sin), to_cos, to_sin

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return self.lower_rotation(k, index, 1, *inputs)


@op("rope_backward")
class RopeBackward(Rotary):
    """The rotation by the negative angles: its transpose, and its inverse."""

    def numpy(self, dy: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        return self.numpy_rotate(dy, cos, sin, -1)

    def decompose(self, dy: Value, cos: Value, sin: Value) -> Value:
        return self.rotate(dy, cos, -sin)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return self.lower_rotation(k, index, -1, *inputs)


@op("axial_rope2d")
class AxialRope2d(UnaryOp):
    """Rotary embedding of a grid: the first half of each head rotates by the column, the second half by the row.

    x is [B, S, H·D] with S = end_x · end_y · repeat_factor; token t stands at grid position t // repeat_factor.
    """

    end_x: int
    end_y: int
    head_dim: int
    num_heads: int
    theta: float = 10000.0
    repeat_factor: int = 1

    def infer(self, x: TensorType) -> TensorType:
        self.require(
            self.head_dim % 4 == 0, f"head_dim {self.head_dim} is not a multiple of 4", code="O230", error=OptionError
        )
        self.require_dtype(x.dtype.is_float, f"needs floats, got {x}", code="D104")
        tokens = self.end_x * self.end_y * self.repeat_factor
        wanted = x.with_shape((x.shape[0] if x.ndim == 3 else 1, tokens, self.num_heads * self.head_dim))
        self.require(x.ndim == 3 and same_shape(x.shape, wanted.shape), f"x is {x}, expected {wanted}", code="S269")
        return x

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin [S, D/2] in f64, a column a pair."""
        position = np.arange(self.end_x * self.end_y * self.repeat_factor) // self.repeat_factor
        rates = float(self.theta) ** (-4 * np.arange(self.head_dim // 4) / self.head_dim)
        angles = np.concatenate([np.outer(position % self.end_x, rates), np.outer(position // self.end_x, rates)], 1)
        return np.cos(angles), np.sin(angles)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        quarter = self.head_dim // 4
        for t in range(x.shape[1]):
            column, row = t // self.repeat_factor % self.end_x, t // self.repeat_factor // self.end_x
            for pair in range(self.num_heads * self.head_dim // 2):
                c = pair % (self.head_dim // 2)
                angle = (column if c < quarter else row) * self.theta ** (-4 * (c % quarter) / self.head_dim)
                a, b = x[:, t, 2 * pair], x[:, t, 2 * pair + 1]
                out[:, t, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
                out[:, t, 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def decompose(self, x: Value) -> Value:
        cos, sin = (constant(t, x.dtype.accumulator) for t in self.tables())
        return Rope(self.head_dim, self.head_dim, True, "bsd")(x, cos, sin)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[2, 6, 8], end_x=3, end_y=2, head_dim=4, num_heads=2),
            Sample(f32[3, 8, 8], end_x=2, end_y=2, head_dim=8, num_heads=1, theta=100.0, repeat_factor=2),
            Sample(f64[0, 1, 4], end_x=1, end_y=1, head_dim=4, num_heads=1),
        ]  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are stretched for contexts longer than a model was trained on.

    kind: linear, ntk, dynamic, llama3 or yarn. `original_length` is the trained context (dynamic, llama3, yarn).
    """

    kind: str
    factor: float = 1.0
    original_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True  # of yarn: the pairs that are blended begin and end at whole numbers

    def frequencies(self, n_rot: int, theta: float, length: int) -> tuple[np.ndarray, float]:
        """Angles per position of each pair, and the factor that tables are multiplied by."""
        match self.kind:
            case "linear":
                return rope_frequencies(n_rot, theta) / self.factor, 1.0
            case "ntk":
                return rope_frequencies(n_rot, theta * self.factor ** (n_rot / (n_rot - 2))), 1.0
            case "dynamic":
                stretch = self.factor * max(length, self.original_length) / self.original_length - (self.factor - 1)
                return rope_frequencies(n_rot, theta * stretch ** (n_rot / (n_rot - 2))), 1.0
            case "llama3":
                return self._llama3(rope_frequencies(n_rot, theta)), 1.0
            case "yarn":
                factor = self.attention_factor
                if factor is None:
                    factor = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
                return self._yarn(n_rot, theta), factor
        raise OptionError(f"rope_tables: {self.kind!r} is not one of linear, ntk, dynamic, llama3, yarn", code="O231")

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        turns = self.original_length * plain / (2 * np.pi)  # full turns within the trained context
        blend = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return (1 - blend) * plain / self.factor + blend * plain

    def _yarn(self, n_rot: int, theta: float) -> np.ndarray:
        def pair_with(turns: float) -> float:
            return n_rot * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, n_rot - 1)
        ramp = np.clip((np.arange(n_rot // 2) - low) / max(high - low, 0.001), 0, 1)
        plain = rope_frequencies(n_rot, theta)
        return plain * (1 - ramp) + plain / self.factor * ramp


def rope_frequencies(n_rot: int, theta: float = 10000.0) -> np.ndarray:
    """theta ** (-2i / n_rot) for each pair, in f64."""
    if n_rot < 2 or n_rot % 2:
        raise OptionError(f"rope_tables: n_rot {n_rot} is not a positive even number", code="O229")
    return float(theta) ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)


def rope_tables(
    length: int, head_dim: int, *, n_rot: int | None = None, theta: float = 10000.0, scaling: RopeScaling | None = None,
    offset: int = 0, dtype: DType | str = f32,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """cos and sin [length, head_dim/2] for positions offset.. as arrays; columns beyond n_rot/2 hold 1 and 0."""
    turning = head_dim if n_rot is None else n_rot
    rates, factor = (
        (rope_frequencies(turning, theta), 1.0) if scaling is None else scaling.frequencies(turning, theta, length)
    )
    angles = np.outer(np.arange(offset, offset + length), rates)
    idle = head_dim // 2 - turning // 2
    cos = np.pad(np.cos(angles) * factor, ((0, 0), (0, idle)), constant_values=1.0)
    sin = np.pad(np.sin(angles) * factor, ((0, 0), (0, idle)))
    return cos.astype(as_dtype(dtype).np), sin.astype(as_dtype(dtype).np)


# ------------------------------------------------------------------------------------------------------------ functions


def _arguments(
    x: Operand, cos: Operand, sin: Operand, head_dim: int | None, n_rot: int | None, layout: str | None,
    positions: Any, offset: Any, what: str,
) -> tuple[Value, Value, Value, int, int, str]:  # fmt: skip
    value = as_value(x)
    layout = layout or {2: "sd", 3: "bsd"}.get(value.ndim)
    if layout not in LAYOUTS or value.ndim != LAYOUTS[layout]:
        raise OptionError(
            f"{what}: {value.type} needs a layout of its rank, got {layout!r}",
            code="O220",
            fix='layout="bshd" or layout="bhsd"',
        )
    tables = [cast(as_value(t), value.dtype.accumulator) for t in (cos, sin)]
    if head_dim is None:
        head_dim = (value.shape[-1] if value.ndim == 4 else tables[0].shape[-1] * 2).__index__()
    length = value.shape[{"sd": 0, "bsd": 1, "bshd": 1, "bhsd": 2}[layout]]
    if positions is not None and offset is not None:
        raise OptionError(f"{what}: takes positions or an offset, not both", code="O232")
    if isinstance(offset, (int, np.integer)):
        if known_le(tables[0].shape[-2] + 1, length + int(offset)):
            raise ShapeError(f"{what}: the table {tables[0].type} has no row {length + int(offset) - 1}", code="S268")
        tables = [narrow(t, -2, int(offset), length) for t in tables]
    elif offset is not None:
        start = as_value(offset)
        ramp = iota((length,), 0, start.dtype)
        positions = ramp + (start if start.ndim == 0 else insert_axis(start, -1))
    if positions is not None:
        ids = as_value(positions)
        ids = ids if ids.dtype.is_int else cast(ids, i32)
        tables = [take(t, ids, axis=0) for t in tables]
    return value, tables[0], tables[1], head_dim, head_dim if n_rot is None else n_rot, layout


@function()
def rope(
    x: Operand, cos: Operand, sin: Operand, *, head_dim: int | None = None, n_rot: int | None = None,
    interleaved: bool = False, layout: str | None = None, positions: Operand | None = None,
    offset: Operand | None = None,
) -> Value:  # fmt: skip
    """Rotary embedding of x by tables of cosines and sines, one row a position.

    `positions` [S] or [B, S] chooses the rows of the tables; `offset` (a number, or one for each batch row) starts them
    later.
    """
    value, c, s, size, turning, where = _arguments(x, cos, sin, head_dim, n_rot, layout, positions, offset, "rope")
    return Rope(size, turning, interleaved, where)(value, c, s)


@function()
def rope_backward(
    dy: Operand, cos: Operand, sin: Operand, *, head_dim: int | None = None, n_rot: int | None = None,
    interleaved: bool = False, layout: str | None = None, positions: Operand | None = None,
    offset: Operand | None = None,
) -> Value:  # fmt: skip
    """The cotangent of x in `rope`: the rotation by the negative angles."""
    value, c, s, size, turning, where = _arguments(
        dy, cos, sin, head_dim, n_rot, layout, positions, offset, "rope_backward"
    )
    return RopeBackward(size, turning, interleaved, where)(value, c, s)


@function()
def axial_rope2d(
    x: Operand, end_x: int, end_y: int, *, head_dim: int, num_heads: int, theta: float = 10000.0, repeat_factor: int = 1
) -> Value:
    """Rotary embedding of tokens on an end_x × end_y grid."""
    return AxialRope2d(end_x, end_y, head_dim, num_heads, float(theta), repeat_factor)(as_value(x))
