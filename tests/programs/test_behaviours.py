"""The compiler's numbered behaviours: which tests show each, and those that no other file shows.

The numbers are those of the specification that the compiler was written to: pipeline 1-12, pattern fusion 13-31,
element-wise regions 32-39, reports and gating 40-46, legalisation and dispatch 47-56, cleanup, precision and
quantisation 57-66, memory, plans and symbolic sizes 67-78, derivatives 79-88, runtime 89-102, serving 103-108 and
111-113, files, devices and sampling 109, 110 and 114-116. Where ours is other on purpose, docs/capabilities.md says
why.
"""

import ast
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import f32, sym
from strata.errors import OptionError, ParseError, ShapeError, TraceError, UnknownNameError
from strata.hir import HirModule
from strata.lir import plan, verify_plan
from strata.mir import Graph, evaluate, parse, verify
from strata.runtime import CompileOptions, CompilePipeline, ModelComponent, ModelVariant, Session
from strata.runtime.compile.variant import CompilationMode
from strata.transforms import grad, promote_params

TESTS = Path(__file__).parents[1]
CONFIG, CACHES, TEMPLATES = (
    "unit/test_config.py", "unit/runtime/test_caches.py", "unit/runtime/test_templates.py"
)  # fmt: skip
PADDING = "unit/runtime/test_padding.py"
PIPELINE, FUSION, PASSES = "unit/runtime/test_pipeline.py", "unit/runtime/test_fusion.py", "unit/passes/test_fusion.py"
LISTS, LOWER, PLAN = "unit/passes/test_pipeline.py", "unit/hir/test_lower.py", "unit/lir/test_plan.py"
HERE = "programs/test_behaviours.py"

