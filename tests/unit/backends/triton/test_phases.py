"""Kernels that run one after the other, as Triton programs: each may be split once more."""

from __future__ import annotations

from strata.backends.triton.codegen.render import render_phases
from strata.kernel import Phases, parse_kernel

LONG = """kernel @{y}(x: f32[1000003]) -> {y}: f32[1] {{
  axis i in 1
  axis j in 1000003
  %0 = x[j]
  %1 = sum %0 over j
  store {y}[i] = %1 over i
}}"""


def test_two_split_kernels_have_scratch_of_their_own() -> None:
    first, second = (parse_kernel(LONG.format(y=name)) for name in ("a", "b"))
    rendered = render_phases("both", Phases((first, second)))
    names = [b.name for b in rendered.scratch]
    assert names == ["part0", "part1"]
    for name, here in zip(names, ("both_0", "both_1"), strict=True):
        users = {p.name for p in rendered.programs if name in p.body}
        assert users == {here, f"{here}_1"}
