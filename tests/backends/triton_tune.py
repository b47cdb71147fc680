"""The search for schedules of matmuls, over Triton's interpreter: candidates agree, and the winner is kept.

TRITON_INTERPRET=1 python -m tests.backends.triton_tune
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from strata import ops
from strata.backends import register_backend
from strata.backends.triton.backend import TritonBackend, interpreted, rendered_step
from strata.backends.triton.codegen.attention_backward import BESIDE
from strata.backends.triton.codegen.product import find_product
from strata.backends.triton.codegen.render import HOPPER, normal_form
from strata.backends.triton.tuning import tune
from strata.backends.triton.tuning.search import product_candidates
from strata.core import bf16, f32, sym
from strata.kernel import parse_kernel, show_kernel
from strata.lir import Lir
from strata.mir import Graph
from strata.ops.nn.attention import AttentionBackward
from strata.runtime import CompilePipeline, Session
from strata.runtime.storage.stored import read_plan, write_plan


def other(search: tune.Search) -> str:
    """A schedule that is not what the table says."""
    table = str(search.render(""))
    return next(text for text in search.candidates() if str(search.render(text)) != table)


def attentions(backend: TritonBackend) -> int:
    """Of attention, of one of few queries, and of gradients; gives how many schedules agreed."""
    count = 0
    for queries, keys, is_backward in ((40, 33, False), (1, 300, False), (33, 33, True)):
        g = Graph("attention")
        q, k, v = (g.input(name, f32[1, 2, n, 16]) for name, n in (("q", queries), ("k", keys), ("v", keys)))
        if is_backward:
            g.outputs(*AttentionBackward(2, 2, 16, causal=True)(q, k, v, g.input("dy", f32[1, 2, queries, 16])))
        else:
            g.outputs(ops.attention(q, k, v, layout="bhsd"))
        plan: Lir = CompilePipeline("triton_interpreter").compile(g).lir
        (step,) = plan.schedule
        searches = tune.searches_of(step, plan, HOPPER)
        assert len(searches) == 1 + is_backward
        texts: list[str] = []
        for make in searches:
            found = tune.search_schedules(make(texts), backend.driver, HOPPER, most=4)
            assert found is not None
            assert found.trials >= 2
            count += found.trials
            texts.append(other(make(texts)))
        vars(tune)["best_schedule"] = lambda search, *_: tune.FoundSchedule(other(search), 1.0, 2.0, 4)
        tuned = tune.tuned(plan, backend.driver, HOPPER, "a card")
        (made,) = tuned.schedule
        assert made.schedule == BESIDE.join(texts)
        assert tuned.fingerprint() != plan.fingerprint()
        data = write_plan(tuned)
        assert data is not None
        (read,) = read_plan(data, None, lambda g=g: g).schedule  # type: ignore[misc]
        assert (read.schedule, read.views) == (made.schedule, made.views)
        rendered = rendered_step(made, HOPPER)
        assert rendered is not None
        assert str(rendered) != str(rendered_step(step, HOPPER))
    return count


def main() -> int:
    backend: TritonBackend = interpreted()
    register_backend("triton_interpreter", backend)
    g = Graph("layer")
    x, w, b = g.input("x", bf16[sym("B", 1, 64), 64]), g.param("w", bf16[64, 96]), g.param("b", bf16[96])
    g.outputs(ops.gelu(ops.matmul(x, w) + b))
    plan: Lir = CompilePipeline("triton_interpreter").compile(g).lir
    (kernel,) = plan.kernels.values()
    product = find_product(normal_form(kernel), HOPPER)
    assert product is not None
    candidates = list(product_candidates(product.form, product.sums, HOPPER))
    assert len(set(candidates)) == len(candidates) > 1
    vars(tune).update(compile_ahead=lambda *_: {}, LAUNCHES=1, ROUNDS=1)  # nothing is compiled here, or worth timing
    search = tune.search_of(kernel, HOPPER)
    assert search is not None
    found = tune.search_schedules(search, backend.driver, HOPPER, most=6)
    assert found is not None
    assert found.trials >= 2
    found = replace(found, schedule=str(candidates[1]))
    chosen = replace(kernel, schedule=found.schedule)
    assert parse_kernel(show_kernel(chosen)) == chosen, "a schedule is part of the text of its kernel"
    told: list[tuple[int, int]] = []
    vars(tune)["best_schedule"] = lambda *_: found
    tuned = tune.tuned(plan, backend.driver, HOPPER, "a card", lambda *step: told.append(step))
    assert told == [(0, 1)]
    assert [k.schedule for k in tuned.kernels.values()] == [found.schedule]
    compiled = Session("triton_interpreter").compile(g)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (64, 96)), ("b", (96,))):
        compiled.set_param(name, rng.standard_normal(shape).astype(bf16.np))
    compiled.run(x=rng.standard_normal((5, 64)).astype(bf16.np))
    trials = found.trials + attentions(backend)
    print(f"{trials} schedules in Triton's interpreter agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