# number: tests as (file, function), or golden cases of a pass by their file
SHOWN: dict[int, list[tuple[str, str] | str]] = {
    1: [(PIPELINE, "test_a_linear_block_is_one_kernel"), (HERE, "test_a_linear_block_has_five_nodes"),
        (PIPELINE, "test_memory_is_shared")],
    2: [(LOWER, "test_swiglu_ffn")],
    3: [(PIPELINE, "test_modules_defined_by_a_function"), (PIPELINE, "test_a_plan_passes_through")],
    4: [(LOWER, "test_swiglu_ffn"), (FUSION, "test_the_gate_is_in_its_product")],
    5: [(PIPELINE, "test_plans_have_phases_io_and_a_steady_fingerprint"), (PLAN, "test_phases")],
    6: [(PIPELINE, "test_results_keep_their_shapes")],
    7: [(PIPELINE, "test_symbols_are_listed_and_specialised")],
    8: [(HERE, "test_a_block_of_symbolic_sizes_specialises"), (PIPELINE, "test_unbound_symbols_stay")],
    9: [(HERE, "test_what_is_compiled_verifies")],
    10: [(HERE, "test_a_fused_block_is_clean")],
    11: [(PIPELINE, "test_inspect_shows_every_stage")],
    12: [(HERE, "test_a_plan_has_no_gradient"), (PIPELINE, "test_a_plan_has_no_stage_before")],
    13: [(FUSION, "test_matmul_bias_act_is_one_kernel")],
    14: [(FUSION, "test_matmul_bias_act_is_one_kernel")],
    15: [(FUSION, "test_matmul_bias_act_is_one_kernel")],  # any element-wise op is an epilogue
    16: [(FUSION, "test_a_bias_may_be_declared_first"), (HERE, "test_operands_may_be_declared_late")],
    17: [(FUSION, "test_a_residual_is_part_of_its_norm")],
    18: [(FUSION, "test_a_residual_is_part_of_its_norm")],
    19: [(HERE, "test_a_residual_that_is_a_result_is_kept"), (FUSION, "test_a_split_product_is_a_miss")],
    20: [(HERE, "test_a_norm_and_a_reshape_are_one_kernel")],
    21: [(HERE, "test_a_pair_of_products_is_one_and_two_slices")],
    22: ["share_matmul", (PASSES, "test_shared_products_become_slices")],
    23: [(HERE, "test_operands_may_be_declared_late")],
    24: [(PASSES, "test_four_products_of_a_mixture_share")],
    25: [(FUSION, "test_the_gate_is_in_its_product")],
    26: [(FUSION, "test_the_gate_is_in_its_product")],
    27: [(FUSION, "test_the_halves_of_one_value_are_gate_and_up")],
    28: [(FUSION, "test_a_half_with_another_reader_keeps_its_product_whole"),
         (FUSION, "test_gates_that_stay_apart_are_misses")],
    29: [(FUSION, "test_a_feed_forward_layer_of_an_encoder")],
    30: [(PASSES, "test_every_intermediate_may_be_a_result")],
    31: [("ops/test_fused.py", "test_mistakes")],
    32: [(FUSION, "test_a_chain_is_one_region")],
    33: [(FUSION, "test_a_value_with_two_readers_is_computed_once")],
    34: [(FUSION, "test_one_op_is_no_region_and_a_reduction_is_none")],
    35: [(FUSION, "test_a_chain_is_one_region")],
    36: [(FUSION, "test_fusion_off_gives_each_op_a_kernel"), (FUSION, "test_a_chain_is_one_region")],
    37: [(FUSION, "test_long_chains_and_wide_sums_are_cut")],
    38: [(HERE, "test_a_fused_chain_equals_the_hand_computation")],
    39: [(FUSION, "test_inner_ones_broadcast_as_numpy_does")],
    40: [(FUSION, "test_the_gate_is_in_its_product")],
    41: [(FUSION, "test_the_gate_is_in_its_product")],  # both orders fuse, so neither is a miss
    42: [(LISTS, "test_the_passes_of_every_backend"),
         (LISTS, "test_attention_is_found_before_anything_that_takes_ops_apart")],
    43: [(LISTS, "test_without_fusion"), (LISTS, "test_passes_that_are_named_are_the_only_ones")],
    44: [(FUSION, "test_attention_blocks_are_taken_apart"), (PIPELINE, "test_targets_without_a_device_plan")],
    45: [(FUSION, "test_named_ops_are_taken_apart_and_are_one_kernel"), (FUSION, "test_the_gate_is_in_its_product")],
    46: [(FUSION, "test_named_ops_are_taken_apart_and_are_one_kernel"), (FUSION, "test_a_chain_is_one_region")],
    47: [(HERE, "test_a_device_that_claims_nothing_special_takes_everything"),
         (PIPELINE, "test_supported_ops_are_a_claim")],
    48: [(PIPELINE, "test_legal_graphs_stay_as_they_are")],
    49: [(PIPELINE, "test_every_offender_is_named_with_its_line"), (PIPELINE, "test_supported_ops_are_a_claim")],
    50: [(PIPELINE, "test_every_offender_is_named_with_its_line")],
    51: [(PIPELINE, "test_compositions_are_taken_apart_for_a_smaller_claim"), "decompose_fused"],
    52: [(PIPELINE, "test_lowered_for_a_device_without_them")],
    53: [(PIPELINE, "test_lowered_for_a_device_without_them")],
    54: [(PIPELINE, "test_legal_graphs_stay_as_they_are")],
    55: [(PIPELINE, "test_dispatch_policies"),
         ("ops/test_splat.py", "test_the_parts_are_native_on_the_processor_and_taken_apart_elsewhere"),
         ("ops/test_splat.py", "test_a_claim_without_splats_has_render_and_backward_taken_apart")],
    56: [(PIPELINE, "test_what_runs_how"), (PIPELINE, "test_compositions_are_taken_apart_for_a_smaller_claim")],
    57: ["drop_unused", (LISTS, "test_unused_declarations_go_when_asked")],
    58: ["fold_constants"],
    59: ["precision_mixed", "precision_conservative", (LISTS, "test_f32_policy_adds_no_casts")],
    60: [(LISTS, "test_precision_leaves_other_types_alone")],
    61: [("unit/passes/test_quantize.py", "test_a_tapped_value_is_quantised_for_all_its_readers"),
         ("unit/passes/test_quantize.py", "test_an_empty_record_changes_nothing")],
    62: ["merge_fake_quantize", ("unit/passes/test_quantize.py", "test_others_stay")],
    63: ["lower_cond", "lower_while", (LISTS, "test_loops_freeze_where_their_condition_ends")],
    64: ["legalize_broadcast"],
    65: [(HERE, "test_an_inlined_graph_needs_all_its_values")],
    66: [(HERE, "test_named_parameters_become_inputs")],
    67: [(PLAN, "test_blocks_that_never_meet_share_memory"), (PLAN, "test_blocks_never_overlap_while_alive"),
         (PIPELINE, "test_planners_agree_and_share_less_and_less")],
    68: [(PLAN, "test_report_lists_buffers_by_offset")],
    69: [(PLAN, "test_movements_are_views"), (HERE, "test_views_take_no_memory")],
    70: [(PIPELINE, "test_training_plans_share_their_weights")],
    71: [(PLAN, "test_manifest_sizes_and_order"), (PIPELINE, "test_fingerprints_see_everything"),
         (PIPELINE, "test_plans_have_phases_io_and_a_steady_fingerprint")],
    72: [(PLAN, "test_phases"), (HERE, "test_sampling_is_the_epilogue")],
    73: [(PIPELINE, "test_unbound_symbols_stay")],
    74: [(PIPELINE, "test_bindings_come_from_shapes")],
    75: [(HERE, "test_variants_bind_their_sizes_and_differ"),
         (TEMPLATES, "test_variant_keys_are_stable")],
    76: [(CONFIG, "test_overlay_is_read_and_logged"), (CONFIG, "test_empty_variable_is_unset"),
         (CONFIG, "test_using_nests_and_restores"), (HERE, "test_settings_win_in_bulk_and_when_false")],
    77: [("unit/core/test_types.py", "test_broadcasting_is_numpys"), (HERE, "test_shapes_of_common_ops")],
    78: [(HERE, "test_a_declared_shape_that_is_wrong_is_reported"),
         (PIPELINE, "test_wrong_programs_fail_where_they_are_written")],
}  # fmt: skip


