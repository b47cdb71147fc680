"""Random graphs of one or two large ops: products, convolutions, pools, resizes, orders, transforms, loops, codes.

Where mixed graphs have many small steps, these have the sizes, types and options that kernels are chosen by. Sizes lie
around the widths of vectors and blocks; some are symbols; inputs may be parameters; some floats are special.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata import ops as functions
from strata.core import DType, as_dtype, bf16, bool_, c64, f16, f32, f64, i8, i16, i32, i64, sym, u8
from strata.mir import Graph, Value, constant, pullback
from strata.ops.quant.dequant import quantize_weights

ops: Any = functions
EDGES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129, 200, 255, 257)
MOST = 60_000  # elements of an input
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-40)
SCHEMES = (
    "int8/32", "int8a/32", "int4/32", "fp8e4m3", "fp8e5m2", "nvfp4/16",
    "gguf_q4_0", "gguf_q8_0", "gguf_q4k", "gguf_q6k", "gguf_q8k",
)  # fmt: skip


class SizedOps:
    """A graph of one family, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.graph = Graph(f"sized{seed}")
        self.feeds: dict[str, np.ndarray] = {}
        self.is_special = False
        self.is_symbolic = bool(self.rng.integers(3) == 0)
        self.symbols: dict[int, Any] = {}

    # drawing

    def pick(self, *values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def chance(self, one_in: int = 2) -> bool:
        return bool(self.rng.integers(one_in) == 0)

    def size(self, most: int = 257) -> int:
        return int(self.rng.choice([e for e in EDGES if e <= most]))

    def shape(self, rank: int, most: int = 257) -> tuple[int, ...]:
        while True:
            shape = tuple(self.size(most) for _ in range(rank))
            if np.prod(shape) <= MOST:
                return shape

    def array(self, shape: Sequence[int], dtype: DType) -> np.ndarray:
        if dtype.is_bool:
            return self.rng.integers(0, 2, shape).astype(bool)
        if dtype.is_int:
            info = np.iinfo(dtype.np)
            wide = self.chance(3)
            low, high = (info.min, info.max) if wide else (0 if info.min == 0 else -9, 9)
            return self.rng.integers(low, high, shape, endpoint=True, dtype=dtype.np)
        values = self.rng.standard_normal(shape)
        if dtype.is_complex:
            return (values + 1j * self.rng.standard_normal(shape)).astype(dtype.np)
        if self.is_special and values.size:
            at = self.rng.integers(0, values.size, max(1, values.size // 20))
            values.reshape(-1)[at] = self.rng.choice(SPECIAL, len(at))
        return np.asarray(values).astype(dtype.np)

    def leaf(self, shape: Sequence[int], dtype: DType = f32, *, weight: bool = False, open_: bool = True) -> Value:
        """An input, or a parameter where it may be one; its first size may be a symbol."""
        return self.given(self.array(shape, dtype), weight=weight, open_=open_)

    def given(self, array: np.ndarray, *, weight: bool = False, open_: bool = True) -> Value:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = array
        declared: list[Any] = list(array.shape)
        if weight and self.chance():
            return self.graph.param(name, declared, as_dtype(array.dtype))
        if self.is_symbolic and open_ and not weight and declared:
            declared[0] = self.symbols.setdefault(declared[0], sym(f"S{len(self.symbols)}", 0))
        return self.graph.input(name, declared, as_dtype(array.dtype))

    # families: each gives its results

    def product(self) -> Any:
        dtype = self.pick(f32, f32, f32, f64, bf16, f16, i32, i8, c64)
        batch = self.pick((), (), (), (1,), (3,), (2, 3))
        m, k, n = self.shape(3, 129 if batch else 257)
        while m * k > MOST or k * n > MOST or m * n > MOST:
            m, k, n = self.shape(3, 129 if batch else 257)
        if self.chance(3):
            m = self.pick(1, 1, 2, 4, 6, 8)
        lead = batch if self.chance() else ()
        x_turned, w_turned = self.chance(3), self.chance(3)
        x = self.leaf((*batch, k, m) if x_turned else (*batch, m, k), dtype)
        w = self.leaf((*lead, n, k) if w_turned else (*lead, k, n), dtype, weight=not lead, open_=bool(lead))
        x = ops.swapaxes(x, -1, -2) if x_turned else x
        w = ops.swapaxes(w, -1, -2) if w_turned else w
        y = ops.matmul(x, w)
        if dtype.is_float and self.chance():
            y = y + self.leaf((n,), dtype, weight=True, open_=False)
            y = self.pick(ops.relu, ops.gelu, ops.silu, ops.tanh)(y)
        return y

    def convolution(self) -> Any:
        rank = self.pick(1, 2, 2, 2, 3)
        dtype = self.pick(f32, f32, f32, f64, bf16, f16)
        kind = self.pick("plain", "plain", "grouped", "depthwise", "transposed")
        groups = 1 if kind in ("plain", "transposed") else self.pick(2, 3, 4, 8)
        inner = self.pick(1, 2, 3, 4, 8, 16, 17) if kind != "depthwise" else 1
        groups = self.size(65) if kind == "depthwise" else groups
        channels = inner * groups
        outputs = groups * self.pick(1, 2, 3, 4, 8, 16) if groups > 1 else self.pick(1, 2, 3, 5, 8, 16, 24, 33, 64)
        sizes = [int(self.rng.integers(1, {1: 120, 2: 30, 3: 9}[rank])) for _ in range(rank)]
        kernel = [self.pick(1, 2, 3, 3, 3, 5, 7) if rank < 3 else self.pick(1, 2, 3) for _ in range(rank)]
        if self.chance():
            kernel = [kernel[0]] * rank
        stride = [self.pick(1, 1, 1, 2, 3)] * rank if self.chance() else [self.pick(1, 2, 3) for _ in range(rank)]
        dilation = [self.pick(1, 1, 1, 2)] * rank
        padding = [self.pick(0, 1, 1, k // 2) for k in kernel]
        batch = self.pick(1, 1, 2, 3)
        x = self.leaf((batch, channels, *sizes), dtype)
        bias = self.pick(None, self.leaf((outputs,), dtype, weight=True, open_=False))
        if kind == "transposed":
            w = self.leaf((channels, outputs, *kernel), dtype, weight=True, open_=False)
            padding = [min(p, (k - 1) // 2) for p, k in zip(padding, kernel, strict=True)]
            y = ops.conv_transpose(x, w, bias, stride, padding, dilation=dilation, rank=rank)
        else:
            reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
            padding = [max(p, -(-(r - s) // 2)) for p, r, s in zip(padding, reach, sizes, strict=True)]
            w = self.leaf((outputs, inner, *kernel), dtype, weight=True, open_=False)
            y = ops.conv(x, w, bias, stride, padding, dilation, groups, rank=rank)
        if self.chance():
            y = ops.relu(y)
        if self.chance(3) and kind == "plain" and min(y.shape[2:]) > 1:
            y = self.pick(ops.max_pool, ops.avg_pool)(y, 2, rank=rank)
        if self.chance(4):
            y = ops.mean(y, axis=tuple(range(2, 2 + rank)))
        return y

    def pool(self) -> Any:
        rank = self.pick(1, 2, 2, 3)
        dtype = self.pick(f32, f32, f64, f16, bf16, i8, u8)
        sizes = [int(self.rng.integers(1, {1: 200, 2: 40, 3: 12}[rank])) for _ in range(rank)]
        self.is_special = self.chance()
        x = self.leaf((self.pick(1, 2), self.size(17), *sizes), dtype)
        kernel = [min(s, self.pick(1, 2, 3, 3, 4, 5, 7)) for s in sizes]
        stride = self.pick(None, [1] * rank, [2] * rank, [3] * rank)
        padding = [self.pick(0, k // 2) for k in kernel]
        ceil = self.chance(3)
        if not dtype.is_float or self.chance():
            dilation = (
                1 if self.chance() else [self.pick(1, 2) if (k - 1) * 2 < s else 1 for k, s in zip(kernel, sizes)]
            )
            return ops.max_pool(x, kernel, stride, padding, dilation, ceil, rank=rank)
        return ops.avg_pool(x, kernel, stride, padding, ceil, self.chance(), rank=rank)

    def pool_gradient(self) -> Any:
        x = self.leaf((self.pick(1, 2), self.size(9), int(self.rng.integers(4, 30)), int(self.rng.integers(4, 40))))
        y, places = ops.max_pool_with_indices(x, 3, self.pick(1, 2, 3), self.pick(0, 1))
        return y, places

    def resize(self) -> Any:
        x = self.leaf((self.pick(1, 2), self.size(9), self.size(33), self.size(33)), self.pick(f32, f32, f64, f16))
        sizes = [self.size(65), self.size(65)]
        mode = self.pick("nearest", "linear", "cubic")
        way = self.pick("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
        anti = mode != "nearest" and self.chance(3)
        return ops.resize(
            x, sizes=sizes, axes=(2, 3), mode=mode, coordinate_transformation_mode=way, antialias=anti,
        )  # fmt: skip

    def order(self) -> Any:
        dtype = self.pick(f32, f32, f64, f16, bf16, i8, u8, i16, i32, i64)
        rank = self.pick(1, 2, 2, 3)
        self.is_special = self.chance()
        shape = self.shape(rank, 257 if rank < 3 else 65)
        if self.chance(4):
            shape = (*shape[:-1], self.pick(1000, 1023, 1025, 4097, 9000)) if np.prod(shape[:-1]) < 6 else shape
        x = self.leaf(shape, dtype)
        if self.chance():
            x = ops.round(x) if dtype.is_float else x  # repeats
        axis = int(self.rng.integers(rank))
        if self.is_symbolic:
            axis = rank - 1
        match self.pick("sort", "argsort", "topk", "argmax", "cummax", "both"):
            case "sort":
                return ops.sort(x, axis, descending=self.chance())
            case "argsort":
                return ops.argsort(x, axis, descending=self.chance())
            case "both":
                return ops.sort(x, axis), ops.argsort(x, axis)
            case "topk":
                return ops.topk(x, int(self.rng.integers(1, shape[axis] + 1)), axis, largest=self.chance())
            case "argmax":
                last = self.chance()
                return ops.argmax(x, axis, select_last=last), ops.argmin(x, axis, select_last=last)
            case _:
                return ops.cummax(x, axis), ops.cummin(x, axis)

    def running(self) -> Any:
        dtype = self.pick(f32, f32, f64, i32, i64, u8)
        x = self.leaf(self.shape(self.pick(1, 2, 3)), dtype)
        axis = int(self.rng.integers(x.ndim))
        options = {"exclusive": self.chance(), "reverse": self.chance()}
        made = ops.cumsum(x, axis, **options)
        return (made, ops.logcumsumexp(x, axis)) if dtype.is_float and self.chance() else made

    def reduction(self) -> Any:
        dtype = self.pick(f32, f32, f64, f16, bf16, i8, u8, i32, i64, bool_)
        x = self.leaf(self.shape(self.pick(1, 2, 3, 4)), dtype)
        axes = tuple(sorted(self.rng.choice(x.ndim, int(self.rng.integers(1, x.ndim + 1)), replace=False).tolist()))
        keep = self.chance()
        if dtype.is_bool:
            return ops.any(x, axis=axes, keepdims=keep), ops.all(x, axis=axes, keepdims=keep)
        self.is_special = False
        if not dtype.is_float:
            return ops.sum(x, axis=axes, keepdims=keep), ops.max(x, axis=axes), ops.min(x, axis=axes)
        kinds = ("sum", "mean", "max", "min", "var", "std", "logsumexp")
        return tuple(getattr(ops, self.pick(*kinds))(x, axis=axes, keepdims=keep) for _ in range(2))

    def rows(self) -> Any:
        """Softmax, norms and their like along an axis."""
        x = self.leaf(self.shape(self.pick(2, 3)), self.pick(f32, f32, f64, f16, bf16))
        axis = int(self.rng.integers(x.ndim)) if not self.is_symbolic else x.ndim - 1
        n = int(self.feeds["x0"].shape[axis])
        match self.pick("softmax", "log_softmax", "layer_norm", "rms_norm", "residual"):
            case "softmax":
                return ops.softmax(x, axis)
            case "log_softmax":
                return ops.log_softmax(x, axis)
            case "layer_norm":
                w = self.leaf((n,), x.dtype, weight=True, open_=False)
                return ops.layer_norm(x, w, w, axis=axis) if axis == x.ndim - 1 else ops.layer_norm(x, axis=axis)
            case "rms_norm":
                return ops.rms_norm(x, axis=axis)
            case _:
                y = self.given(self.array(self.feeds["x0"].shape, x.dtype))
                total = x + y
                return total, ops.layer_norm(total, axis=axis)

    def moved(self) -> Any:
        dtype = self.pick(f32, f64, f16, bf16, i8, u8, i16, i64, bool_, c64)
        self.is_symbolic = False
        x = self.leaf(self.shape(self.pick(2, 3, 4)), dtype)
        for _ in range(self.pick(1, 2, 3)):
            axis = int(self.rng.integers(x.ndim))
            n = int(x.shape[axis])
            step = self.pick(-8, -6, -5, -3, -2, -1, 2, 3, 4, 5, 6, 7, 8)
            index = [slice(None)] * x.ndim
            index[axis] = (
                slice(None, None, step) if self.chance() else slice(int(self.rng.integers(n)), None, abs(step))
            )
            match self.pick("transpose", "slice", "slice", "pad", "concat", "roll", "repeat", "tile", "broadcast"):
                case "transpose":
                    x = ops.transpose(x, tuple(self.rng.permutation(x.ndim).tolist()))
                case "slice":
                    x = ops.getitem(x, tuple(index))
                case "pad":
                    x = ops.pad(x, [(int(self.rng.integers(3)), int(self.rng.integers(3))) for _ in range(x.ndim)])
                case "concat":
                    x = ops.concat([x, ops.flip(x, axis)], axis)
                case "roll":
                    x = ops.roll(x, int(self.rng.integers(-n, n + 1)), axis)
                case "repeat":
                    x = ops.repeat(x, self.pick(2, 3), axis) if int(x.type.size) < MOST else x
                case "tile":
                    x = ops.tile(x, [self.pick(1, 2) for _ in range(x.ndim)]) if int(x.type.size) < MOST else x
                case _:
                    x = ops.broadcast_to(x, (2, *x.shape)) if int(x.type.size) < MOST and x.ndim < 5 else x
        return x

    def stepped(self) -> Any:
        """Several strided views of one array together."""
        dtype = self.pick(f32, f32, f64, f16, i8, i32)
        step = self.pick(2, 3, 4, 5, 6, 8)
        self.is_symbolic = False
        x = self.leaf((self.size(33), self.size(33) * step), dtype)
        picked = [ops.getitem(x, (slice(None), slice(j, None, step))) for j in range(step)]
        chosen = [v for v in picked if self.chance()] or picked[-1:]
        total = chosen[0]
        for other in chosen[1:]:
            total = total + other
        summed = ops.sum(ops.reshape(x, (x.shape[0], -1, step)), axis=self.pick(1, 2))
        return total, summed

    def looked_up(self) -> Any:
        dtype = self.pick(f32, f32, f64, f16, i8, i32, i64, bool_)
        table = self.leaf(self.shape(2), dtype, open_=False)
        rows, columns = self.feeds["x0"].shape
        count = self.size(129)
        ids = self.given(self.rng.integers(0, rows, count).astype(self.pick("i4", "i8")), open_=False)
        match self.pick("gather", "along", "add", "elements", "nd"):
            case "gather":
                return ops.gather(table, ids)
            case "along":
                places = self.given(self.rng.integers(0, columns, (rows, self.size(65))), open_=False)
                return ops.take_along_axis(table, places, 1)
            case "add" if not dtype.is_bool:
                few = self.given(self.rng.integers(0, self.pick(1, 3, 50), rows), open_=False)
                return ops.scatter_add(table, few, 50)
            case "elements" if not dtype.is_bool:
                places = self.given(self.rng.integers(0, rows, (count, columns)), open_=False)
                updates = self.given(self.array((count, columns), dtype), open_=False)
                return ops.scatter_elements(table, places, updates, axis=0, reduction=self.pick("add", "max", "min"))
            case _:
                pairs = np.stack([self.rng.integers(0, rows, count), self.rng.integers(0, columns, count)], -1)
                return ops.gather_nd(table, self.given(pairs, open_=False))

    def transform(self) -> Any:
        n = self.pick(self.size(257), 96, 120, 243, 250, 360, 400, 512, 1000, 1024, 1200, 4096)
        self.is_symbolic = False
        x = self.leaf((self.pick(1, 2, 3, 8, 17), n), self.pick(f32, f32, f64))
        if self.chance(3):
            x = ops.swapaxes(x, 0, 1)
            axis = 0
        else:
            axis = 1
        norm = self.pick(None, "ortho", "forward")
        match self.pick("rfft", "irfft", "fft", "round"):
            case "rfft":
                return ops.rfft(x, axis=axis, norm=norm)
            case "irfft":
                return ops.irfft(ops.rfft(x, axis=axis), n, axis=axis, norm=norm)
            case "fft":
                return ops.fft(ops.rfft(x, axis=axis), axis=axis, norm=norm)
            case _:
                return ops.ifft(ops.fft(x, axis=axis), axis=axis)

    def recurrence(self) -> Any:
        kind = self.pick("lstm", "gru", "rnn", "scan", "selective", "delta")
        dtype = self.pick(f32, f32, f64)
        steps, batch, inputs, hidden = self.pick(1, 2, 5, 9), self.pick(1, 2, 3, 5), self.size(33), self.size(65)
        self.is_symbolic = self.is_symbolic and kind == "scan"
        if kind == "scan":
            xs = self.leaf((steps, batch, hidden), dtype)
            w = self.leaf((hidden, hidden), dtype, weight=True, open_=False) * 0.1
            start = ops.zeros((batch, hidden), dtype)
            return ops.scan(lambda c, x: (ops.tanh(ops.matmul(c, w) + x), c * x), start, xs, reverse=self.chance())
        if kind == "selective":
            shape = (self.pick(1, 2), steps, hidden)
            state = self.pick(1, 4, 8, 16, 17)
            x, delta = self.leaf(shape, dtype), ops.softplus(self.leaf(shape, dtype))
            a = -ops.abs(self.leaf((hidden, state), dtype, open_=False))
            b, c = (self.leaf((*shape[:2], state), dtype) for _ in range(2))
            return ops.selective_scan(x, delta, a, b, c)
        if kind == "delta":
            heads, width, values = self.pick(1, 2, 3), self.size(33), self.size(33)
            lead = (self.pick(1, 2), steps, heads)
            q, k = (self.leaf((*lead, width), dtype) * 0.3 for _ in range(2))
            v = self.leaf((*lead, values), dtype)
            g, beta = -ops.abs(self.leaf(lead, dtype)), ops.sigmoid(self.leaf(lead, dtype))
            return ops.gated_delta_net(q, k, v, g, beta)
        gates = {"lstm": 4, "gru": 3, "rnn": 1}[kind]
        params = [
            self.given((self.rng.standard_normal(shape) * 0.3).astype(dtype.np), weight=True, open_=False)
            for shape in ((gates * hidden, inputs), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
        ]
        x = self.leaf((steps, batch, inputs), dtype)
        made = getattr(ops, kind)(x, None, params)
        return (made[0], *made[1]) if kind == "lstm" else made

    def attended(self) -> Any:
        dtype = self.pick(f32, f32, f32, f64, f16, bf16)
        kv_heads, group = self.pick(1, 2, 3), self.pick(1, 1, 2, 4)
        heads, width = kv_heads * group, self.pick(1, 4, 8, 16, 17, 32, 40, 64)
        batch, queries, keys = (
            self.pick(1, 1, 2),
            self.pick(1, 1, 2, 7, 16, 33, 65),
            self.pick(1, 3, 16, 31, 64, 130, 300),
        )
        q = self.leaf((batch, heads, queries, width), dtype)
        k, v = (self.leaf((batch, kv_heads, keys, width), dtype) for _ in range(2))
        mask = None
        options: dict[str, Any] = {}
        match self.pick("none", "causal", "window", "bias", "bool"):
            case "causal":
                options = {"causal": True}
            case "window":
                options = {"causal": True, "window": self.pick(1, 4, 20)}
            case "bias":
                mask = self.leaf((1, self.pick(1, heads), queries, keys), dtype, open_=False)
            case "bool":
                seen = self.rng.integers(0, 2, (1, 1, queries, keys)).astype(bool)
                mask = self.given(seen | (np.arange(keys) == 0), open_=False)
        if self.chance(4):
            options["softcap"] = 5.0
        return ops.attention(q, k, v, mask, num_heads=heads, kv_heads=kv_heads, layout="bhsd", **options)

    def coded(self) -> Any:
        """Weights that stay codes, and integer products."""
        self.is_symbolic = False
        if self.chance(3):
            m, k, n = self.pick(1, 2, 5, 17), self.size(129), self.size(129)
            x, w = self.leaf((m, k), self.pick(u8, i8)), self.leaf((k, n), i8, weight=True)
            return ops.matmul(ops.cast(x, i32) - 3, ops.cast(w, i32))
        name = self.pick(*SCHEMES)
        k = 256 * self.pick(1, 2, 3) if "gguf" in name else 32 * self.pick(1, 2, 3, 5)
        n, m = self.size(129), self.pick(1, 1, 2, 3, 4, 5, 8, 9, 17, 33)
        stored = quantize_weights(self.rng.standard_normal((k, n)).astype(np.float32), name)
        x = self.leaf((m, k), self.pick(f32, f32, f16, bf16))
        return ops.dequant_matmul(x, *[self.given(s, weight=True) for s in stored], scheme=name)

    def values(self) -> list[Value]:
        """The results of one family."""
        families = (
            self.product, self.product, self.convolution, self.convolution, self.pool, self.pool_gradient, self.resize,
            self.order, self.order, self.running, self.reduction, self.rows, self.moved, self.moved, self.stepped,
            self.looked_up, self.transform, self.recurrence, self.attended, self.coded,
        )  # fmt: skip
        return _flat(self.pick(*families)())


def _flat(made: Any) -> list[Value]:
    return [x for part in made for x in _flat(part)] if isinstance(made, (tuple, list)) else [made]


def sized_ops(seed: int) -> tuple[Graph, dict[str, np.ndarray]]:
    """A random graph, and what to feed it."""
    drawn = SizedOps(seed)
    return drawn.graph.outputs(*drawn.values()), drawn.feeds


def sized_gradients(seed: int) -> tuple[Graph, dict[str, np.ndarray]] | None:
    """Cotangents of the floats that a random graph takes; None where it has none, or narrow ones, which step.

    Those of the results do not depend on them: large results, rounded, would give others.
    """
    drawn = SizedOps(seed)
    drawn.is_symbolic = False  # whether a symbol beside a number is summed over depends on its size
    outputs = [x for x in drawn.values() if x.dtype.is_float]
    inputs = [x for x in map(drawn.graph.leaf, drawn.feeds) if x.dtype.is_float]
    if not outputs or not inputs or drawn.is_special or any(x.dtype in (f16, bf16) for x in (*outputs, *inputs)):
        return None
    given = [constant(drawn.rng.standard_normal(x.shape).astype(x.dtype.np)) for x in outputs]
    made = [x for x in pullback(outputs, given, inputs) if x is not None]
    return (drawn.graph.outputs(*made), drawn.feeds) if made else None
