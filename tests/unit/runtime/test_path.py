"""The way of one program through the rooms: the README's layer, compiled for the first time."""

from pathlib import Path

import strata as st
from strata.config import using
from tests.counts import codes

PACKAGE = Path(st.__file__).parent
# from a graph to code, in the order in which docs/concepts draws it; a room stands where the program first enters it
STAGES = [
    "runtime/execute",  # Session.compile
    "runtime/compile",  # the pipeline
    "runtime/storage",  # is there a plan already?
    "passes/quant",
    "passes/canonicalize",
    "passes/layout",
    "passes/fuse",
    "lir",  # fusion, buffers: the plan
    "backends/llvm/runtime",  # the executable
    "backends/llvm/codegen",
    "backends/llvm/gemm",  # it is a matmul with an epilogue
    "kernel/passes",  # its few rows are loops, too
]


def _layer(rows: int, columns: int) -> st.Graph:
    g = st.Graph("layer")
    x = g.input("x", (st.sym("batch", 1, 512), rows))
    w, b = g.param("w", (rows, columns)), g.param("b", (columns,))
    return g.outputs((x @ w + b).gelu())


def _rooms(graph: st.Graph) -> list[str]:
    session = st.Session("cpu")
    entered = [Path(code.co_filename).parent for code in codes(lambda: session.compile(graph))]
    inside = [str(folder.relative_to(PACKAGE)) for folder in entered if folder.is_relative_to(PACKAGE)]
    return list(dict.fromkeys(inside))


def test_a_program_goes_through_the_rooms_in_their_order(tmp_path: Path) -> None:
    with using(cache_dir=tmp_path):
        _rooms(_layer(48, 80))  # what is imported on the way
        found = _rooms(_layer(267, 1013))
    assert [room for room in found if room in STAGES] == STAGES
    assert not any(room.startswith(("tensor", "nn", "models", "io", "serving", "cli", "transforms")) for room in found)


def test_the_second_time_no_stage_of_the_compiler_is_entered_but_the_key(tmp_path: Path) -> None:
    """The plan is in the store where it took long to make, and the code in the process: nothing is generated again."""
    with using(cache_dir=tmp_path):
        graph = _layer(48, 80)
        _rooms(graph)
        found = _rooms(graph)
    assert "backends/llvm/gemm" not in found
    assert "backends/llvm/loops" not in found