OPS, GRAPHS, COMPILED = "ops/test_", "unit/transforms/test_graphs.py", "unit/runtime/test_compiled.py"
SERVING, SPECULATIVE = "unit/serving/test_", "unit/models/test_speculative.py"
COLLECTIVES = "unit/distributed/test_collectives.py"
EXTENT, GENERATED, SUITE = "unit/runtime/test_extent.py", "ops/test_generated.py", "backends/test_cpu.py"

SHOWN |= {
    79: [(GRAPHS, "test_79_gradients_of_a_feed_forward_layer_equal_central_differences"), (GENERATED, "test_rules")],
    80: [(f"{OPS}attention.py", "test_gradients_without_a_mask_are_central_differences"),
         (f"{OPS}attention.py", "test_case_83_backward_agrees_with_torch"), (GENERATED, "test_rules"),
         (SUITE, "test_samples")],
    81: [(GRAPHS, "test_80_hvp_of_a_sum_of_squares"),
         (GRAPHS, "test_80_hvp_of_attention_norm_and_mlp_equals_finite_differences")],
    82: [(f"{OPS}linalg.py", "test_cases_24_25_gradient_of_the_sum"),
         (f"{OPS}linalg.py", "test_cases_27_28_29_tangents"), (HERE, "test_the_jacobian_of_a_solve_is_the_inverse")],
    83: [(f"{OPS}fft.py", "test_one_axis_equals_numpy"), (f"{OPS}fft.py", "test_several_axes_equal_numpy"),
         (f"{OPS}fft.py", "test_case_77_vjp_is_the_inverse_transform")],
    84: [(f"{OPS}custom.py", "test_an_op_that_runs_user_code"),
         (f"{OPS}custom.py", "test_user_code_runs_in_the_dtype_of_the_graph"),
         (f"{OPS}custom.py", "test_attributes_outputs_and_dtypes_of_user_ops"),
         (f"{OPS}custom.py", "test_packed_results_are_cut"),
         ("unit/tensor/test_custom_op.py", "test_kernels_compute_what_they_say")],
    85: [("ops/test_decompositions.py", "test_decomposition_equals_numpy"),
         (HERE, "test_the_gradient_of_rms_norm_equals_that_of_its_formula"),
         (f"{OPS}sequence.py", "test_the_delta_rule_is_differentiated_step_by_step")],
    86: [(f"{OPS}sequence.py", "test_case_5_selective_scan_equals_the_naive_recurrence"),
         (f"{OPS}sequence.py", "test_case_78_delta_rule_equals_the_scalar_recurrence")],
    87: [(GENERATED, "test_rules"), (f"{OPS}linalg.py", "test_case_43_vmap_over_both")],
    88: [(GENERATED, "test_rules"), (GRAPHS, "test_105_vmap_aligns_ranks_and_negative_axes")],
    89: [(COMPILED, "test_matmul_bias_gelu_end_to_end")],
    90: [(COMPILED, "test_half_precision_params_inputs_and_outputs"),
         (COMPILED, "test_half_precision_is_widened_for_parameters_of_f32")],
    91: [(COMPILED, "test_scalar_and_last_axis_broadcast_in_a_chain")],
    92: [(CACHES, "test_one_compile_a_key_and_a_limit"), (CACHES, "test_least_recently_used_goes_first")],
    93: [(CACHES, "test_buckets_compile_lazily_for_their_largest_key"), (CACHES, "test_buckets_are_checked")],
    94: [(PADDING, "test_pad_and_slice_rows")],
    95: [(CACHES, "test_run_padded_pads_and_slices"), (PADDING, "test_run_padded_takes_rows_of_any_shape_and_dtype")],
    96: [(CACHES, "test_ladders"), (CACHES, "test_ladder_finds_the_next_power")],
    97: [(EXTENT, "test_tail_of_an_activation_stays"), (EXTENT, "test_tail_of_an_addition_stays"),
         (EXTENT, "test_a_graph_of_plain_sizes_keeps_what_lies_behind"),
         (EXTENT, "test_binary_and_attention_of_plain_sizes"),
         (EXTENT, "test_attention_limits_queries_and_keys"), (EXTENT, "test_graphs_that_mix_places_run_in_full")],
    98: [(TEMPLATES, "test_dynamic_cache_builds_once"),
         ("api/test_mistakes.py", "test_one_key_is_for_one_set_of_sizes")],
    99: [(TEMPLATES, "test_pipeline_of_a_model_step_by_step")],
    100: [(TEMPLATES, "test_components_work_on_a_fresh_pipeline")],
    101: [(TEMPLATES, "test_aot_round_trip"), (TEMPLATES, "test_aot_specialisation_hits_and_heals"),
          (TEMPLATES, "test_another_process_hits")],
    102: [("unit/runtime/test_tracing.py", "test_trace_has_compiles_runs_and_kernels"),
          ("unit/runtime/test_tracing.py", "test_tracing_costs_nothing_when_off")],
    103: [(f"{SERVING}requests.py", "test_defaults"), (f"{SERVING}requests.py", "test_all_that_is_understood"),
          (f"{SERVING}requests.py", "test_answers_without_a_limit_may_end_after_so_many_tokens"),
          (f"{SERVING}requests.py", "test_mistakes"), (f"{SERVING}server.py", "test_chat_whole_and_in_parts")],
    104: [("unit/models/test_paged.py", "test_the_lowest_page_is_lent_first"),
          ("unit/models/test_paged.py", "test_tables_find_tokens"),
          (f"{SERVING}batching.py", "test_those_being_continued_come_first"),
          (f"{SERVING}batching.py", "test_the_first_prompt_that_does_not_fit_is_cut"),
          (f"{SERVING}batching.py", "test_at_most_so_many_sequences"),
          (f"{SERVING}engine.py", "test_requests_give_what_they_give_alone"),
          (f"{SERVING}engine.py", "test_logits_are_those_of_one_sequence")],
    105: [(SPECULATIVE, "test_equal_distributions_accept_all_and_one_more"),
          (SPECULATIVE, "test_what_is_said_follows_the_wanted_distribution"),
          (SPECULATIVE, "test_disjoint_distributions_reject_and_are_still_right"),
          (SPECULATIVE, "test_greedy_tokens_are_those_of_the_model_alone"),
          (SPECULATIVE, "test_a_perfect_draft_gives_one_token_more_a_step"),
          (SPECULATIVE, "test_draws_have_the_models_distribution")],
    106: [(f"{SERVING}experts.py", "test_counts_of_ids"),
          (f"{SERVING}experts.py", "test_those_asked_for_most_are_kept"),
          (f"{SERVING}experts.py", "test_when_to_look_again"), (f"{SERVING}experts.py", "test_what_fits_into_memory"),
          (f"{SERVING}experts.py", "test_masks_of_layers_and_of_all"),
          (f"{SERVING}experts.py", "test_results_do_not_depend_on_who_is_at_hand")],
    107: [(f"{SERVING}batching.py", "test_neighbours_with_one_adapter_go_together"),
          (f"{SERVING}adapters.py", "test_each_request_gets_its_adapter")],
    108: [(f"{SERVING}pipeline.py", "test_weights_are_kept_once"),
          (f"{SERVING}pipeline.py", "test_what_is_pinned_stays")],
    109: [(f"{OPS}gguf_blocks.py", "test_case_73_hand_made_blocks"),
          (f"{OPS}gguf_blocks.py", "test_every_block_is_what_its_formula_says"),
          (f"{OPS}dequant.py", "test_case_74_product_equals_decoding_first"),
          (f"{OPS}moe.py", "test_case_74_quantised_experts")],
    110: [("unit/runtime/test_devices.py", "test_devices_are_listed_and_made_by_name"),
          ("unit/runtime/test_devices.py", "test_missing_devices_are_refused"),
          ("api/test_mistakes.py", "test_a_device_that_is_not_there_says_what_to_install"),
          (HERE, "test_a_graph_may_be_compiled_again"), (SUITE, "test_samples"),
          ("backends/test_xla_samples.py", "test_samples"), ("backends/test_wgpu.py", "test_samples"),
          ("backends/test_triton.py", "test_samples_in_the_interpreter")],
    111: [(f"{SERVING}requests.py", "test_limits"), (f"{SERVING}counting.py", "test_workers_in_turn"),
          (f"{SERVING}counting.py", "test_the_least_loaded_worker"), (f"{SERVING}counting.py", "test_buckets_double"),
          (f"{SERVING}counting.py", "test_records_come_back_in_order"),
          ("unit/testing/test_logits.py", "test_strict_and_loose"),
          ("unit/testing/test_logits.py", "test_what_is_not_finite_is_an_error")],
    112: [(f"{SERVING}pipeline.py", "test_orders"), (f"{SERVING}pipeline.py", "test_circles_are_named"),
          (f"{SERVING}pipeline.py", "test_a_diamond_runs_each_stage_once")],
    113: [(COLLECTIVES, "test_reductions_have_the_bits_of_a_loop"), (COLLECTIVES, "test_gathers_parts_and_broadcasts"),
          (COLLECTIVES, "test_processes_on_loopback")],
    114: [(HERE, "test_scale_and_softcap_change_attention_as_the_formula_says"),
          ("backends/test_wgpu.py", "test_scale_and_softcap_change_attention")],
    115: [(HERE, "test_draws_follow_the_softmax_and_differ_from_run_to_run"),
          (HERE, "test_greedy_is_the_first_of_the_largest"),
          ("backends/test_wgpu.py", "test_draws_follow_the_softmax_and_the_key"),
          (f"{OPS}sampling.py", "test_greedy_needs_no_key")],
    116: [(f"{OPS}gguf_blocks.py", "test_every_block_is_what_its_formula_says"),
          (f"{OPS}gguf_blocks.py", "test_case_103_decoders_equal_the_gguf_package_bit_for_bit")],
}  # fmt: skip


