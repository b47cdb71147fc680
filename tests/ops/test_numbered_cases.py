"""The numbered cases of the operators' specification: which tests show each, and those that no other file shows.

1-4 fusion, 5-20 kernels, 21-29 solves, 30-42 loops, 43-50 batches and gradients, 51-54 quantisation, 55-68 functions
of users and complex numbers, 69-87 neighbouring modules, 88-112 one weakness of other systems each.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import as_dtype, c64, f32, promote, sym
from strata.errors import DTypeError, StrataError
from strata.mir import Graph
from strata.runtime import CompiledGraph, ExpertWatch, Session
from tests.programs.test_behaviours import check_shown

HERE, GENERATED = "ops/test_numbered_cases.py", ("ops/test_generated.py", "test_rules")
CONTROL, LINALG, LOSSES, CUSTOM = (f"ops/test_{n}.py" for n in ("control", "linalg", "losses", "custom"))
QUANTIZE, SPLAT, NORM, CONV = (f"ops/test_{n}.py" for n in ("quantize", "splat", "norm", "conv"))
INDEXING, SORTING, ACTIVATION, FUSED = (f"ops/test_{n}.py" for n in ("indexing", "sorting", "activation", "fused"))
FFT, SAMPLING, GGUF, DEQUANT = (f"ops/test_{n}.py" for n in ("fft", "sampling", "gguf_blocks", "dequant"))
SEQUENCE, SPECTRAL, ATTENTION = (f"ops/test_{n}.py" for n in ("sequence", "spectral", "attention"))
GRAPHS, EXPERTS = "unit/transforms/test_graphs.py", "unit/serving/test_experts.py"

SHOWN: dict[int, list[tuple[str, str]]] = {
    1: [(HERE, "test_rotations_read_their_part_of_a_projection")],
    2: [(HERE, "test_a_part_with_two_readers_is_right_for_both")],
    3: [(HERE, "test_attention_reads_its_parts_of_a_projection")],
    4: [(CONV, "test_case_4_one_by_one_convolution_equals_a_loop")],
    5: [(SEQUENCE, "test_case_5_selective_scan_equals_the_naive_recurrence")],
    6: [(DEQUANT, "test_case_6_blocks_of_int8")],
    7: [(FUSED, "test_7_lora_matmul")],
    8: [(SAMPLING, "test_case_8_cold_temperature")],
    9: [(SAMPLING, "test_case_9_top_1")],
    10: [(SORTING, "test_case_10_cumsum")],
    11: [(ACTIVATION, "test_11_relu_backward_passes_only_where_positive")],
    12: [("ops/test_pool.py", "test_case_12_backward_goes_to_the_maxima")],
    13: [(CONV, "test_case_13_backward_input_against_finite_differences")],
    14: [(CONV, "test_case_14_backward_weight_against_finite_differences")],
    15: [(LOSSES, "test_15_cross_entropy_of_known_rows")],
    16: [(LOSSES, "test_16_cross_entropy_backward_equals_torch")],
    17: [(NORM, "test_17_layer_norm_2d_normalises_across_the_channels")],
    18: [(CONV, "test_case_18_transposed_convolution_scatters_its_kernel")],
    19: [(HERE, "test_broadcasts_of_five_axes")],
    20: [(ACTIVATION, "test_20_activation_backward_equals_central_differences")],
    21: [(LINALG, "test_case_21_two_by_two")],
    22: [(LINALG, "test_case_22_laplacian_residual")],
    23: [(LINALG, "test_case_23_several_right_sides")],
    24: [(LINALG, "test_cases_24_25_gradient_of_the_sum")],
    25: [(LINALG, "test_cases_24_25_gradient_of_the_sum")],
    26: [(LINALG, "test_case_26_batched_gradient")],
    27: [(LINALG, "test_cases_27_28_29_tangents")],
    28: [(LINALG, "test_cases_27_28_29_tangents")],
    29: [(LINALG, "test_cases_27_28_29_tangents")],
    30: [(CONTROL, "test_30_growth_by_a_tenth")],
    31: [(CONTROL, "test_31_cumulative_sum_of_xs")],
    32: [(CONTROL, "test_32_backward_euler_with_a_drive")],
    33: [(CONTROL, "test_33_34_heat_equation_and_its_trajectory")],
    34: [(CONTROL, "test_33_34_heat_equation_and_its_trajectory")],
    35: [(CONTROL, "test_35_gradient_of_a_linear_scan")],
    36: [(CONTROL, "test_36_gradient_through_three_solves")],
    37: [(CONTROL, "test_37_38_gradients_with_xs_and_constants")],
    38: [(CONTROL, "test_37_38_gradients_with_xs_and_constants")],
    39: [(CONTROL, "test_39_checkpoints_do_not_change_the_gradient")],
    40: [(CONTROL, "test_40_backward_by_hand_from_two_checkpoints")],
    41: [(CONTROL, "test_41_42_vmap_of_a_scan_and_of_its_gradient")],
    42: [(CONTROL, "test_41_42_vmap_of_a_scan_and_of_its_gradient")],
    43: [(CONTROL, "test_43_vmap_of_a_solve")],
    44: [(GRAPHS, "test_44_vmap_with_shared_parameters")],
    45: [(HERE, "test_gradient_of_a_batched_product")],
    46: [("ops/test_softmax.py", "test_46_gradient_of_the_sum_of_softmax_vanishes")],
    47: [(NORM, "test_47_layer_norm_equals_torch")],
    48: [(HERE, "test_gradients_of_a_dense_layer_and_its_loss")],
    49: [(HERE, "test_gradients_of_a_dense_layer_and_its_loss")],
    50: [(CONV, "test_case_50_gradients_of_a_small_network")],
    51: [(QUANTIZE, "test_case_51_convolution_is_bit_exact")],
    52: [(QUANTIZE, "test_case_52_product_is_bit_exact")],
    53: [(QUANTIZE, "test_case_53_saturation")],
    54: [(QUANTIZE, "test_case_54_each_channel_has_its_scale")],
    55: [(CUSTOM, "test_55_forward")],
    56: [(CUSTOM, "test_56_identity_with_a_doubled_gradient")],
    57: [(CUSTOM, "test_57_product_with_its_own_gradient")],
    58: [(CUSTOM, "test_58_identity_with_a_doubled_tangent")],
    59: [(CUSTOM, "test_59_two_outputs_of_different_types")],
    60: [(HERE, "test_complex_numbers_take_eight_bytes")],
    61: [(HERE, "test_arithmetic_of_complex_numbers")],
    62: [(HERE, "test_arithmetic_of_complex_numbers")],
    63: [(HERE, "test_arithmetic_of_complex_numbers")],
    64: [(HERE, "test_arithmetic_of_complex_numbers")],
    65: [(HERE, "test_arithmetic_of_complex_numbers")],
    66: [(HERE, "test_complex_numbers_have_no_order")],
    67: [(HERE, "test_functions_of_complex_numbers")],
    68: [(SPECTRAL, "test_case_68_squared_modulus_and_its_gradient")],
    69: [(HERE, "test_promotion")],
    70: [(INDEXING, "test_case_70_gather_shape"), (CONV, "test_case_70_shapes"),
         ("programs/test_behaviours.py", "test_shapes_of_common_ops")],
    71: [(HERE, "test_known_symbols_are_bound_and_others_stay")],
    72: [(DEQUANT, "test_case_72_and_103_small_floats")],
    73: [(GGUF, "test_case_73_hand_made_blocks")],
    74: [(DEQUANT, "test_case_74_product_equals_decoding_first"),
         ("ops/test_moe.py", "test_case_74_quantised_experts")],
    75: [(EXPERTS, "test_results_do_not_depend_on_who_is_at_hand"),
         ("unit/runtime/test_expert_watch.py", "test_graphs_report_what_was_routed")],
    76: [("ops/test_random.py", "test_case_76_streams_and_moments")],
    77: [(FFT, "test_case_77_direct_transform"), (FFT, "test_case_77_packed_round_trip_is_n_times"),
         (FFT, "test_case_77_vjp_is_the_inverse_transform")],
    78: [(SEQUENCE, "test_case_78_delta_rule_equals_the_scalar_recurrence")],
    79: [(HERE, "test_gradients_of_complex_arithmetic")],
    80: [(GRAPHS, "test_80_hvp_of_a_sum_of_squares")],
    81: [(CONTROL, "test_81_branches_and_their_gradient"), (CONTROL, "test_81_while_gradient_needs_a_bound")],
    82: [(HERE, "test_both_sides_broadcast")],
    83: [(ATTENTION, "test_case_83_backward_agrees_with_torch")],
    84: [(NORM, "test_84_layer_norm_of_one_to_four"),
         ("unit/runtime/test_compiled.py", "test_matmul_bias_gelu_end_to_end")],
    85: [(SPECTRAL, "test_case_85_log_mel_geometry")],
    86: [(FUSED, "test_86_a_transformer_layer_decomposes_and_differentiates")],
    87: [(CUSTOM, "test_an_op_that_runs_user_code"), (CUSTOM, "test_an_op_without_derivative_on_purpose")],
    88: [(HERE, "test_reductions_of_any_axes")],
    89: [(HERE, "test_every_width_of_element_is_moved")],
    90: [(HERE, "test_casts_between_all_types")],
    91: [(HERE, "test_comparisons_and_choices_broadcast")],
    92: [(FUSED, "test_92_a_region_with_inner_singletons_equals_the_steps")],
    93: [(INDEXING, "test_case_93_gather_axis_1_with_two_axes_of_i32_ids"),
         (INDEXING, "test_case_93_embedding_gradient_with_batched_ids")],
    94: [("ops/test_softmax.py", "test_94_every_axis_equals_torch_in_f64"),
         (NORM, "test_94_layer_norm_on_other_axes_equals_torch_on_the_last"),
         (SORTING, "test_case_94_cumsum_and_its_backward_on_every_axis")],
    95: [(HERE, "test_products_broadcast_their_batches")],
    96: [(HERE, "test_contractions_of_any_axes_equal_einsum")],
    97: [(NORM, "test_97_group_norm_with_batch_three_equals_torch_and_each_item"),
         ("ops/test_rope.py", "test_case_97_axial_rope_of_a_batch_equals_single_items"),
         ("ops/test_resize.py", "test_resize_2x_with_batch_3_equals_torch_and_its_gradient_is_a_sum_pool_case_97")],
    98: [(NORM, "test_98_rms_norm_gradient_equals_torch_when_rms_is_not_one")],
    99: [(ATTENTION, "test_case_99_every_layout_when_length_equals_heads"),
         (ATTENTION, "test_fully_masked_row_is_the_average_of_v")],
    100: [(HERE, "test_a_small_causal_attention_stays_causal")],
    101: [("unit/passes/test_fusion.py", "test_every_intermediate_may_be_a_result"),
          ("unit/lir/test_placement.py", "test_equal_bits")],
    102: [(SAMPLING, "test_case_102_calls_with_new_keys_differ_and_old_keys_reproduce"),
          (SAMPLING, "test_zero_probability_is_never_drawn")],
    103: [(GGUF, "test_case_103_decoders_equal_the_gguf_package_bit_for_bit"),
          (DEQUANT, "test_case_103_int4_with_a_zero_point_has_negatives"),
          (DEQUANT, "test_case_72_and_103_small_floats")],
    104: [(CONTROL, "test_104_every_number_of_checkpoints_on_a_nonlinear_body")],
    105: [(GRAPHS, "test_105_vmap_aligns_ranks_and_negative_axes")],
    106: [GENERATED],
    107: [GENERATED, (SORTING, "test_gradient_of_cumprod_as_torch_at_zeros"),
          (HERE, "test_gradients_at_ties_zeros_and_powers")],
    108: [(CONTROL, "test_108_two_carries_and_a_count_that_depends_on_the_data")],
    109: [(SPLAT, "test_gradients_are_finite_differences"), (SPLAT, "test_quaternions_begin_with_their_real_part"),
          (SPLAT, "test_empty_tiles_show_the_background_and_nothing_else")],
    110: [(HERE, "test_experts_in_a_loop_leave_the_statistics_of_others_alone")],
    111: [(FFT, "test_case_111_real_round_trip")],
    112: [(HERE, "test_both_sides_broadcast"),
          (SORTING, "test_case_112_topk_of_a_row_with_fewer_than_k_finite_entries")],
}  # fmt: skip


@pytest.mark.parametrize("number", range(1, 113))
def test_every_case_is_shown(number: int) -> None:
    check_shown(SHOWN[number])


def normal(rng: np.random.Generator, *shape: int, dtype: str = "f4") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def slope(loss: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of a scalar, element by element."""
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        moved = [at.copy(), at.copy()]
        moved[0][place] += step
        moved[1][place] -= step
        found[place] = (loss(moved[0]) - loss(moved[1])) / (2 * step)
    return found


