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
graph = st.Graph("g")
graph.outputs(graph.input("x", (5, 7)) * 2.0)
try:
    st.Session("cpu").compile(graph).run(x=np.zeros((5, 7), np.float32))
except st.errors.DeviceError as error:
    print(error.summary)
"""


def test_a_bundle_without_a_code_generator(tmp_path: Path) -> None:
    graph = st.Graph("net")
    x = graph.input("x", (st.sym("n", 1, 64), 16))
    graph.outputs(st.ops.softmax(st.ops.gelu(x @ graph.param("w", (16, 8))), 1))
    compiled = st.Session("cpu").compile(graph)
    compiled.set_param("w", np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8))
    compiled.save(tmp_path / "net.strata")
    root = Path(__file__).parents[3]
    program = f"import sys; sys.path.insert(0, {str(root)!r})\n{PROGRAM}"
    cache = {"STRATA_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=cache, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the code generator is not installed" in done.stdout
    for n in (1, 3, 8):
        given = np.linspace(-1, 1, n * 16, dtype=np.float32).reshape(n, 16)
        np.testing.assert_array_equal(np.load(tmp_path / f"out{n}.npy"), compiled.run(x=given)[0])
