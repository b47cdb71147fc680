"""The order of passes and what gates them."""

import pytest

from strata import ops
from strata.backends import backend_for
from strata.core import f32
from strata.errors import CompileError, OptionError, ParseError, UnknownNameError
from strata.mir import Graph, evaluate
from strata.passes import (
    DropUnused,
    FusionLimits,
    LowerControlFlow,
    Pass,
    PassChoices,
    PassContext,
    Precision,
    default_passes,
    parse_passes,
    run_passes,
)
from strata.runtime import CompileOptions, CompilePipeline


def spelled(claims, **choices) -> list[str]:
    ctx = PassContext(claims=None if claims is None else frozenset(claims))
    return [p.name for p in default_passes(ctx, PassChoices(**choices))]


def test_the_passes_of_every_backend():
    assert spelled(()) == [
        "inline_scan",
        "simplify",
        "fold",
        "find_attention",
        "keep_lse",
        "separate_pools",
        "decompose",
        "check_indices",
        "simplify",
        "share_matmul",
        "fold",
        "split_barriers",
    ]
    assert spelled(backend_for("cpu").capabilities.claims) == [
        *("integer_products", "inline_scan", "simplify", "fold", "requantize", "find_attention", "layout"),
        *(
            "keep_lse",
            "separate_pools",
            "decompose",
            "check_indices",
            "simplify",
            "share_matmul",
            "fold",
            "split_barriers",
        ),
    ]


def test_attention_is_found_before_anything_that_takes_ops_apart():
    order = spelled(None)
    assert order.index("find_attention") < order.index("decompose") < order.index("share_matmul")


def test_claims_gate_layouts():
    assert {"integer_products", "requantize", "layout"} <= set(spelled({"conv_last"}))
    assert not {"integer_products", "requantize", "layout"} & set(spelled(()))


def test_without_fusion():
    first, taken_apart = ["inline_scan", "simplify", "fold"], ["separate_pools", "decompose", "check_indices"]
    assert spelled((), fusion=False) == [*first, *taken_apart, "simplify", "fold", "split_barriers"]


def test_passes_that_are_named_are_the_only_ones():
    """Control flow and contractions made simple, nothing else, and each op a kernel."""
    g = Graph("g")
    x, w = g.input("x", (4, 8)), g.param("w", (8, 8))
    product = ops.dot_general(x, w, ((1,), (0,)))
    g.outputs(ops.gelu(ops.cond(ops.sum(x) > 0, lambda a: a + 1, lambda a: a - 1, product)))
    options = CompileOptions(fusion=False, passes="lower_control_flow, decompose")
    result = CompilePipeline("cpu", options).compile(g)
    assert [p.name for p in result.passes] == ["lower_control_flow", "decompose"]
    kernels = [[n.op.name for n in s.nodes] for s in result.lir.schedule]
    assert sorted(kernels) == [["add"], ["gelu"], ["greater"], ["matmul"], ["reduce_sum"], ["subtract"], ["where"]]


def names_of(graph: Graph, **options) -> list[str]:
    return [n.op.name for n in CompilePipeline("cpu", CompileOptions(**options)).compile(graph).lir.graph.nodes()]


def test_rules_that_change_rounding_are_asked_for():
    g = Graph("g")
    g.outputs(ops.log(ops.exp(g.input("x", f32[4]))) + 1)
    assert {"log", "exp"} <= set(names_of(g))
    assert not {"log", "exp"} & set(names_of(g, exact=False))


def test_loops_of_few_steps_are_their_steps_when_asked():
    g = Graph("g")
    g.outputs(ops.while_loop(lambda c: c < 100.0, lambda c: c * 2.0, g.input("x", ()), max_iter=3))
    assert names_of(g).count("while") == 1
    steps = names_of(g, control_flow=True)
    assert (steps.count("while"), steps.count("multiply")) == (0, 3)
    assert names_of(g, control_flow=True, unroll=2).count("while") == 1  # three are too many


def test_options_bring_passes():
    order = spelled((), precision="mixed_f16", control_flow=True, drop_unused=True)
    assert {"precision", "lower_control_flow", "drop_unused"} <= set(order)
    assert "precision" not in spelled((), precision="f32")


def test_limits_are_counts():
    with pytest.raises(OptionError, match="max_steps must be a count, got -1"):
        FusionLimits(max_steps=-1)


