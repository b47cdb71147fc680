"""Programs that went wrong once, as small as they became."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.core import DType, bf16, bool_, c64, c128, f8e4m3, f16, f32, f64, i4, i8, i32, i64, u4, u8, u16, u32
from strata.ops.quant.schemes import Scheme
from tests.differential.gradients import differentiated
from tests.differential.program import Leaf, Program, Ref, Shape, Size, Step


def program(
    *leaves: Leaf, steps: list[Step], outputs: tuple[int, ...] | None = None, n: int = 3, low: int = 0
) -> Program:
    made = len(leaves) + sum(s.count for s in steps)
    return Program((Size("n", n, low, 64),), leaves, tuple(steps), outputs or (made - 1,))


def leaf(dtype: DType, *shape: str | int, style: str = "plain", data: Any = None, param: bool = False) -> Leaf:
    given = None if data is None else np.array(data).astype(dtype.np)
    kind: Shape = tuple(shape) or (() if given is None else given.shape)
    return Leaf(kind, dtype, style, 1, param, given)


def gradient(of: Program) -> Program:
    made = differentiated(of)
    assert made is not None
    return made


def exact(name: str, *args: Any, **options: Any) -> Step:
    return Step(name, args, tuple(options.items()), exactness="exact")


def at_op(name: str, inputs: int, count: int = 1, **fields: Any) -> Step:
    return Step(f"op:{name}", tuple(V[:inputs]), tuple(fields.items()), count, "op")


def convolving(rank: int, *, padding: int = 1, groups: int = 1, input_dilation: int = 1) -> dict[str, Any]:
    """The fields of a convolution that slides by one."""
    ones, spread = (1,) * rank, (input_dilation,) * rank
    fields: dict[str, Any] = {"stride": ones, "padding": ((padding, padding),) * rank, "dilation": ones}
    return fields | {"groups": groups, "input_dilation": spread}


def _blocks() -> np.ndarray:
    """Three matrices [32, 2] as GGUF blocks."""
    made = [Scheme("gguf_q8_0").encode(np.random.default_rng(i).standard_normal((32, 2)))[0] for i in range(3)]
    return np.concatenate(made)


_ROWS = np.random.default_rng(1).standard_normal((2, 2, 4, 1, 2)).round(2)
V = [Ref(i) for i in range(8)]

REGRESSIONS: dict[str, Program] = {
    "a roll to the left": program(leaf(f32, "n"), steps=[exact("roll", V[0], -1, 0)]),
    "a roll of nothing": program(leaf(f32, "n"), steps=[exact("roll", V[0], 1, 0)], n=0),
    "differences of nothing": program(leaf(i32, "n"), steps=[exact("diff", V[0], 2, 0)], n=0),
    "a diagonal beside a matrix": program(leaf(u16, "n", 5), steps=[exact("trace", V[0], -3)], n=1),
    "a diagonal of nothing": program(leaf(f32, 3, "n"), steps=[exact("diagonal", V[0], 0, 1, 0)], n=0),
    "twice nothing": program(leaf(f32, 2, "n"), steps=[Step("use:resized", (V[0], "nearest"))], n=0),
    "what is left beside nothing": program(leaf(f32, "n", 3, 4), steps=[exact("use:refolded", V[0], True)], n=0),
    "a mask of nothing": program(leaf(f32, "n", 2), steps=[Step("use:scaled_attention", (V[0],))], n=0),
    "backwards by two": program(leaf(f64, "n", 2), steps=[exact("getitem", V[0], (slice(None, None, -2),))], n=0),
    "the best of as many": program(
        leaf(f32, "n"), steps=[Step("topk", (V[0], 2, 0), count=2, exactness="decides")], n=2
    ),
    "known ids": program(leaf(f32, "n"), steps=[exact("take", V[0], [2, 0], axis=0)], n=5),
    "ids too far": program(leaf(f32, "n"), steps=[exact("take", V[0], [2, 0], axis=0)], n=2),
    "an update of a parameter": program(leaf(u16, 3, param=True), steps=[exact("use:replaced", V[0], 0)]),
    "each element twice": program(leaf(bool_, "n", 2), steps=[exact("repeat", V[0], 2, 1)]),
    "the mean of nothing": program(leaf(f32, "n", 2), steps=[Step("mean", (V[0],), (("axis", 0),))], n=0),
    "an id into nothing": program(leaf(i64, data=0), leaf(bool_, 0, "n"), steps=[exact("gather", V[1], V[0])], n=0),
    "a product that wraps, divided": program(
        leaf(i64, data=[2**62, 2**61, -5]), steps=[exact("multiply", V[0], 3), exact("floor_divide", V[1], 3)]
    ),
    "more than the largest": program(
        leaf(i64, data=[2**63 - 1, 4]), steps=[exact("add", V[0], 1), exact("greater", V[1], V[0])]
    ),
    "an order of four bits": program(leaf(i4, data=[1, -3, 0, 7]), steps=[exact("sort", V[0], axis=0)]),
    "four bits that wrap": program(
        leaf(u4, data=[15, 3]), steps=[exact("add", V[0], V[0]), exact("cast", V[1], f32)]
    ),
    "a quotient of four bits": program(
        leaf(i4, data=[-8, 7, 1]), steps=[exact("subtract", V[0], 2), exact("floor_divide", V[1], 2)]
    ),
    "a quotient by infinity": program(
        leaf(f32, data=[-1.5, 2.0]), steps=[exact("floor_divide", V[0], float("inf"))]
    ),
    "the mean of a short row": program(leaf(f32, "n", 8), steps=[Step("use:centred", (V[0], 1))], n=13),
    "a product of a row": program(leaf(f32, "n"), steps=[Step("prod", (V[0],))], n=9),
    "no batch of attention": program(
        *[leaf(f32, 0, 1, "n", "n")] * 3, n=2,
        steps=[at_op("attention", 3, num_heads=1, kv_heads=1, head_dim=2, causal=True)],
    ),
    "attention of no query": program(
        leaf(f64, "n", 1, 0, "n"), *[leaf(f64, "n", 1, "n", "n")] * 2, n=2,
        steps=[at_op("attention", 3, num_heads=1, kv_heads=1, head_dim=2)],
    ),
    "a width of heads that is a symbol": program(
        *[leaf(f16, "n", "n", "n", 3), leaf(f16, "n", 1, 6, 3), leaf(f16, "n", 1, 6, 3), leaf(f16, "n", "n", "n", 3)],
        leaf(i64, "n", style="ids"), n=2, outputs=(5,),
        steps=[at_op("attention_backward", 5, 3, num_heads=2, kv_heads=1, head_dim=3, causal=True, has_offset=True)],
    ),
    "a state that is a symbol": program(
        leaf(f64, 1, 4, 2, "n"), leaf(f64, 1, 4, 2, "n"), leaf(f64, 1, 4, 2, 2), leaf(f64, 1, 4, 2),
        leaf(f64, 1, 4, 2), leaf(f64, 1, 2, "n", 2),
        steps=[at_op("gated_delta_net", 6, 2, state_size=3, carry_state=True)],
    ),
    "a product of nothing": program(leaf(u16, "n", 0), steps=[exact("prod", V[0], axis=None, keepdims=True)], n=0),
    "a complex product of nothing": program(
        leaf(c128, 2, "n"), steps=[Step("add", (V[0], V[0])), Step("prod", (V[1],), (("axis", None),))], n=0
    ),
    "how nothing varies": program(
        leaf(bf16, "n", "n", 0), steps=[Step("multiply", (0.5, V[0])), Step("var", (V[1],), (("axis", None),))]
    ),
    "windows of whole numbers": program(
        leaf(i8, 1, "n", 4, 5), n=2,
        steps=[at_op("pool_max", 1, kernel=(2, 3), stride=(1, 2), padding=((0, 1), (1, 1)), dilation=(2, 1))],
    ),
    "as many codes as a symbol": program(
        leaf(f32, "n", 4), steps=[at_op("quantize_dequantize", 1, axis=None, scales=(0.0371,), zero_points=(3,))]
    ),
    "known ids beside a reduction": program(
        leaf(u8, 3, "n"), leaf(bool_, 0, "n"), outputs=(1, 3, 2), n=1,
        steps=[exact("max", V[0], axis=1, keepdims=True), exact("take", V[1], [1, 0, 2], axis=1)],
    ),
    "running sums of what was wider": program(
        leaf(f64, "n", "n"), steps=[Step("cast", (V[0], f32)), Step("cumsum", (V[1],), (("axis", 1),))], n=9, low=1
    ),
    "running sums of whole numbers in floats": program(
        leaf(i64, "n", "n"), steps=[Step("cast", (V[0], f32)), Step("cumsum", (V[1],), (("axis", 1),))], n=33
    ),
    "running products beside their tiles": program(
        leaf(i32, 2, "n"), outputs=(2, 1, 0), n=1,
        steps=[exact("tile", V[0], (2, 2)), exact("cumprod", V[1], axis=0)],
    ),
    "running sums beside their tiles": program(
        leaf(i64, "n", 2), outputs=(2, 1), n=9,
        steps=[exact("tile", V[0], (3, 1)), exact("cumsum", V[1], axis=0)],
    ),
    "a sum around one element": program(
        leaf(f32, 40, "n", 50), steps=[Step("sum", (V[0],), (("axis", (0, 2)),))], n=1
    ),
    "a variance around one element": program(
        leaf(f32, 40, "n", 50), steps=[Step("var", (V[0],), (("axis", (0, 2)),))], n=1
    ),
    "a sum of rows of one element": program(
        leaf(f32, 4, 5, "n"), steps=[Step("sum", (V[0],), (("axis", (0, 2)),))], n=1
    ),
    "a sum of the transpose": program(
        leaf(f32, 7, "n"), steps=[Step("swapaxes", (V[0], 0, 1)), Step("use:flat", (V[1],)), Step("sum", (V[2],))], n=2
    ),
    "a sum of four": program(leaf(f32, "n", 2), steps=[Step("sum", (V[0],), (("axis", None),))], n=2),
    "the variance of three": program(leaf(f32, "n", "n"), steps=[Step("var", (V[0],), (("axis", 1),))]),
    "a small product with itself": program(leaf(f32, 1, "n", "n"), steps=[Step("use:gram", (V[0], False))]),
    "channels that are a symbol": program(
        leaf(f32, 1, "n", 20), leaf(f32, 16, "n", 3), n=8, low=1, steps=[at_op("conv", 2, **convolving(1))]
    ),
    "channels last that are a symbol": program(
        leaf(f32, 1, 9, 8, "n"), leaf(f32, 3, 3, "n", 16), n=16, low=1, steps=[at_op("conv_last", 2, **convolving(2))]
    ),
    "narrow maps of few channels": program(
        leaf(f32, 2, 3, 9, "n"), leaf(f32, 2, 3, 3, 3), n=2, low=1, steps=[at_op("conv", 2, **convolving(2))]
    ),
    "volumes of few channels": program(
        leaf(f32, 1, 3, 4, 5, "n"), leaf(f32, 3, 3, 3, 3, 3), n=16, low=1, steps=[at_op("conv", 2, **convolving(3))]
    ),
    "many taps of few channels": program(
        leaf(f32, 1, 4, 5, "n"), leaf(f32, 2, 4, 9, 9), n=16, low=1,
        steps=[at_op("conv", 2, **convolving(2, padding=4))],
    ),
    "taps that are a symbol": program(
        leaf(f32, 2, 5, 33), leaf(f32, 4, 5, "n"), n=5, low=1, steps=[at_op("conv", 2, **convolving(1))]
    ),
    "few turned tiles": program(
        leaf(f32, 1, 33, 33, "n"), leaf(f32, 33, 33, 3, 3), n=3, low=1,
        steps=[at_op("conv", 2, **convolving(2, padding=0))],
    ),
    "low maps of planes by themselves": program(
        leaf(f32, 2, 16, "n", 16), leaf(f32, 16, 1, 3, 3), n=3, low=1,
        steps=[at_op("conv", 2, **convolving(2, groups=16))],
    ),
    "phases of three taps": program(
        leaf(f32, 1, 16, 33, "n"), leaf(f32, 17, 16, 5, 5), n=3, low=1,
        steps=[at_op("conv", 2, **convolving(2, input_dilation=2))],
    ),
    "a point of few pixels": program(
        leaf(f32, 1, 32, "n"), leaf(f32, 16, 32, 1), n=3, low=1, steps=[at_op("conv", 2, **convolving(1, padding=0))]
    ),
    "sums of windows on narrow lines": program(
        leaf(f32, 2, 3, 17, "n"), n=7, low=4,
        steps=[at_op("pool_sum", 1, kernel=(3, 3), stride=(3, 3), padding=((1, 0), (1, 0)), dilation=(2, 1))],
    ),
    "sums of windows of narrow volumes": program(
        leaf(f32, 1, 2, 5, 7, "n"), n=7, low=6, steps=[
            at_op("pool_sum", 1, kernel=(4, 4, 5), stride=(2, 1, 2), padding=((0, 1),) * 3, dilation=(1,) * 3)
        ],
    ),
    "sums of windows that end with their line": program(
        leaf(f32, 8, "n"), n=16, low=4,
        steps=[at_op("pool_sum", 1, kernel=(4,), stride=(3,), padding=((0, 1),), dilation=(1,))],
    ),
    "a small product with itself in one row": program(
        leaf(f32, "n", "n", 70), n=2, low=1, steps=[Step("use:gram", (V[0], False)), exact("use:flat", V[1])]
    ),
    "a product with one column": program(
        leaf(f32, 40, 70), leaf(f32, 70, "n"), steps=[Step("matmul", (V[0], V[1]))], n=1
    ),
    "a product with one row": program(
        leaf(f32, "n", 70), leaf(f32, 70, 40), steps=[Step("matmul", (V[0], V[1]))], n=1
    ),
    "a row times a column": program(leaf(f32, "n", 70), leaf(f32, 70, "n"), steps=[Step("matmul", (V[0], V[1]))], n=1),
    "a row times a matrix of one column": program(
        leaf(f32, 70), leaf(f32, 70, "n"), steps=[Step("matmul", (V[0], V[1]))], n=1
    ),
    "squares of a column": program(
        leaf(f32, 7, "n"), steps=[Step("multiply", (V[0], V[0])), Step("sum", (V[1],), (("axis", None),))], n=1
    ),
    "the product of one between others": program(
        leaf(f32, 4, "n", 5), steps=[Step("prod", (V[0],), (("axis", None),))], n=1
    ),
    "a sum of planes that keeps them": program(
        leaf(f32, 4, 5, "n"), steps=[Step("sum", (V[0],), (("axis", (0, 1)), ("keepdims", True)))]
    ),
    "the variance of planes": program(leaf(f32, 4, 5, "n"), steps=[Step("var", (V[0],), (("axis", (0, 1)),))]),
    "groups of channels of one row": program(
        leaf(f64, 2, 4, "n", 2, data=_ROWS[0]), leaf(f64, 2, 4, "n", 2, data=_ROWS[1]),
        steps=[at_op("group_norm_backward_gamma", 2, groups=2, eps=1e-5)], n=1,
    ),
    "a complex matrix of one column": program(
        leaf(c64, 5, 3), leaf(c64, 3, "n"), steps=[Step("matmul", (V[0], V[1]))], n=1
    ),
    "a complex vector by a matrix": program(
        leaf(c128, "n", 7), leaf(c128, 7, 4), steps=[Step("matmul", (V[0], V[1]))], n=1
    ),
    "a complex sum": program(leaf(c128, 7, "n"), steps=[Step("sum", (V[0],), (("axis", None),))], n=17),
    "a row at the least of a row of any length": program(
        leaf(u16, 4, "n"), leaf(u16, 8, 2), n=5, low=1,
        steps=[exact("argmin", V[0], axis=1), exact("gather", V[1], V[2])],
    ),
    "a product of real numbers as complex ones": program(
        leaf(f64, 1, "n", 2), steps=[Step("use:gram", (V[0], False)), Step("cast", (V[1], c64))]
    ),
    "the first of a running product": program(
        leaf(u32, 2), steps=[exact("cumprod", V[0], axis=0), exact("getitem", V[1], (slice(-5, -1, None),))]
    ),
    "one element in a row of padding": program(
        leaf(bf16, 1, 1),
        steps=[exact("pad", V[0], ((2, 0), (1, 2))), Step("use:centred", (V[1], 1))],
    ),
    "bins of a length that is not known": program(leaf(f64, 3, "n"), steps=[at_op("rfft", 1)], n=6, low=1),
    "bins of few rows, or many": program(leaf(f32, "n", 256), steps=[at_op("rfft", 1)], n=1),
    "images and weights in one buffer": program(leaf(f32, 1, "n", "n"), steps=[Step("use:convolved", (V[0], 1))]),
    "a spread of drawn numbers": program(
        leaf(bool_, "n", "n"), n=16,
        steps=[Step("use:drawn", (V[0], 341509, "floats")), Step("std", (V[1],), (("axis", None),))],
    ),
    "a spread of drawn numbers that are a result": program(
        leaf(f32, 2, "n"), n=8, outputs=(2, 1),
        steps=[Step("use:drawn", (V[0], 573987, "floats")), Step("var", (V[1],), (("axis", 1), ("keepdims", True)))],
    ),
    "a product of drawn numbers": program(
        leaf(i8, 3, 3, "n"), n=2,
        steps=[Step("use:drawn", (V[0], 212945, "floats")), Step("use:gram", (V[1], False))],
    ),
    "experts of a few rows": program(
        leaf(f32, "n", 32), leaf(u8, data=_blocks()), leaf(i64, "n", style="ids"), n=4,
        steps=[at_op("dequant_grouped_matmul", 3, scheme=Scheme("gguf_q8_0"), n=2)],
    ),
    "attention that goes back through a cap": program(
        leaf(f32, 2, "n", 4, 2), *[leaf(f32, 2, 5, 2, 2)] * 2, leaf(f32, 2, "n", 4, 2), leaf(f32, 1, 1, 1, 5),
        n=1, outputs=(5,), steps=[
            at_op("attention_backward", 5, 4, num_heads=4, kv_heads=2, head_dim=2, layout="bshd", mask="bias",
                  causal=True, softcap=2.0),
        ],
    ),
    "a chain of half precision": program(
        leaf(bf16, "n", 5), leaf(bf16, 5), n=7, outputs=(6,),
        steps=[Step("add", (V[0], V[1])), Step("multiply", (V[2], V[0])), Step("tanh", (V[3],)),
               Step("subtract", (V[4], V[1])), Step("sum", (V[5],), (("axis", 1),))],
    ),
    "a product too small to be told from zero": program(
        leaf(f32, 8, "n", data=[[1.4e-45], [-0.3], [1e-30], [-1e-30], [0.2], [1.0], [-1e-25], [2.0]]), n=1,
        steps=[Step("use:gram", (V[0], False))],
    ),
    "a column of factors for columns": program(
        leaf(f32, 170, "n"), leaf(f32, 170, 1), n=1,
        steps=[Step("multiply", (V[0], V[1])), Step("sum", (V[2],), (("axis", None),))],
    ),
    "a row of factors for rows": program(
        leaf(f32, "n", 170), leaf(f32, 1, 170), n=1,
        steps=[Step("multiply", (V[0], V[1])), Step("sum", (V[2],), (("axis", 1),))],
    ),
    "factors of columns": program(
        leaf(f32, 170, "n"), leaf(f32, "n"), n=1,
        steps=[Step("multiply", (V[0], V[1])), Step("sum", (V[2],), (("axis", None),))],
    ),
    "a variance of products of one column": program(
        leaf(f32, 3, "n"), leaf(f32, "n"), n=1,
        steps=[Step("multiply", (V[0], V[1])), Step("var", (V[2],), (("axis", 0),))],
    ),
    "a variance of columns of products": program(
        leaf(f32, 2, 9, "n"), leaf(f32, 9, 1), n=1,
        steps=[Step("multiply", (V[0], V[1])), Step("var", (V[2],), (("axis", 1),))],
    ),
    "a slice that may be all": program(
        leaf(f32, 170, "n"), n=3,
        steps=[exact("getitem", V[0], (slice(None), slice(None, 3))), Step("sum", (V[1],), (("axis", None),))],
    ),
    "which zero is the least": program(
        leaf(f32, data=[[-0.0, 0.0], [1.0, -1.0]]),
        steps=[exact("minimum", V[0], 0.0), Step("signbit", (V[1],), exactness="decides")],
    ),
    "half precision on a grid": program(
        leaf(bf16, 2, 3), leaf(bf16, data=[0.322266]), leaf(bf16, 2, 3), steps=[
            at_op("fake_quantize_lsq_backward_scale", 3, bits=4, axis=None, gradient_factor=True)
        ],
    ),
    "a weight that a few rows do not read packed": program(
        leaf(f64, 8, "n"), leaf(f64, 8, 9, param=True), n=5,
        steps=[exact("swapaxes", V[0], 0, 1), Step("matmul", (V[2], V[1]))],
    ),
    "attention of what is put together": program(
        leaf(f32, "n", 8, 16), n=13, steps=[
            Step("multiply", (V[0], 0.5)), exact("concat", [V[0], V[1]], 0), Step("use:attended", (V[2],)),
        ],
    ),
    "a sum over what is put together and turned": program(
        leaf(f32, "n", 160), n=5, steps=[
            Step("multiply", (V[0], 0.5)), exact("concat", [V[0], V[1]], 1), exact("reshape", V[2], (-1, 2, 8)),
            exact("transpose", V[3], (2, 1, 0)), Step("sum", (V[4],), (("axis", (0, 2)),)),
        ],
    ),
    "a reshaped column times itself": program(
        leaf(f32, 4, 8, "n"), steps=[exact("reshape", V[0], (32, -1)), Step("use:gram", (V[1], True))], n=1
    ),
    "a function of what is known where there is nothing": program(
        leaf(f32, "n"), n=0, outputs=(4, 5), steps=[
            exact("pad", V[0], ((0, 1),)), exact("max", V[1], axis=0, keepdims=True), Step("add", (V[2], 1.01)),
            Step("rsqrt", (V[3],)), Step("tanh", (V[3],)),
        ],
    ),
    "a remainder by infinity": program(
        leaf(bf16, data=[1.0, np.inf]), steps=[Step("subtract", (V[0], -np.inf)), Step("remainder", (V[1], np.inf))]
    ),
    "one product of the smallest numbers": program(
        leaf(bf16, 32, "n", data=[[9e-41], [3.0], [-9e-41], [1.5]] * 8), steps=[Step("use:gram", (V[0], False))], n=1
    ),
    "the least of eight bits": program(leaf(f8e4m3, 3, 2), steps=[exact("min", V[0], axis=0)]),
    "scores divided by a root of their number": program(
        leaf(f32, 2, "n", 16), steps=[Step("use:attended_by_size", (V[0], True))], n=13, low=1
    ),
    "scores times a number made of their number": program(
        leaf(f64, 2, "n", 16), steps=[Step("use:attended_by_size", (V[0], False))], n=13
    ),
    "mirrored further than it is long": program(
        leaf(f32, "n", 2), steps=[exact("use:padded", V[0], "reflect", 4)], n=2, low=1
    ),
    "windows of numbers in a gradient": gradient(
        program(leaf(f32, 2, "n", 2), steps=[Step("use:convolved", (V[0], 1))], n=60)
    ),
    "images for weights in a gradient": gradient(
        program(
            leaf(f64, 2, "n", "n", 1), leaf(f64, 2, "n", "n", 5), n=3, low=1, steps=[
                at_op("conv_last_backward_weight", 2, stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1),
                      groups=1, kernel=(3, 3)),
            ],
        )
    ),
    "a sum of rows of -0.0": program(
        leaf(f32, "n", 6, data=[[-0.0] * 6] * 3), steps=[Step("sum", (V[0],), (("axis", 0), ("keepdims", True)))]
    ),
    "a matmul of what is turned behind a reshape": program(
        leaf(f32, 2, "n", 4, 2), leaf(f32, 2, 4, "n", 5), n=1, steps=[
            exact("transpose", V[0], (0, 2, 1, 3)), exact("reshape", V[2], (2, 2, -1, 2)),
            exact("swapaxes", V[3], 2, 3), exact("reshape", V[1], (2, 2, -1, 5)), Step("matmul", (V[4], V[5])),
            exact("transpose", V[6], (0, 3, 1, 2)),
        ],
    ),
    "a sum over a row that lies at a place": gradient(
        program(
            leaf(f32, "n"), n=3, low=1,
            steps=[Step("softmin", (V[0],), (("axis", 0),)), exact("use:replaced", V[1], 2)],
        )
    ),
    "running sums, whose gradient runs back": program(
        leaf(f32, "n", 3), steps=[Step("cumsum", (V[0],), (("axis", 0),)), Step("tanh", (V[1],))], n=5
    ),
    "a column of a matrix that is read and merged": gradient(program(
        leaf(f32, 4, 1, 2, "n"), leaf(f32, 2, 1), steps=[
            Step("sin", (V[0],)), Step("use:merge", (V[2], 0)), exact("transpose", V[3], (2, 0, 1)),
            Step("matmul", (V[4], V[1])), Step("sum", (V[5],), (("axis", -1),)),
        ], n=1, low=1,
    )),
    "a sum of products of what is merged around a size of 1": program(
        leaf(f64, 17, 8, "n", 3), leaf(f64, 17, 8, "n", 3, style="positive"), steps=[
            Step("multiply", (V[0], V[1])), exact("transpose", V[2], (1, 3, 2, 0)), Step("use:merge", (V[3], 0)),
            Step("sum", (V[4],), (("axis", (0, 1)),)),
        ], n=1, low=1,
    ),
}  # fmt: skip
