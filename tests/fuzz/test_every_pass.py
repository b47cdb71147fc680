"""Every pass on and off over random graphs: what is compiled equals the interpreter in f64 on the graph as written.

With every pass on, each is left out in turn; with none but the needed ones, each is run alone. Where that gives a graph
that has been seen already, there is nothing new to compile.
"""

import numpy as np
import pytest

from strata.mir import Graph, evaluate
from strata.passes import PASSES, PassContext, parse_passes, run_passes
from strata.runtime import CompileOptions, CompilePipeline, Session
from tests.fuzz.pattern_graphs import pattern_graph
from tests.fuzz.test_random_graphs import TOLERANCE, random_graph

EVERY = (
    "integer_products", "inline_scan", "simplify", "fold", "requantize", "drop_unused", "lower_control_flow",
    "find_attention", "layout", "keep_lse", "legalize_broadcast",
    "merge_fake_quantize", "separate_pools", "expand", "decompose", "check_indices",
    "simplify", "share_matmul", "fold", "split_barriers", "rematerialize{distance=4, size=64}",
)  # fmt: skip
NEEDED = ("decompose", "split_barriers")  # they make what the processor's kernels are for
PRECISION = "precision{policy=f16}"


def name_of(spelled: str) -> str:
    return spelled.partition("{")[0]


def choices() -> list[tuple[str, ...]]:
    """Lists of passes: all, all but each, each alone."""
    names = list(dict.fromkeys(name_of(p) for p in EVERY))
    without = [tuple(p for p in EVERY if name_of(p) != n or n in NEEDED) for n in names]
    alone = [tuple(p for p in EVERY if name_of(p) in (n, *NEEDED)) for n in names]
    return [EVERY, *without, *alone]


def check_passes(seed: int, graph: Graph, feeds: dict[str, np.ndarray]) -> int:
    """Every choice of passes, each graph that comes out compiled once; how many there were."""
    wanted = evaluate(graph, feeds, wide=True)
    ctx: PassContext = CompilePipeline("cpu").context
    seen: set[str] = set()
    for passes in dict.fromkeys(choices()):
        text = ", ".join(passes)
        made, _ = run_passes(parse_passes(text), graph, ctx)
        shown = str(made)
        if shown in seen:
            continue
        seen.add(shown)
        check_compiled(
            graph, feeds, wanted, CompileOptions(passes=text), TOLERANCE["f32"], f"seed {seed} passes {text}"
        )
    return len(seen)


def check_compiled(
    graph: Graph,
    feeds: dict[str, np.ndarray],
    wanted: list[np.ndarray],
    options: CompileOptions,
    close: float,
    note: str,
) -> None:
    compiled = Session("cpu").compile(graph, options)
    compiled.set_params({n: feeds[n] for n in compiled.lir.graph.param_names})
    results = compiled.run({n: feeds[n] for n in compiled.lir.graph.input_names})
    for got, want in zip(results, wanted, strict=True):
        scale = max(1.0, float(np.max(np.abs(want), initial=0.0)))
        np.testing.assert_allclose(
            got, want, rtol=close, atol=close * scale, err_msg=f"{note}\n{graph}\n{compiled.lir}"
        )


def check_every_pass(seed: int) -> None:
    """Two graphs of one seed: one of patterns, one of anything."""
    check_passes(seed, *pattern_graph(seed))
    check_passes(seed, *random_graph(seed))


def check_precision(seed: int) -> None:
    """Half precision where the policy says so: right to a few of its units."""
    graph, feeds = pattern_graph(seed)
    passes = f"simplify, {PRECISION}, decompose, simplify"
    check_compiled(graph, feeds, evaluate(graph, feeds, wide=True), CompileOptions(passes=passes), 4e-2, f"seed {seed}")


def test_every_pass_is_tried() -> None:
    assert {name_of(p) for p in (*EVERY, PRECISION)} == set(PASSES)


@pytest.mark.parametrize("seed", range(10))
def test_every_pass_on_and_off(seed: int) -> None:
    check_every_pass(seed)


@pytest.mark.parametrize("seed", range(10))
def test_precision(seed: int) -> None:
    check_precision(seed)


def test_the_patterns_are_met() -> None:
    """Random graphs that no pass changes would test nothing: each pass changes some of the first hundred."""
    ctx = CompilePipeline("cpu").context
    changed = dict.fromkeys((name_of(p) for p in EVERY), 0)
    for seed in range(100):
        graph, _ = pattern_graph(seed)
        for one in parse_passes(", ".join(EVERY)):
            made = one.run(graph, ctx)
            changed[one.name] += made is not graph
            graph = made
    rare = {name for name, count in changed.items() if not count}
    # convolutions, pools, barriers, ids, and quantisation, where rounding decides, have their own tests
    of_codes = {"integer_products", "requantize", "merge_fake_quantize"}
    # keep_lse makes what the processor's kernels do not take (tests/backends/triton_attention.py); expand is
    # for devices that would leave transforms and factorisations to the host (tests/cases/passes/expand.txt)
    on_gpus = {"keep_lse", "expand"}
    assert rare <= {"layout", "separate_pools", "split_barriers", "check_indices"} | of_codes | on_gpus, changed
