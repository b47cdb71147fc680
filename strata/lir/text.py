"""The plan as text: buffers, then steps.

    lir @score target x86_64 {
      buffer x : f32[4, 8] input x
      buffer %0 : f32[4] scratch 0..1
      buffer out0 : f32[4, 8] result 0
      run k0(x) -> %0  # reduce_max
      run k1(x, %0) -> out0  # subtract + exp
    }
"""

from __future__ import annotations

from strata.lir.ir import Buffer, Lir, Step


def show(lir: Lir) -> str:
    """The plan of a graph, kernels by name."""
    lines = [f"lir @{lir.name} target {lir.target.cpu} {{"]
    lines += [f"  {_buffer(b)}" for b in lir.buffers]
    lines += [f"  {_step(s)}" for s in lir.schedule]
    lines.append(f"  return {', '.join(lir.io.outputs)}")
    return "\n".join([*lines, "}"])


def _buffer(b: Buffer) -> str:
    detail = f" {b.birth}..{b.death}" if b.role == "scratch" else f" {b.key}" if b.key is not None else ""
    shared = f" in {b.alias}" if b.alias is not None else ""
    return f"buffer {b.name} : {b.type} {b.role}{detail}{shared}"


def _step(s: Step) -> str:
    kind = "run" if s.kernel is not None else "call"
    updates = f" from {s.updates}" if s.updates is not None else ""
    return f"{kind} {s.name}({', '.join(s.inputs)}) -> {', '.join(s.outputs)}{updates}  # {s.label}"