# --------------------------------------------------------------------------------------------- 1-3, 100, 110: programs


def ran(compiled: CompiledGraph, **feeds: np.ndarray) -> tuple[np.ndarray, ...]:
    return compiled.run({name: x for name, x in feeds.items() if name in compiled.inputs})


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, width: int) -> np.ndarray:
    heads = x.reshape(*x.shape[:2], -1, width).astype(np.float64)
    a, b = heads[..., : width // 2], heads[..., width // 2 :]
    c, s = cos[: x.shape[1], None], sin[: x.shape[1], None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1).reshape(x.shape)


def rotated(g: Graph) -> tuple[Any, Any]:
    qkv, cos, sin = g.input("qkv", f32[16, 8, 192]), g.input("cos", f32[8, 8]), g.input("sin", f32[8, 8])
    part = ops.narrow(qkv, 2, 0, 64)
    return part, ops.rope(part, cos, sin, head_dim=16)


def test_rotations_read_their_part_of_a_projection(rng: np.random.Generator) -> None:  # case 1
    g = Graph("rope")
    compiled = Session("cpu").compile(g.outputs(rotated(g)[1]))
    (step,) = compiled.lir.schedule  # no copy before it: it reads rows that are 192 wide
    assert "qkv" in step.inputs
    feeds = {"qkv": normal(rng, 16, 8, 192), "cos": normal(rng, 8, 8), "sin": normal(rng, 8, 8)}
    want = turned(feeds["qkv"][..., :64], feeds["cos"], feeds["sin"], 16)
    np.testing.assert_allclose(ran(compiled, **feeds)[0], want, atol=1e-5)


def test_a_part_with_two_readers_is_right_for_both(rng: np.random.Generator) -> None:  # case 2
    g = Graph("rope")
    part, made = rotated(g)
    compiled = Session("cpu").compile(g.outputs(made, ops.relu(part)))
    feeds = {"qkv": normal(rng, 16, 8, 192), "cos": normal(rng, 8, 8), "sin": normal(rng, 8, 8)}
    first, second = ran(compiled, **feeds)
    np.testing.assert_allclose(first, turned(feeds["qkv"][..., :64], feeds["cos"], feeds["sin"], 16), atol=1e-5)
    np.testing.assert_array_equal(second, np.maximum(feeds["qkv"][..., :64], 0))


def by_head(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3).astype(np.float64)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, keep: np.ndarray) -> np.ndarray:
    """Attention of [B, S, H·D] in f64; `keep` says which scores stay."""
    a, b, c = (by_head(x, heads) for x in (q, k, v))
    scores = np.where(keep, a @ b.swapaxes(2, 3) * a.shape[-1] ** -0.5, -1e9)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ c
    return out.transpose(0, 2, 1, 3).reshape(q.shape)


