"""The search for schedules of matmuls, over Triton's interpreter: candidates agree, and the winner is kept.

TRITON_INTERPRET=1 python -m tests.backends.triton_tune
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from strata import ops
from strata.backends import register_backend
from strata.backends.triton.backend import TritonBackend, interpreted
from strata.backends.triton.codegen.product import find_product
from strata.backends.triton.codegen.render import HOPPER, normal_form
from strata.backends.triton.tuning import tune
from strata.backends.triton.tuning.search import product_candidates
from strata.core import bf16, sym
from strata.kernel import parse_kernel, show_kernel
from strata.lir import Lir
from strata.mir import Graph
from strata.runtime import CompilePipeline, Session


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
    vars(tune)["compile_ahead"] = lambda *_: {}  # nothing is compiled here
    found = tune.search_schedules(replace(kernel, name="kernel"), backend.driver, HOPPER, most=6)
    assert found is not None
    assert found.trials >= 2
    chosen = replace(kernel, schedule=found.schedule)
    assert parse_kernel(show_kernel(chosen)) == chosen, "a schedule is part of the text of its kernel"
    told: list[tuple[int, int]] = []
    vars(tune)["search_schedules"] = lambda *_: found
    tuned = tune.tuned(plan, backend.driver, HOPPER, "a card", lambda *step: told.append(step))
    assert told == [(0, 1)]
    assert [k.schedule for k in tuned.kernels.values()] == [found.schedule]
    compiled = Session("triton_interpreter").compile(g)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (64, 96)), ("b", (96,))):
        compiled.set_param(name, rng.standard_normal(shape).astype(bf16.np))
    compiled.run(x=rng.standard_normal((5, 64)).astype(bf16.np))
    print(f"{found.trials} schedules in Triton's interpreter agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