JIT, SCHEDULE, TENSOR_PLAN = (f"unit/tensor/test_{n}.py" for n in ("jit", "schedule", "plan"))

# the acceptance list of lazy tensors and kernels; its tenth line, the speed of matmuls, softmax, sums and sorts beside
# NumPy, is measured by `python -m benchmarks`
LAZY: dict[int, list[tuple[str, str] | str]] = {
    1: [(JIT, "test_cold_warm_serial_and_parallel_runs_give_the_same_bits")],
    2: [(SCHEDULE, "test_shared_work_is_done_once_and_dependants_start_from_the_array")],
    3: [(TENSOR_PLAN, "test_several_outputs_share_kernels_and_duplicates_share_buffers"),
        (SCHEDULE, "test_duplicates_share_one_array")],
    4: [(TENSOR_PLAN, "test_variables_over_the_whole_range_with_one_compile"),
        (TENSOR_PLAN, "test_a_variable_out_of_range_changes_nothing")],
    5: [("unit/lir/test_placement.py", "test_equal_bits"), ("unit/lir/test_placement.py", "test_symbolic_sizes")],
    6: [("unit/kernel/test_search.py", "test_refused_candidates_do_not_stop_it"),
        ("unit/backends/llvm/test_tune.py", "test_a_candidate_with_other_results_is_refused"),
        ("unit/backends/llvm/test_tune.py", "test_every_schedule_near_the_heuristics_gives_the_results")],
    7: [("errors/test_messages.py", "test_message"), (SCHEDULE, "test_a_failed_run_leaves_the_tensor_as_it_was")],
    8: [(SCHEDULE, "test_ten_thousand_ops_without_recursion"), ("programs/test_scale.py", "test_each_stage_is_linear"),
        ("programs/test_kernel_counts.py", "test_a_long_chain_is_linear")],
    9: [("conformance/test_onnx.py", "test_cases"),
        ("conformance/test_onnx.py", "test_every_expected_failure_is_a_case")],
}  # fmt: skip