def test_attention_reads_its_parts_of_a_projection(rng: np.random.Generator) -> None:  # case 3
    g = Graph("attention")
    qkv, mask = g.input("qkv", f32[8, 16, 192]), g.input("mask", f32[8, 16])
    parts = [ops.narrow(qkv, 2, 64 * i, 64) for i in range(3)]
    compiled = Session("cpu").compile(g.outputs(ops.attention(*parts, mask, num_heads=4, mask_kind="custom")))
    assert all({"slice"} != {n.op.name for n in s.nodes} for s in compiled.lir.schedule)
    assert any("qkv" in s.inputs and "attention" in s.label for s in compiled.lir.schedule)
    data, seen = normal(rng, 8, 16, 192), (rng.uniform(size=(8, 16)) > 0.3).astype(np.float32)
    want = attended(data[..., :64], data[..., 64:128], data[..., 128:], 4, seen[:, None, None, :] >= 0.5)
    np.testing.assert_allclose(ran(compiled, qkv=data, mask=seen)[0], want, rtol=1e-4, atol=1e-5)


def test_a_small_causal_attention_stays_causal(rng: np.random.Generator) -> None:  # case 100
    g = Graph("block")
    x, w, o = g.input("x", f32[1, 6, 8]), g.param("w", f32[8, 24]), g.param("o", f32[8, 8])
    qkv = x @ w
    parts = [ops.narrow(qkv, 2, 8 * i, 8) for i in range(3)]
    compiled = Session("cpu").compile(g.outputs(ops.attention(*parts, num_heads=2, mask_kind="causal") @ o))
    weights = {"w": normal(rng, 8, 24), "o": normal(rng, 8, 8)}
    compiled.set_params(weights)
    data = normal(rng, 1, 6, 8)
    packed = data.astype(np.float64) @ weights["w"]
    want = attended(packed[..., :8], packed[..., 8:16], packed[..., 16:], 2, np.tri(6, dtype=bool)) @ weights["o"]
    np.testing.assert_allclose(compiled.run(x=data)[0], want, rtol=1e-4, atol=1e-4)