def test_spelling_errors():
    with pytest.raises(UnknownNameError, match="did you mean 'simplify'"):
        parse_passes("simplfy")
    with pytest.raises(OptionError, match="no option 'limits'; did you mean 'limit'"):
        parse_passes("fold{limits=3}")
    with pytest.raises(ParseError):
        parse_passes("fold{")


def test_unused_declarations_go_when_asked():
    g = Graph("g")
    x, _, v = g.input("x", f32[4]), g.param("w", f32[4]), g.param("v", f32[4])
    before = g.outputs(x * v)
    after, _ = run_passes([DropUnused()], before, PassContext())
    assert after.param_names == ("v",)
    assert before.param_names == ("w", "v")
    assert run_passes([DropUnused()], after, PassContext())[0] is after
    kept, _ = run_passes([DropUnused(params=False)], before, PassContext())
    assert kept is before


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_loops_freeze_where_their_condition_ends(steps):
    g = Graph("g")
    x, n = g.input("x", f32[3]), g.input("n", f32[()])
    out = ops.while_loop(lambda s: s[1] < n, lambda s: (s[0] * 2.0, s[1] + 1.0), (x, x[0] * 0.0), max_iter=5)
    before = g.outputs(*out)
    after, _ = run_passes([LowerControlFlow()], before, PassContext())
    assert "while" not in [m.op.name for m in after.nodes()]
    feeds = {"x": [1.0, 2.0, 3.0], "n": float(steps)}
    for a, b in zip(evaluate(before, feeds), evaluate(after, feeds), strict=True):
        assert a.tolist() == b.tolist()


def test_loops_without_a_bound_are_refused_when_strict():
    g = Graph("g")
    x = g.input("x", f32[()])
    before = g.outputs(ops.while_loop(lambda s: s < 9.0, lambda s: s * 2.0, x))
    assert run_passes([LowerControlFlow()], before, PassContext())[0] is before
    with pytest.raises(CompileError, match="it has no bound"):
        run_passes([LowerControlFlow(strict=True)], before, PassContext())


def test_precision_leaves_other_types_alone():
    g = Graph("g")
    ids, packed = g.input("ids", (3,), "i64"), g.param("q", (4, 8), "u8")
    table, d = g.param("t", f32[5000, 8]), g.input("d", (3,), "f64")
    rows = ops.take(table, ids, axis=0)
    before = g.outputs(ops.exp(rows), ops.sin(d), ops.cast(packed, "f32") * 2.0, ids + 1)
    after, _ = run_passes([Precision("mixed_f16")], before, PassContext())
    assert [x.type for x in after.results] == [x.type for x in before.results]
    assert [x.type for x in (*after.inputs, *after.params)] == [x.type for x in (*before.inputs, *before.params)]
    assert not any(
        n.op.name == "cast" and not n.inputs[0].dtype.is_float and n.types[0].dtype.bits == 16 for n in after.nodes()
    )
    (gather,) = [n for n in after.nodes() if n.op.name == "gather"]
    assert gather.inputs[1].dtype.name == "i64"
    assert gather.types[0].dtype.name == "f16"


def test_precision_by_category_and_its_errors():
    assert str(Precision("compute=f16+reduction=f32")) == "precision{policy=compute=f16+reduction=f32}"
    for wrong in ("mixed", "compute=f8e4m3", "matmul=f16"):
        with pytest.raises(OptionError):
            Precision(wrong)


def test_f32_policy_adds_no_casts():
    g = Graph("g")
    x = g.input("x", f32[3])
    before = g.outputs(ops.exp(x))
    assert run_passes([Precision("f32")], before, PassContext())[0] is before


def test_casts_are_shared():
    g = Graph("g")
    x, w, v = g.input("x", f32[3, 4]), g.param("w", f32[4, 4]), g.param("v", f32[4, 4])
    after, _ = run_passes([Precision("mixed_bf16")], g.outputs(x @ w, x @ v), PassContext())
    assert sum(n.op.name == "cast" and n.inputs[0].same_as(x) for n in after.nodes()) == 1


class _Never(Pass):
    seeks = frozenset({"softmax"})

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        raise AssertionError("there is no softmax")


def test_a_pass_is_left_out_where_the_ops_that_it_seeks_are_not():
    g = Graph("g")
    g.outputs(g.input("x", f32[3]).exp())
    made, (record,) = run_passes([_Never()], g, PassContext())
    assert made is g
    assert not record.changed
