"""The workloads. Shapes are those that models have; sizes are 1 MB (in the cache) and 64 MB (in memory)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.encoder import encoder
from benchmarks.registry import Case, Onnx, normal, workload

# -------------------------------------------------------------------------------------------------------------- matmul

GEMM_SHAPES = (
    ("f32", 256, 256, 256), ("f32", 512, 512, 512), ("f32", 1024, 1024, 1024), ("f32", 128, 384, 384),
    ("f32", 128, 1536, 384), ("f32", 128, 384, 1536), ("f32", 8, 4096, 4096), ("f32", 1, 4096, 4096),
    ("f64", 1024, 1024, 1024),
)  # fmt: skip  # dtype, m, n, k


def _gemm(m: int, n: int, k: int, dtype: str = "f32") -> Case:
    kind = {"f32": np.float32, "f64": np.float64}[dtype]
    return Case(
        {"x": normal(m, k, seed=1).astype(kind)},
        lambda g, v: v["x"] @ v["w"],
        {"w": normal(k, n, seed=2, scale=k**-0.5).astype(kind)},
        numpy=lambda x, w: x @ w,
        torch=lambda x, w: x @ w,
        onnx=Onnx([("MatMul", ["x", "w"], ["y"], {})], ["y"]),
        jax=lambda x, w: x @ w,
        tinygrad=lambda x, w: x @ w,
        tolerance=1e-3 if dtype == "f32" else 1e-10,  # f64 computed in f32 does not count
        flops=2.0 * m * n * k,
    )


for _dtype, _m, _n, _k in GEMM_SHAPES:
    _suffix = "" if _dtype == "f32" else f" {_dtype}"
    workload(f"gemm {_m}x{_n}x{_k}{_suffix}", "matmul")(partial(_gemm, _m, _n, _k, _dtype))


def _jax_gelu(x: Any) -> Any:
    import jax

    return jax.nn.gelu(x, approximate=False)


def _linear_gelu() -> Case:
    m, n, k = 128, 1536, 384

    def with_numpy(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
        from scipy.special import erf

        y = x @ w + b
        return y * np.float32(0.5) * (1 + erf(y * np.float32(0.5**0.5)))

    def with_torch(x: Any, w: Any, b: Any) -> Any:
        import torch

        return torch.nn.functional.gelu(torch.addmm(b, x, w))

    return Case(
        {"x": normal(m, k, seed=1)},
        lambda g, v: (v["x"] @ v["w"] + v["b"]).gelu(),
        {"w": normal(k, n, seed=2, scale=k**-0.5), "b": normal(n, seed=3)},
        with_numpy,
        with_torch,
        Onnx([("MatMul", ["x", "w"], ["a"], {}), ("Add", ["a", "b"], ["c"], {}), ("Gelu", ["c"], ["y"], {})], ["y"]),
        jax=lambda x, w, b: _jax_gelu(x @ w + b),
        flops=2.0 * m * n * k,
    )


workload("linear + gelu 128x1536x384", "matmul", compilers=True)(_linear_gelu)

# ---------------------------------------------------------------------------------------------------- rows and columns

ROWS = {"1 MB": (256, 1024), "64 MB": (16384, 1024)}


def _jax_softmax(x: Any) -> Any:
    import jax

    return jax.nn.softmax(x, -1)


def _jax_norm(x: Any, scale: Any, shift: Any) -> Any:
    import jax

    z = x - x.mean(-1, keepdims=True)
    return z * jax.lax.rsqrt((z * z).mean(-1, keepdims=True) + 1e-5) * scale + shift


def _softmax(shape: tuple[int, int]) -> Case:
    def with_numpy(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    return Case(
        {"x": normal(*shape)},
        lambda g, v: v["x"].softmax(-1),
        {},
        with_numpy,
        lambda x: x.softmax(-1),
        Onnx([("Softmax", ["x"], ["y"], {"axis": -1})], ["y"]),
        jax=_jax_softmax,
        tinygrad=lambda x: x.softmax(-1),
    )


def _norm_numpy(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    z = x - x.mean(-1, keepdims=True)
    return z / np.sqrt((z * z).mean(-1, keepdims=True) + np.float32(1e-5)) * scale + shift


def _layer_norm(shape: tuple[int, int]) -> Case:
    def with_torch(x: Any, scale: Any, shift: Any) -> Any:
        import torch

        return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, shift)

    return Case(
        {"x": normal(*shape)},
        lambda g, v: v["x"].layer_norm(v["scale"], v["shift"]),
        {"scale": normal(shape[1], seed=1), "shift": normal(shape[1], seed=2)},
        _norm_numpy,
        with_torch,
        Onnx([("LayerNormalization", ["x", "scale", "shift"], ["y"], {"epsilon": 1e-5})], ["y"]),
        jax=_jax_norm,
        tinygrad=lambda x, scale, shift: x.layernorm(eps=1e-5) * scale + shift,
    )


def _residual_norm(shape: tuple[int, int]) -> Case:
    def with_torch(x: Any, r: Any, scale: Any, shift: Any) -> Any:
        import torch

        return torch.nn.functional.layer_norm(x + r, x.shape[-1:], scale, shift)

    return Case(
        {"x": normal(*shape), "r": normal(*shape, seed=5)},
        lambda g, v: (v["x"] + v["r"]).layer_norm(v["scale"], v["shift"]),
        {"scale": normal(shape[1], seed=1), "shift": normal(shape[1], seed=2)},
        lambda x, r, scale, shift: _norm_numpy(x + r, scale, shift),
        with_torch,
        Onnx(
            [("Add", ["x", "r"], ["s"], {}), ("LayerNormalization", ["s", "scale", "shift"], ["y"], {"epsilon": 1e-5})],
            ["y"],
        ),
        jax=lambda x, r, scale, shift: _jax_norm(x + r, scale, shift),
    )


def _rms_norm(shape: tuple[int, int]) -> Case:
    def with_torch(x: Any, scale: Any) -> Any:
        import torch

        return torch.nn.functional.rms_norm(x, x.shape[-1:], scale, 1e-5)

    return Case(
        {"x": normal(*shape)},
        lambda g, v: v["x"].rms_norm(v["scale"]),
        {"scale": normal(shape[1], seed=1)},
        lambda x, scale: x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5)) * scale,
        with_torch,
        Onnx(
            [
                ("Mul", ["x", "x"], ["q"], {}),
                ("ReduceMean", ["q", "axes"], ["m"], {"keepdims": 1}),
                ("Add", ["m", "eps"], ["e"], {}),
                ("Sqrt", ["e"], ["r"], {}),
                ("Div", ["x", "r"], ["n"], {}),
                ("Mul", ["n", "scale"], ["y"], {}),
            ],
            ["y"],
            {"axes": np.array([-1], np.int64), "eps": np.array(1e-5, np.float32)},
        ),
        jax=lambda x, scale: x / ((x * x).mean(-1, keepdims=True) + 1e-5) ** 0.5 * scale,
    )


def _gelu(shape: tuple[int, int]) -> Case:
    def with_numpy(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
        from scipy.special import erf

        y = x * w + b
        return y * np.float32(0.5) * (1 + erf(y * np.float32(0.5**0.5)))

    def with_torch(x: Any, w: Any, b: Any) -> Any:
        import torch

        return torch.nn.functional.gelu(x * w + b)

    return Case(
        {"x": normal(*shape)},
        lambda g, v: (v["x"] * v["w"] + v["b"]).gelu(),
        {"w": normal(shape[1], seed=1), "b": normal(shape[1], seed=2)},
        with_numpy,
        with_torch,
        Onnx([("Mul", ["x", "w"], ["a"], {}), ("Add", ["a", "b"], ["c"], {}), ("Gelu", ["c"], ["y"], {})], ["y"]),
        jax=lambda x, w, b: _jax_gelu(x * w + b),
    )


def _sum(axis: int, shape: tuple[int, int]) -> Case:
    return Case(
        {"x": normal(*shape)},
        lambda g, v: v["x"].sum(axis),
        {},
        lambda x: x.sum(axis),
        lambda x: x.sum(axis),
        Onnx([("ReduceSum", ["x", "axes"], ["y"], {"keepdims": 0})], ["y"], {"axes": np.array([axis], np.int64)}),
        jax=lambda x: x.sum(axis),
        tinygrad=lambda x: x.sum(axis),
        tolerance=2e-3,
    )


def _cumsum(shape: tuple[int, int]) -> Case:
    return Case(
        {"x": normal(*shape)},
        lambda g, v: v["x"].cumsum(-1),
        {},
        lambda x: x.cumsum(-1),
        lambda x: x.cumsum(-1),
        Onnx([("CumSum", ["x", "axis"], ["y"], {})], ["y"], {"axis": np.array(1, np.int64)}),
        jax=lambda x: x.cumsum(-1),
    )


def _transpose(shape: tuple[int, int]) -> Case:
    return Case(
        {"x": normal(*shape)},
        lambda g, v: v["x"].transpose(1, 0),
        {},
        lambda x: np.ascontiguousarray(x.T),
        lambda x: x.T.contiguous(),
        Onnx([("Transpose", ["x"], ["y"], {"perm": [1, 0]})], ["y"]),
        jax=lambda x: x.T.copy(),
    )


def _with_bytes(make: Callable[[tuple[int, int]], Case], shape: tuple[int, int], results: int) -> Case:
    """Of a workload that is too large for the caches: its inputs are read, its results written."""
    case = make(shape)
    moved = sum(a.nbytes for a in case.inputs.values()) + 4 * results
    return replace(case, bytes=float(moved)) if moved > 32 << 20 else case


for _size, _shape in ROWS.items():
    for _name, _make in {
        "softmax": _softmax,
        "layer norm": _layer_norm,
        "rms norm": _rms_norm,
        "residual + layer norm": _residual_norm,
        "gelu(x*w+b)": _gelu,
        "sum of rows": partial(_sum, 1),
        "sum of columns": partial(_sum, 0),
        "cumsum": _cumsum,
        "transpose": _transpose,
    }.items():
        small = _size == "1 MB" and _name in ("softmax", "residual + layer norm", "gelu(x*w+b)")
        _results = {"sum of rows": _shape[0], "sum of columns": _shape[1]}.get(_name, _shape[0] * _shape[1])
        made = partial(_with_bytes, _make, _shape, _results)
        workload(f"{_name} {_size}", "rows and columns", compilers=small)(made)

# ----------------------------------------------------------------------------------------------------------- attention


def _jax_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    import jax

    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal).transpose(0, 2, 1, 3)


def _attention(heads: int, queries: int, keys: int, depth: int, causal: bool) -> Case:
    q, k, v = (normal(1, heads, s, depth, seed=i) for i, s in enumerate((queries, keys, keys)))
    scale = depth**-0.5
    hidden = np.triu(np.full((queries, keys), -np.inf, np.float32), 1) if causal else np.zeros((1, 1), np.float32)

    def with_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        s = q @ k.swapaxes(-1, -2) * np.float32(scale) + hidden
        e = np.exp(s - s.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True) @ v

    def with_torch(q: Any, k: Any, v: Any) -> Any:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    nodes: list[Any] = [
        ("Transpose", ["k"], ["kt"], {"perm": [0, 1, 3, 2]}),
        ("MatMul", ["q", "kt"], ["s0"], {}),
        ("Mul", ["s0", "scale"], ["s1"], {}),
    ]
    if causal:
        nodes.append(("Add", ["s1", "hidden"], ["s2"], {}))
    nodes += [("Softmax", [nodes[-1][2][0]], ["p"], {"axis": -1}), ("MatMul", ["p", "v"], ["y"], {})]
    return Case(
        {"q": q, "k": k, "v": v},
        lambda g, x: _sdpa(x, causal),
        {},
        with_numpy,
        with_torch,
        Onnx(nodes, ["y"], {"scale": np.array(scale, np.float32), "hidden": hidden}),
        jax=lambda q, k, v: _jax_attention(q, k, v, causal),
        flops=4.0 * heads * queries * keys * depth / (2 if causal else 1),
    )


def _sdpa(x: Any, causal: bool) -> Any:
    import strata as st

    return st.ops.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=causal)


for _name, _arguments in {
    "attention H12 S128 D32": (12, 128, 128, 32, False),
    "attention H12 S512 D64": (12, 512, 512, 64, False),
    "attention H8 S2048 D128 causal": (8, 2048, 2048, 128, True),
    "attention decode H32 S2048 D128": (32, 1, 2048, 128, False),
    "attention decode H32 S4096 D128": (32, 1, 4096, 128, False),
}.items():
    workload(_name, "attention")(partial(_attention, *_arguments))

# --------------------------------------------------------------------------------------------------------- convolution


def _jax_conv(x: Any, w: Any, b: Any, stride: int, pad: int, groups: int) -> Any:
    import jax

    layout = ("NCHW", "OIHW", "NCHW")
    y = jax.lax.conv_general_dilated(
        x, w, (stride, stride), [(pad, pad)] * 2, dimension_numbers=layout, feature_group_count=groups
    )
    return jax.nn.relu(y + b[:, None, None])


def _conv(side: int, inner: int, outer: int, taps: int, stride: int, groups: int) -> Case:
    pad = taps // 2
    weight = normal(outer, inner // groups, taps, taps, seed=1, scale=(inner // groups * taps * taps) ** -0.5)

    def with_torch(x: Any, w: Any, b: Any) -> Any:
        import torch

        return torch.nn.functional.conv2d(x, w, b, stride, pad, 1, groups).relu()

    return Case(
        {"x": normal(1, inner, side, side)},
        lambda g, v: v["x"].conv2d(v["w"], v["b"], stride=stride, padding=pad, groups=groups).relu(),
        {"w": weight, "b": normal(outer, seed=2)},
        None,
        with_torch,
        Onnx(
            [
                ("Conv", ["x", "w", "b"], ["c"], {"strides": [stride] * 2, "pads": [pad] * 4, "group": groups}),
                ("Relu", ["c"], ["y"], {}),
            ],
            ["y"],
        ),
        jax=lambda x, w, b: _jax_conv(x, w, b, stride, pad, groups),
        flops=2.0 * (side // stride) ** 2 * outer * inner // groups * taps * taps,
    )


for _arguments in (
    (224, 3, 64, 7, 2, 1),
    (56, 64, 64, 3, 1, 1),
    (28, 128, 128, 3, 1, 1),
    (14, 256, 256, 3, 1, 1),
    (7, 512, 512, 3, 1, 1),
    (56, 64, 256, 1, 1, 1),
    (14, 384, 384, 3, 1, 384),
):
    _side, _in, _out, _taps, _stride, _groups = _arguments
    _kind = "depth-wise" if _groups > 1 else f"{_in}→{_out}"
    _with = f" / {_stride}" if _stride > 1 else ""
    workload(f"conv {_taps}x{_taps}{_with} {_side}² {_kind} + bias + relu", "convolution")(partial(_conv, *_arguments))

# ------------------------------------------------------------------------------------------------------- sorts and FFT


def _sort(*shape: int) -> Case:
    return Case(
        {"x": normal(*shape)},
        lambda g, v: v["x"].sort(-1),
        {},
        lambda x: np.sort(x, -1, kind="stable"),
        lambda x: x.sort(dim=-1, stable=True).values,
        Onnx(
            [("TopK", ["x", "k"], ["y", "i"], {"largest": 0, "sorted": 1})],
            ["y"],
            {"k": np.array([shape[-1]], np.int64)},
        ),
        jax=lambda x: x.sort(-1),
    )


def _fft(name: str, *shape: int) -> Case:
    """`fft` of complex numbers made from real ones, or `rfft`."""

    def with_scipy(x: np.ndarray) -> np.ndarray:
        import scipy.fft

        found: np.ndarray = getattr(scipy.fft, name)(x)
        return found

    def with_torch(x: Any) -> Any:
        import torch

        return getattr(torch.fft, name)(x)

    def with_jax(x: Any) -> Any:
        import jax

        return getattr(jax.numpy.fft, name)(x)

    x = normal(*shape) if name == "rfft" else normal(*shape) + 1j * normal(*shape, seed=1)
    return Case({"x": x}, lambda g, v: getattr(v["x"], name)(), {}, with_scipy, with_torch, jax=with_jax)


workload("sort 1e6", "sorts and transforms")(partial(_sort, 1_000_000))
workload("sort 1000 rows of 1000", "sorts and transforms")(partial(_sort, 1000, 1000))
workload("rfft 64 rows of 4096", "sorts and transforms")(partial(_fft, "rfft", 64, 4096))
workload("rfft 2^20", "sorts and transforms")(partial(_fft, "rfft", 1 << 20))
workload("fft 1024 rows of 1024", "sorts and transforms")(partial(_fft, "fft", 1024, 1024))

# -------------------------------------------------------------------------------------------------------------- models

workload("MiniLM-shaped encoder 1x16", "models")(partial(encoder, 16))
workload("MiniLM-shaped encoder 1x128", "models", compilers=True)(partial(encoder, 128))


def _training() -> Case:
    batch, sizes = 128, (784, 512, 512, 10)
    x, label = normal(batch, sizes[0]), np.random.default_rng(1).integers(0, 10, batch)
    weights = [normal(a, b, seed=a + b, scale=a**-0.5) for a, b in pairwise(sizes)]

    def with_strata(_: int) -> Any:
        import strata as st

        def loss(p: Any, x: Any, label: Any) -> Any:
            for w, b in p[:-1]:
                x = (x @ w + b).relu()
            return (x @ p[-1][0] + p[-1][1]).cross_entropy(label)

        @st.jit
        def step(p: Any, x: Any, label: Any) -> Any:
            value, slopes = st.value_and_grad(loss)(p, x, label)
            return value, [(w - 0.01 * dw, b - 0.01 * db) for (w, b), (dw, db) in zip(p, slopes, strict=True)]

        ours = {"p": [(st.asarray(w), st.zeros((w.shape[1],))) for w in weights]}

        def run() -> Any:
            value, ours["p"] = step(ours["p"], x, label)
            return value.numpy()

        return run

    def with_torch(_: int) -> Any:
        import torch

        F = torch.nn.functional
        params = [(torch.tensor(w, requires_grad=True), torch.zeros(w.shape[1], requires_grad=True)) for w in weights]
        flat = [t for pair in params for t in pair]
        optimizer = torch.optim.SGD(flat, 0.01, foreach=True)
        tx, tl = torch.from_numpy(x), torch.from_numpy(label)

        def run() -> Any:
            optimizer.zero_grad()
            h = tx
            for w, b in params[:-1]:
                h = torch.addmm(b, h, w).relu()
            value = F.cross_entropy(torch.addmm(params[-1][1], h, params[-1][0]), tl)
            value.backward()
            optimizer.step()
            return value

        return run

    own = {"strata": with_strata, "torch": with_torch}
    return Case({}, own=own, flops=6.0 * batch * sum(a * b for a, b in pairwise(sizes)))


workload("MLP training step 784-512-512-10, batch 128", "models")(_training)


def _overhead() -> Case:
    return Case(
        {"x": normal(8)},
        lambda g, v: v["x"] + 1,
        {},
        lambda x: x + np.float32(1),
        lambda x: x + 1,
        Onnx([("Add", ["x", "one"], ["y"], {})], ["y"], {"one": np.array(1, np.float32)}),
        jax=lambda x: x + 1,
    )


workload("call overhead: x + 1 on 8 floats", "models")(_overhead)