def test_experts_in_a_loop_leave_the_statistics_of_others_alone(rng: np.random.Generator) -> None:  # case 110
    counts = []
    for steps in (0, 3):
        g = Graph("mixture")
        x, ids, w = g.input("x", f32[6, 8]), g.input("ids", (6,), "i64"), g.param("w", f32[4, 8, 8])
        y = ops.grouped_matmul(x, w, ids)
        if steps:
            later = g.input("later", (steps, 6), "i64")
            (y, _) = ops.scan(lambda c, i, w=w: (ops.grouped_matmul(c, w, i), None), y, later)
        compiled = Session("cpu").compile(g.outputs(ops.tanh(y)))
        compiled.set_params({"w": normal(rng, 4, 8, 8)})
        feeds = {"x": normal(rng, 6, 8), "ids": np.array([0, 1, 1, 2, 3, 3]), "later": np.zeros((3, 6), np.int64)}
        with ExpertWatch(compiled, 4) as watch:
            watch.set_resident(np.array([True, False, True, False]))
            ran(compiled, **feeds)
            counts.append(watch.take_stats())
    assert counts[0] == counts[1]
    assert (counts[0].hits, counts[0].misses) == ((2,), (4,))


# ------------------------------------------------------------------------------------- 19, 82, 88-96, 112: real numbers