@pytest.mark.parametrize("number", range(1, 117))
def test_every_behaviour_is_shown(number: int) -> None:
    check_shown(SHOWN[number])


@pytest.mark.parametrize("number", range(1, 10))
def test_the_acceptance_list_is_shown(number: int) -> None:
    check_shown(LAZY[number])


def check_shown(tests: list[tuple[str, str] | str]) -> None:
    assert tests
    for where in tests:
        if isinstance(where, str):
            assert (TESTS / "cases" / "passes" / f"{where}.txt").exists(), where
            continue
        file, name = where
        assert name in functions(file), where


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))


def linear(fused: bool = False) -> HirModule:
    m = HirModule("linear")
    x, w, b = m.input("x", (4, 8)), m.param("w", (8, 16)), m.param("b", (16,))
    return m.outputs(m.linear_fused(x, w, b, act="gelu") if fused else m.linear(x, w, b, act="gelu"))


def test_a_linear_block_has_five_nodes() -> None:
    m = HirModule("linear")
    m.outputs(m.linear(m.input("x", (4, 8)), m.param("w", (8, 16)), m.param("b", (16,))))
    result = CompilePipeline("cpu").compile(m)
    names = sorted(n.op.name for n in result.lir.graph.nodes())
    assert names == ["add", "input", "matmul", "param", "param"]
    assert (result.fusion.nodes_after, result.fusion.fused_products) == (4, 1)


def test_a_block_of_symbolic_sizes_specialises() -> None:
    m = HirModule("m")
    x = m.input_batch_seq("x", hidden=64)
    y = m.linear(x, m.param("w", (64, 64)), m.param("b", (64,)), act="relu")
    result = CompilePipeline("cpu").compile(m.outputs(m.linear(y, m.param("v", (64, 64)), m.param("c", (64,)))))
    short, long = (result.specialize({"batch": 1, "seq": n}) for n in (8, 128))
    assert short.lir.graph.results[0].shape == (1, 8, 64)
    assert long.lir.graph.results[0].shape == (1, 128, 64)
    assert long.lir.arena_size > short.lir.arena_size > 0


