"""A slim install: bundles run where NumPy and ml_dtypes are all there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import strata as st

PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("llvmlite", "scipy", "rich", "onnx", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import numpy as np
import strata as st

compiled = st.load_compiled("net.strata")
for n in (1, 3, 8):
    np.save(f"out{n}.npy", compiled.run(x=np.linspace(-1, 1, n * 16, dtype=np.float32).reshape(n, 16))[0])
loaded = sorted(name for name in sys.modules if name.startswith("strata."))
graph = st.Graph("g")
graph.outputs(graph.input("x", (5, 7)) * 2.0)
try:
    st.Session("cpu").compile(graph).run(x=np.zeros((5, 7), np.float32))
except st.errors.DeviceError as error:
    print(error.summary)
print(*loaded, sep="\\n")
"""

# What a bundle of ready code needs; `folder.` stands for all in it. The rest plans, generates or explains.
NEEDED = (
    "modules", "places", "errors", "kinds", "arguments", "config", "core", "core.", "cache", "cache.",
    *(f"kernel.{name}" for name in ("scalars", "ir", "algebra", "text", "nest", "schedule", "order")),
    "kernel", "mir", "mir.", "lir", *(f"lir.{name}" for name in ("ir", "views", "memory", "sizes", "verify")),
    "lir.donation", "passes", "passes.base", "passes.fuse", "passes.fuse.limits",
    *("backends", "backends.base", "backends.registry", "backends.resident", "backends.llvm", "backends.llvm.backend"),
    *("backends.llvm.executor", "backends.llvm.executor.", "backends.llvm.runtime", "backends.llvm.runtime."),
    *(f"backends.llvm.jit.{name}" for name in ("jit", "elf_loader", "compile_workers", "code_cache")),
    *("backends.llvm.jit", "backends.llvm.jit.calling_convention", "backends.llvm.codegen"),
    *("backends.llvm.codegen.kernels", "backends.llvm.ir", "backends.llvm.ir.overrides", "backends.llvm.ir.status"),
    *("runtime", "runtime.compile", "runtime.compile.options", "runtime.execute", "runtime.execute."),
    *("runtime.report", "runtime.report.observe", "runtime.storage", "runtime.storage.bundle"),
    *("runtime.storage.container", "runtime.storage.stored"),
)  # fmt: skip
# what an op that runs whole needs besides: its class, and how it is called
ATTENTION = ("ops", "ops.", "backends.attention", "backends.llvm.attention", "backends.llvm.attention.")
ATTENTION += ("backends.llvm.gemm", "backends.llvm.gemm.", "backends.llvm.math", "backends.llvm.math.")
ATTENTION += ("backends.llvm.ir.",)
LEAST_OPS = 20  # modules of ops at most: of 70


def _run(program: str, folder: Path) -> str:
    root = Path(__file__).parents[3]
    program = f"import sys; sys.path.insert(0, {str(root)!r})\n{program}"
    cache = {"STRATA_CACHE_DIR": str(folder / "cache"), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=cache, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _beyond(loaded: list[str], allowed: tuple[str, ...]) -> list[str]:
    names = [name.removeprefix("strata.") for name in loaded if name.startswith("strata.")]
    folders = tuple(name for name in allowed if name.endswith("."))
    return [name for name in names if name not in allowed and not name.startswith(folders)]


def test_a_bundle_without_a_code_generator(tmp_path: Path) -> None:
    graph = st.Graph("net")
    x = graph.input("x", (st.sym("n", 1, 64), 16))
    graph.outputs(st.ops.softmax(st.ops.gelu(x @ graph.param("w", (16, 8))), 1))
    compiled = st.Session("cpu").compile(graph)
    compiled.set_param("w", np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8))
    compiled.save(tmp_path / "net.strata")
    told = _run(PROGRAM, tmp_path)
    assert "the code generator is not installed" in told
    assert _beyond(told.split(), NEEDED) == []
    for n in (1, 3, 8):
        given = np.linspace(-1, 1, n * 16, dtype=np.float32).reshape(n, 16)
        np.testing.assert_array_equal(np.load(tmp_path / f"out{n}.npy"), compiled.run(x=given)[0])


def test_an_op_that_runs_whole_loads_its_own_family(tmp_path: Path) -> None:
    graph = st.Graph("net")
    x = graph.input("x", (st.sym("n", 1, 64), 2, 8, 16))
    graph.outputs(st.ops.attention(x, x, x, layout="bhsd"))
    st.Session("cpu").compile(graph).save(tmp_path / "net.strata")
    told = _run(
        "import numpy as np, strata as st\n"
        "st.load_compiled('net.strata').run(x=np.zeros((3, 2, 8, 16), np.float32))\n"
        "print(*sys.modules, sep='\\n')",
        tmp_path,
    ).split()
    assert _beyond(told, NEEDED + ATTENTION) == []
    assert sum(name.startswith("strata.ops.") for name in told) <= LEAST_OPS
    assert not {"llvmlite.binding", "scipy"} & set(told)