def test_broadcasts_of_five_axes(rng: np.random.Generator) -> None:  # case 19
    a, b = normal(rng, 2, 3, 4, 3, 4), normal(rng, 2, 3, 4, 1, 4)
    np.testing.assert_array_equal((st.tensor(a) + st.tensor(b)).numpy(), a + b)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("name", ["add", "multiply", "subtract"])
def test_both_sides_broadcast(name: str, dtype: str, rng: np.random.Generator) -> None:  # cases 82, 112
    plain = getattr(np, name)
    for shapes in (((5, 1), (1, 7)), ((5, 1), (7,)), ((7,), (5, 1))):
        a, b = (normal(rng, *s, dtype=dtype) for s in shapes)
        np.testing.assert_array_equal(getattr(st, name)(st.tensor(a), st.tensor(b)).numpy(), plain(a, b))
        weigh = rng.standard_normal((5, 7))
        x, y = a.astype("f8"), b.astype("f8")
        grads = st.grad(lambda x, y, w=weigh: (getattr(st, name)(x, y) * w).sum(), argnums=(0, 1))(x, y)
        want = (
            slope(lambda v, y=y, w=weigh: float((plain(v, y) * w).sum()), x),
            slope(lambda v, x=x, w=weigh: float((plain(x, v) * w).sum()), y),
        )
        for got, right in zip(grads, want, strict=True):
            np.testing.assert_allclose(got.numpy(), right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "prod"])
def test_reductions_of_any_axes(kind: str, dtype: str, rng: np.random.Generator) -> None:  # case 88
    x = rng.uniform(0.5, 1.5, (3, 4, 5, 2)).astype(dtype)
    for axes in ((0, 2, 3), (1,), (3, 0), ()):
        for keep in (False, True):
            made = getattr(st, kind)(st.tensor(x), axis=axes, keepdims=keep).numpy()
            want = getattr(np, kind)(x.astype("f8"), axis=axes, keepdims=keep)
            assert (made.dtype, made.shape) == (np.dtype(dtype), want.shape)
            np.testing.assert_allclose(made, want, rtol=1e-5 if dtype == "f4" else 1e-13)