def test_what_is_compiled_verifies() -> None:
    result = CompilePipeline("cpu").compile(linear())
    verify(result.source)
    verify(result.lir.graph)
    verify_plan(result.lir)


def test_a_fused_block_is_clean() -> None:
    report = CompilePipeline("cpu", CompileOptions(assert_fusion_clean=True)).compile(linear(fused=True)).fusion
    assert not report.missed


def test_a_plan_has_no_gradient() -> None:
    with pytest.raises(TraceError, match="takes a Graph, got Lir"):
        grad(CompilePipeline("cpu").compile(linear()).lir)  # type: ignore[arg-type]


def test_operands_may_be_declared_late() -> None:
    """A graph is what depends on what: the order of declarations is no part of it."""
    graphs = []
    for late in (False, True):
        g = Graph("g")
        x, w = g.input("x", f32[4, 8]), g.param("w", f32[8, 8])
        first = x @ w if late else None
        v, b = g.param("v", f32[8, 8]), g.param("b", f32[8])
        product = first if first is not None else x @ w
        graphs.append(g.outputs(ops.gelu(product + b), x @ v))
    labels = [[s.label for s in CompilePipeline("cpu").compile(g).lir.schedule] for g in graphs]
    assert labels[0] == labels[1]
    assert str(graphs[0]) == str(graphs[1])


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_residual_that_is_a_result_is_kept(norm: str) -> None:
    g = Graph("residual")
    x, y = g.input("x", f32[3, 8]), g.input("y", f32[3, 8])
    total = x + y
    compiled = Session("cpu").compile(g.outputs(getattr(ops, norm)(total), total))
    added = [n for s in compiled.lir.schedule for n in s.nodes if n.op.name == "add" and n.inputs[1].shape == (3, 8)]
    assert len(added) == 1
    rng = np.random.default_rng(4)
    a, b = (rng.normal(size=(3, 8)).astype(np.float32) for _ in range(2))
    normal, kept = compiled.run(x=a, y=b)
    np.testing.assert_array_equal(kept, a + b)
    np.testing.assert_allclose(normal, evaluate(g.returning(getattr(ops, norm)(total)), {"x": a, "y": b})[0], rtol=1e-5)


def test_a_pair_of_products_is_one_and_two_slices() -> None:
    g = Graph("pair")
    x = g.input("x", f32[4, 8])
    result = CompilePipeline("cpu").compile(g.outputs(*(x @ g.param(n, f32[8, 16]) for n in "ab")))
    names = [n.op.name for n in result.lir.graph.nodes()]
    assert (names.count("matmul"), names.count("slice")) == (1, 2)
    assert len(names) <= 7


def test_a_fused_chain_equals_the_hand_computation() -> None:
    g = Graph("chain")
    a, b, c = (g.input(n, f32[4]) for n in "abc")
    compiled = Session("cpu").compile(g.outputs(ops.relu((a + b) * c)))
    feeds = {"a": [1, 2, 3, 4], "b": [0.5, -3, 1, 0], "c": [2, 2, -1, 0.25]}
    (got,) = compiled.run({n: np.array(v, np.float32) for n, v in feeds.items()})
    np.testing.assert_allclose(got, [3.0, 0.0, 0.0, 1.0], atol=1e-6)
    assert len(compiled.lir.schedule) == 1


def test_a_norm_and_a_reshape_are_one_kernel() -> None:
    g = Graph("flat")
    x = g.input("x", f32[2, 4, 512])
    y = ops.reshape(ops.rms_norm(x, g.param("w", f32[512])), (8, 512))
    result = CompilePipeline("cpu").compile(g.outputs(y))
    (step,) = result.lir.schedule
    assert [result.lir.buffer(name).type.shape for name in step.outputs] == [(8, 512)]


def test_a_device_that_claims_nothing_special_takes_everything() -> None:
    g = Graph("any")
    x = g.input("x", f32[4, 4])
    result = CompilePipeline("reference").compile(g.outputs(ops.sort(ops.softmax(x, axis=-1)), ops.cholesky(x)))
    assert result.dispatch.compile_ready


def test_an_inlined_graph_needs_all_its_values() -> None:
    inner = Graph("inner")
    a, b = inner.input("a", f32[3]), inner.input("b", f32[3])
    inner.outputs(a * b + a)
    outer = Graph("outer")
    x = outer.input("x", f32[3])
    (y,) = inner.call(x, ops.exp(x))
    values = np.arange(3, dtype=np.float32)
    np.testing.assert_allclose(
        evaluate(outer.outputs(y), {"x": values})[0], values * np.exp(values) + values, rtol=1e-6
    )
    with pytest.raises(OptionError, match="graph 'inner' takes 2 values, got 1; there is nothing for b"):
        inner.call(x)
    with pytest.raises(ShapeError, match=r"graph 'inner': b is f32\[3\], got f32\[4\]"):
        inner.call(x, ops.concat([x, x[:1]], axis=0))