MOVED = {
    "bool": np.bool_, "i64": np.int64, "f16": np.float16, "c64": np.complex64, "i8": np.int8, "f64": np.float64,
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_every_width_of_element_is_moved(name: str, rng: np.random.Generator) -> None:  # case 89
    x = rng.integers(-3, 4, (2, 3, 4)).astype(MOVED[name])
    if name == "c64":
        x = x + 1j * rng.integers(-3, 4, (2, 3, 4)).astype(np.complex64)
    t, keep = st.tensor(x), rng.integers(0, 2, (2, 1, 4)).astype(bool)
    made = {
        "concat": (st.concat([t, t[:, :1]], axis=1), np.concatenate([x, x[:, :1]], 1)),
        "transpose": (t.transpose((2, 0, 1)), x.transpose(2, 0, 1)),
        "expand": (st.broadcast_to(t[:, :1], (5, 2, 3, 4)), np.broadcast_to(x[:, :1], (5, 2, 3, 4))),
        "where": (st.where(st.tensor(keep), t, st.flip(t, axis=0)), np.where(keep, x, x[::-1])),
    }
    for what, (got, want) in made.items():
        assert got.numpy().dtype == x.dtype, what
        np.testing.assert_array_equal(got.numpy(), want, err_msg=what)


def test_casts_between_all_types() -> None:  # case 90
    numbers = [0.0, 1.0, -1.0, 2.7, -2.7, 300.5, -300.5, np.nan]
    limits = {n: np.iinfo(n) for n in ("int8", "uint8", "int16", "int32", "int64", "uint32")}
    for source in ("f16", "bf16", "f32", "f64"):
        given = st.tensor(np.array(numbers)).astype(source)
        exact = given.astype("f64").numpy()
        for name, limit in limits.items():
            want = [0 if np.isnan(v) else int(min(max(np.trunc(v), limit.min), limit.max)) for v in exact]
            assert given.astype(name).numpy().tolist() == want, (source, name)
        assert given.astype("bool").numpy().tolist() == [v != 0 for v in exact]
        np.testing.assert_array_equal(given.astype("c64").numpy(), exact.astype(np.complex64))
    flags = st.tensor(np.array([False, True]))
    for target in ("f32", "f64", "f16", "i8", "i64", "c64"):
        assert flags.astype(target).numpy().tolist() == [0, 1]
    ties = np.float32([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8])
    assert st.tensor(ties[:2]).astype("f16").astype("f32").numpy().tolist() == [1, 1 + 2**-9]  # halves go to even
    assert st.tensor(ties[2:]).astype("bf16").astype("f32").numpy().tolist() == [1, 1 + 2**-6]
    assert st.tensor(np.array([2**24 + 1, -7], np.int64)).astype("f32").numpy().tolist() == [2**24, -7]


def test_comparisons_and_choices_broadcast(rng: np.random.Generator) -> None:  # case 91
    a, b = rng.integers(0, 3, (4, 1)) + 1e-12, rng.integers(0, 3, (1, 5)) + 1e-12  # f32 would lose the 1e-12
    x = np.broadcast_to(a, (4, 5))
    for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
        got = getattr(st, name)(st.tensor(a), st.tensor(b)).numpy()
        np.testing.assert_array_equal(got, getattr(np, name)(a, b))
    assert not (st.tensor(x) == st.tensor(x - 1e-12)).numpy().any()
    bad = np.where(x > 1, np.nan, x)
    chosen = st.where(st.tensor(a) > 1.5, st.tensor(b), st.tensor(bad))
    np.testing.assert_array_equal(chosen.numpy(), np.where(a > 1.5, b, bad))
    given = np.array([1.0, 2.0]), np.array([3.0, np.nan])
    grads = st.grad(lambda v, w: st.where(v > 1.5, v, w).sum(), argnums=(0, 1))(*given)
    assert [g.numpy().tolist() for g in grads] == [[0, 1], [1, 0]]
    nan = st.tensor(np.array([np.nan]))
    assert [bool(v.item()) for v in (nan == nan, nan != nan, nan < nan, nan >= nan)] == [False, True, False, False]


@pytest.mark.parametrize(
    "shapes",
    [((3, 4), (5, 4, 2)), ((1, 3, 4), (5, 4, 2)), ((2, 1, 3, 3, 4), (4, 1, 4, 2)), ((2, 1, 2, 3, 4), (1, 3, 1, 4, 5))],
)
def test_products_broadcast_their_batches(shapes: Any, rng: np.random.Generator) -> None:  # case 95
    a, b = (normal(rng, *s) for s in shapes)
    np.testing.assert_allclose((st.tensor(a) @ st.tensor(b)).numpy(), a @ b, rtol=1e-5, atol=1e-5)
    small = rng.integers(-9, 9, (2, 3, 4)).astype(np.int8)
    got = st.tensor(small.astype(np.int32)) @ st.tensor(small.astype(np.int32).swapaxes(1, 2))
    np.testing.assert_array_equal(got.numpy(), small.astype(np.int32) @ small.astype(np.int32).swapaxes(1, 2))


@pytest.mark.parametrize("seed", range(8))
def test_contractions_of_any_axes_equal_einsum(seed: int) -> None:  # case 96
    rng = np.random.default_rng(seed)
    sizes = {c: int(rng.integers(1, 5)) for c in "abcdefgh"}
    batch, summed, left, right = "ab"[: seed % 3], "cd"[: 1 + seed % 2], "ef"[: 1 + seed // 4], "gh"[: seed % 3]
    lhs, rhs = ("".join(rng.permutation(list(batch + summed + free))) for free in (left, right))
    a, b = (rng.standard_normal([sizes[c] for c in axes]) for axes in (lhs, rhs))
    g = Graph("contraction")
    contract, together = ((tuple(map(lhs.index, c)), tuple(map(rhs.index, c))) for c in (summed, batch))
    made = ops.dot_general(g.input("a", a.shape, "f64"), g.input("b", b.shape, "f64"), contract, together)
    out = batch + "".join(c for c in lhs if c in left) + "".join(c for c in rhs if c in right)
    (got,) = Session("cpu").compile(g.outputs(made)).run(a=a, b=b)
    np.testing.assert_allclose(got, np.einsum(f"{lhs},{rhs}->{out}", a, b), rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------- 45, 48, 49, 107: slopes


def test_gradient_of_a_batched_product(rng: np.random.Generator) -> None:  # case 45
    a, b, weigh = (rng.standard_normal(s) for s in ((2, 3, 4), (2, 4, 5), (2, 3, 5)))
    got = st.grad(lambda b: (st.matmul(a, b) * weigh).sum())(b)
    np.testing.assert_allclose(got.numpy(), slope(lambda v: float((a @ v * weigh).sum()), b), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_a_dense_layer_and_its_loss(reduce: str, rng: np.random.Generator) -> None:  # cases 48, 49
    x, w, b, labels = *(rng.standard_normal(s) for s in ((4, 3), (3, 5), (5,))), np.array([0, 4, 2, 2])

    def loss(w: Any, b: Any) -> Any:
        return getattr(st.softmax_cross_entropy_with_logits(st.matmul(x, w) + b, labels), reduce)()

    def plain(w: np.ndarray, b: np.ndarray) -> float:
        logits = x @ w + b
        rows = np.log(np.exp(logits).sum(1)) - logits[np.arange(4), labels]
        return float(getattr(rows, reduce)())

    value, grads = st.value_and_grad(loss, argnums=(0, 1))(w, b)
    np.testing.assert_allclose(value.numpy(), plain(w, b), rtol=1e-10)
    np.testing.assert_allclose(grads[0].numpy(), slope(lambda v: plain(v, b), w), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grads[1].numpy(), slope(lambda v: plain(w, v), b), rtol=1e-5, atol=1e-7)


def test_gradients_at_ties_zeros_and_powers() -> None:  # case 107
    def of(f: Any, *x: Any) -> list[list[float]]:
        return [g.numpy().tolist() for g in st.grad(f, argnums=tuple(range(len(x))))(*map(np.array, x))]

    assert of(st.max, [1.0, 3.0, 3.0]) == [[0, 0.5, 0.5]]  # ties share
    assert of(st.prod, [2.0, 0.0, 5.0]) == [[0, 10, 0]]
    assert of(st.prod, [0.0, 0.0, 5.0]) == [[0, 0, 0]]
    assert of(lambda x: (x**2.0).sum(), [-3.0, 0.0]) == [[-6, 0]]
    base, exponent = of(lambda x, y: (x**y).sum(), [0.0, 2.0], [2.0, 0.0])
    assert (base, exponent[0]) == ([0, 0], 0)
    assert exponent[1] == pytest.approx(np.log(2.0))
    assert of(lambda x: st.relu(x).sum(), [-1.0, 0.0, 2.0]) == [[0, 0, 1]]
    assert of(lambda x: st.abs(x).sum(), [-1.0, 0.0, 2.0]) == [[-1, 0, 1]]


# ------------------------------------------------------------------------------------------------ 60-67, 79: complex


def test_complex_numbers_take_eight_bytes() -> None:  # case 60
    assert (c64.itemsize, c64.is_complex, c64.is_float) == (8, True, False)
    assert st.tensor(np.zeros(2, np.complex64)).numpy().nbytes == 16


COMPLEX = [
    ("add", [1 + 2j, 3 - 1j], [4 - 1j, 0.5 + 0.5j], [5 + 1j, 3.5 - 0.5j]), ("subtract", [5 + 1j], [2 + 3j], [3 - 2j]),
    ("multiply", [1 + 2j, 2 - 1j, 1], [3 + 4j, 1, 1j], [-5 + 10j, 2 - 1j, 1j]),
    ("divide", [1 + 2j, 3 - 4j], [3 + 4j, 3 - 4j], [0.44 + 0.08j, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "a", "b", "want"), COMPLEX)
def test_arithmetic_of_complex_numbers(name: str, a: Any, b: Any, want: Any) -> None:  # cases 61-65
    made = getattr(st, name)(st.tensor(np.complex64(a)), st.tensor(np.complex64(b)))
    assert made.dtype is c64
    np.testing.assert_allclose(made.numpy(), np.complex64(want), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["maximum", "minimum", "relu", "gelu", "less"])
def test_complex_numbers_have_no_order(name: str) -> None:  # case 66
    x = st.tensor(np.complex64([1 + 1j]))
    with pytest.raises(DTypeError):
        getattr(st, name)(*[x] * (1 if name in ("relu", "gelu") else 2))


def test_functions_of_complex_numbers() -> None:  # case 67
    cases: list[tuple[Any, list[complex], list[complex]]] = [
        (st.negative, [1 + 2j, -3j], [-1 - 2j, 3j]), (st.exp, [1j * np.pi, 1], [-1, np.e]),
        (st.log, [1, 1j, -1], [0, 0.5j * np.pi, 1j * np.pi]), (st.sqrt, [4, 3 + 4j], [2, 2 + 1j]),
    ]  # fmt: skip
    for f, given, want in cases:
        np.testing.assert_allclose(f(st.tensor(np.complex64(given))).numpy(), np.complex64(want), atol=1e-6)


@pytest.mark.parametrize("name", ["multiply", "divide", "add", "subtract"])
def test_gradients_of_complex_arithmetic(name: str, rng: np.random.Generator) -> None:  # case 79
    """Twice the gradient, as real numbers, is what finite differences give of the real and the imaginary parts."""
    a, b = (rng.standard_normal(3) + 1j * rng.standard_normal(3) for _ in range(2))
    plain = getattr(np, name)
    grads = st.grad(lambda a, b: st.complex_norm_sq(getattr(st, name)(a, b)).sum(), argnums=(0, 1))(a, b)
    for at, got in enumerate(grads):

        def loss(parts: np.ndarray, at: int = at) -> float:
            given = [a, b]
            given[at] = parts[0] + 1j * parts[1]
            return float((np.abs(plain(*given)) ** 2).sum())

        real, imaginary = slope(loss, np.stack([(a, b)[at].real, (a, b)[at].imag]))
        np.testing.assert_allclose(2 * got.numpy(), real + 1j * imaginary, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(st.conj(st.conj(st.tensor(a))).numpy(), a)


# ---------------------------------------------------------------------------------------------- 69, 71: types and sizes


PROMOTED = [
    ("i8", "i16", "i16"), ("i32", "i64", "i64"), ("i32", "f32", "f32"), ("i64", "f32", "f64"), ("i8", "f16", "f32"),
    ("f16", "bf16", "f32"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "want"), PROMOTED)
def test_promotion(a: str, b: str, want: str) -> None:  # case 69
    for x, y in itertools.permutations((a, b)):
        assert promote(as_dtype(x), as_dtype(y)) is as_dtype(want)
        made = st.ones((2,), dtype=x) + st.ones((2,), dtype=y)
        assert made.dtype is as_dtype(want)
        assert made.astype("f32").numpy().tolist() == [2, 2]


def test_known_symbols_are_bound_and_others_stay() -> None:  # case 71
    g = Graph("g")
    x = g.input("x", (sym("batch"), sym("seq"), 384))
    g.outputs(ops.exp(x))
    assert g.bind({"batch": 8, "seq": 64}).results[0].shape == (8, 64, 384)
    half = g.bind({"batch": 8})
    assert half.results[0].shape == (8, sym("seq"), 384)
    with pytest.raises(StrataError, match="no symbolic size"):
        g.bind({"rows": 3})