def test_named_parameters_become_inputs() -> None:
    g = Graph("g")
    x, w, v = g.input("x", f32[2, 3]), g.param("w", f32[3, 3]), g.param("v", f32[3, 3])
    before = g.outputs(x @ w + x @ v)
    after = promote_params(before, "w")
    assert (after.input_names, after.param_names) == (("x", "w"), ("v",))
    assert len(after.nodes()) == len(before.nodes())
    feeds = {n: np.ones(s, np.float32) for n, s in (("x", (2, 3)), ("w", (3, 3)), ("v", (3, 3)))}
    np.testing.assert_array_equal(evaluate(after, feeds)[0], evaluate(before, feeds)[0])
    with pytest.raises(UnknownNameError, match="has no parameter 'x'"):
        promote_params(before, ["x"])


def test_views_take_no_memory() -> None:
    """Reshapes, casts to the same type and parts of the first axis are read where they lie."""
    g = Graph("views")
    y = ops.sort(g.input("x", f32[8, 8]))
    same = ops.cast(ops.reshape(y, (64,)), f32)
    part = ops.narrow(same, 0, 8, 16)
    lir = plan(g.outputs(ops.sum(part), ops.sum(same)))
    scratch = [b for b in lir.buffers if b.role == "scratch"]
    assert [b.type.shape for b in scratch] == [(8, 8)]
    assert lir.arena_size == 256
    assert [s.inputs for s in lir.schedule[1:]] == [(scratch[0].name,)] * 2
    first, second = (repr(k.stores[0].value) for k in lir.kernels.values())
    assert "in0[add(floordiv(r0a, 8), 1), mod(r0a, 8)]" in first  # from element 8 on, which is the second row
    assert "in0[floordiv(r0a, 8), mod(r0a, 8)]" in second


def test_sampling_is_the_epilogue() -> None:
    g = Graph("sample")
    logits = g.input("x", f32[2, 8]) @ g.param("w", f32[8, 16])
    for chosen in (ops.sample(logits, greedy=True), ops.sample(logits, g.input("key", (2,), "u32"))):
        schedule = CompilePipeline("cpu").compile(g.returning(chosen)).lir.schedule
        (product,) = [i for i, s in enumerate(schedule) if "matmul" in s.label]
        assert schedule[product].phase == "steady"
        assert {s.phase for s in schedule[product + 1 :]} == {"epilogue"}


def test_variants_bind_their_sizes_and_differ() -> None:
    prefill, decode = ModelVariant.prefill(2, 16), ModelVariant.decode(2, 16)
    assert prefill.dim_binding() == {"batch": 2, "seq": 16}
    assert decode.dim_binding() == {"batch": 2, "past_seq": 16, "seq": 1}
    components = [
        ModelComponent(prefill),
        ModelComponent(decode),
        ModelComponent(ModelVariant.encoder(2, 16)),
        ModelComponent(prefill, mode=CompilationMode.AOT),
        ModelComponent(prefill, profile_key="fast"),
        ModelComponent(prefill, quant="q8_0"),
        ModelComponent(prefill, layer_composition_key="two"),
        ModelComponent(prefill, CompileOptions(exact=False)),
    ]
    assert len({c.cache_key() for c in components}) == len(components)


def test_settings_win_in_bulk_and_when_false() -> None:
    from strata.config import Config, config, using

    before = config()
    assert (before.verify, before.check_indices) == (True, False)
    with using(verify=False, num_threads=3, check_indices=True) as inside:
        assert (config().verify, config().num_threads, config().check_indices) == (False, 3, True)
        assert inside.key_fields() != before.key_fields()
    assert config() is before
    overlaid = Config.from_environment({"STRATA_NUM_THREADS": "5", "STRATA_DEVICE": "reference"})
    assert (overlaid.num_threads, overlaid.device) == (5, "reference")


def test_shapes_of_common_ops() -> None:
    n = sym("n", 1, 64)
    g = Graph("shapes")
    x, w, ids = g.input("x", (n, 4, 6)), g.param("w", f32[6, 5]), g.input("ids", (3,), "i64")
    made = {
        "matmul": (x @ w, (n, 4, 5)),
        "broadcast": (x + g.input("row", f32[6]), (n, 4, 6)),
        "compare": (x > 0.0, (n, 4, 6)),
        "reduce": (ops.sum(x, axis=1), (n, 6)),
        "keepdims": (ops.sum(x, axis=(1, 2), keepdims=True), (n, 1, 1)),
        "concat": (ops.concat([x, x], axis=1), (n, 8, 6)),
        "concat of symbols": (ops.concat([x, g.input("more", f32[2, 4, 6])], axis=0), (n + 2, 4, 6)),
        "gather": (ops.take(w, ids, axis=0), (3, 5)),
        "reshape": (ops.reshape(x, (n, -1)), (n, 24)),
        "transpose": (ops.transpose(x, (2, 0, 1)), (6, n, 4)),
        "narrow": (ops.narrow(x, 2, 1, 3), (n, 4, 3)),
    }
    for name, (value, shape) in made.items():
        assert value.shape == shape, name


def test_a_declared_shape_that_is_wrong_is_reported() -> None:
    text = "mir @g(x: f32[4]) -> f32[5] {{\n  %0 = exp(x) : {}\n  return %0\n}}"
    with pytest.raises(ParseError, match=r"text says f32\[5\], exp gives f32\[4\]"):
        parse(text.format("f32[5]"))
    with pytest.raises(ShapeError):
        Graph("g").input("x", f32[4]).reshape((3, 2))
    scalar = "mir @g(x: f32[]) -> f32[1] {\n  %0 = exp(x) : f32[1]\n  return %0\n}"
    with pytest.raises(ParseError, match=r"text says f32\[1\], exp gives f32\[\]"):
        parse(scalar)  # types are inferred, so a scalar is never taken for a row of one


def test_a_graph_may_be_compiled_again() -> None:
    g = Graph("twice")
    g.outputs(ops.exp(g.input("x", f32[3])))
    text = str(g)
    results = [Session("cpu").compile(g).run(x=np.ones(3, np.float32))[0] for _ in range(2)]
    np.testing.assert_array_equal(results[0], results[1])
    assert str(g) == text


def test_the_jacobian_of_a_solve_is_the_inverse() -> None:
    a = np.random.default_rng(0).normal(size=(4, 4)) + 4 * np.eye(4)
    jacobian = st.jacfwd(lambda b: st.solve(st.tensor(a), b))(st.tensor(np.ones(4)))
    np.testing.assert_allclose(jacobian.numpy(), np.linalg.inv(a), rtol=1e-10, atol=1e-12)


def test_the_gradient_of_rms_norm_equals_that_of_its_formula() -> None:
    rng = np.random.default_rng(1)
    x, w, ct = st.tensor(rng.normal(size=(3, 7))), st.tensor(rng.normal(size=7)), st.tensor(rng.normal(size=(3, 7)))

    def formula(x: Any, w: Any) -> Any:
        return x / (st.mean(x * x, axis=-1, keepdims=True) + 1e-5) ** 0.5 * w

    for at in (0, 1):
        fused = st.grad(lambda x, w: (st.rms_norm(x, w, eps=1e-5) * ct).sum(), argnums=at)(x, w)
        plain = st.grad(lambda x, w: (formula(x, w) * ct).sum(), argnums=at)(x, w)
        np.testing.assert_allclose(fused.numpy(), plain.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_scale_and_softcap_change_attention_as_the_formula_says(device: str) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(1, 2, 9, 16)).astype(np.float32) for _ in range(3))
    seen = []
    for scale, softcap in ((0.25, 0.0), (1.0, 0.0), (0.25, 2.0)):
        g = Graph("attention")
        values = [g.input(name, (1, 2, 9, 16)) for name in "qkv"]
        g.outputs(ops.attention(*values, num_heads=2, layout="bhsd", scale=scale, softcap=softcap or None))
        (out,) = Session(device).compile(g).run(q=q, k=k, v=v)
        scores = np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k) * scale
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(out, weights @ v, rtol=1e-4, atol=1e-5)
        seen.append(out)
    assert not np.allclose(seen[0], seen[1])
    assert not np.allclose(seen[0], seen[2])


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_greedy_is_the_first_of_the_largest(device: str) -> None:
    logits = np.random.default_rng(3).integers(0, 4, (64, 9)).astype(np.float32)
    g = Graph("greedy")
    (found,) = Session(device).compile(g.outputs(ops.sample(g.input("x", (64, 9)), greedy=True))).run(x=logits)
    np.testing.assert_array_equal(found, logits.argmax(-1))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_draws_follow_the_softmax_and_differ_from_run_to_run(device: str) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    count = 4000
    g = Graph("draws")
    key = g.input("key", (2,), "u32")
    g.outputs(ops.sample(ops.broadcast_to(g.input("logits", (4,)), (count, 4)), key))
    compiled = Session(device).compile(g)
    keys = [np.asarray(st.random.key(n)) for n in (0, 1)]
    first, second = (compiled.run(logits=logits, key=k)[0] for k in keys)
    np.testing.assert_array_equal(compiled.run(logits=logits, key=keys[0])[0], first)
    assert (first != second).any()
    np.testing.assert_allclose(np.bincount(first, minlength=4) / count, np.exp(logits), atol=0.03)
