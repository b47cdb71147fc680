"""Objects put into memory by our own linker: the same results as the code generator's, and what it leaves to that."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from strata.backends.llvm import compile_text, load
from strata.backends.llvm.jit.elf_loader import Linked, is_able, link
from strata.core import Target

pytestmark = pytest.mark.skipif(not is_able(), reason="objects of x86-64 Linux")
CALLS = """
@table = private unnamed_addr constant [4 x float] [float 1.0, float 2.0, float 3.0, float 4.0], align 64
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i32 @getpid()
define internal float @third(ptr %p) noinline nounwind {
  %a = getelementptr float, ptr %p, i64 2
  %x = load float, ptr %a
  ret float %x
}
define float @from_table() nounwind {
  %x = call float @third(ptr @table)
  %y = fmul float %x, 0x3FF8000000000000
  ret float %y
}
define void @copied(ptr %to, ptr %from, i64 %count) nounwind {
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %count, i1 false)
  ret void
}
define i32 @process() nounwind {
  %x = call i32 @getpid()
  ret i32 %x
}
"""


def test_constants_calls_and_functions_of_the_process() -> None:
    linked = link(compile_text(CALLS, Target.host()), ["from_table", "copied", "process"])
    assert linked is not None
    assert ctypes.CFUNCTYPE(ctypes.c_float)(linked["from_table"])() == 4.5
    assert ctypes.CFUNCTYPE(ctypes.c_int)(linked["process"])() == os.getpid()
    source, target = np.arange(1000.0), np.zeros(1000)
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    ctypes.CFUNCTYPE(None, *kinds)(linked["copied"])(target.ctypes.data, source.ctypes.data, source.nbytes)
    assert np.array_equal(source, target)


@pytest.mark.parametrize(
    "text",
    [
        "@count = global i64 0\ndefine i64 @f() nounwind {\n %x = load i64, ptr @count\n ret i64 %x\n}",
        "declare void @no_such_function()\ndefine void @f() nounwind {\n call void @no_such_function()\n ret void\n}",
    ],
)
def test_what_it_does_not_know_is_left_to_the_code_generator(text: str) -> None:
    assert link(compile_text(text, Target.host()), ["f"]) is None


def test_names_and_files_that_are_not_there() -> None:
    data = compile_text("define void @f() nounwind {\n ret void\n}", Target.host())
    assert link(data, ["f"]) is not None
    assert link(data, ["g"]) is None
    for size in (0, 10, 63, 100, len(data) // 2):
        assert link(data[:size], ["f"]) is None
    assert link(b"MZ" + data[2:], ["f"]) is None


def test_memory_is_given_back() -> None:
    data = compile_text("define void @f() nounwind {\n ret void\n}", Target.host())

    def size() -> int:
        """Bytes of memory that can be run and belong to no file; neighbours are one mapping."""
        with open("/proc/self/maps", encoding="ascii") as file:
            spans = [line.split()[0].split("-") for line in file if "r-xp 00000000 00:00" in line]
        return sum(int(end, 16) - int(start, 16) for start, end in spans)

    kept = [link(data, ["f"]) for _ in range(50)]
    before = size()
    assert all(isinstance(k, Linked) for k in kept)
    kept.clear()
    gc.collect()
    assert before - size() >= 50 * 4096


def test_loaded_code_keeps_its_memory() -> None:
    code = load(compile_text(CALLS, Target.host()), ["from_table"])
    function = ctypes.CFUNCTYPE(ctypes.c_float)(code.address("from_table"))
    gc.collect()
    assert function() == 4.5


def test_a_warm_start_does_without_the_code_generator() -> None:
    """A second process finds its machine code stored, and never loads the code generator."""
    program = """
import sys
import numpy as np
import strata as st
g = st.Graph("warm")
x = g.input("x", (16, 16))
g.outputs(st.ops.softmax(x @ x, -1) + 1.25)
print(st.Session("cpu").compile(g).run(x=np.ones((16, 16), np.float32))[0].sum())
print("llvmlite.binding" in sys.modules)
"""
    lines = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
             for _ in range(2)]  # fmt: skip
    assert lines[0][0] == lines[1][0]
    assert lines[1][1] == "False"


def test_calls_of_code_that_is_known_by_its_address() -> None:
    """Directly, and through a word that holds the address, as pointers to functions of other objects are made."""
    part = link(compile_text("define i64 @two() nounwind {\n ret i64 2\n}", Target.host()), ["two"])
    assert part is not None
    text = """
declare i64 @two()
define i64 @direct() nounwind {
  %x = call i64 @two()
  %y = add i64 %x, 1
  ret i64 %y
}
define ptr @pointer() nounwind {
  ret ptr @two
}
"""
    data = compile_text(text, Target.host())
    assert link(data, ["direct", "pointer"]) is None
    code = link(data, ["direct", "pointer"], {"two": part["two"]})
    assert code is not None
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(code["direct"])() == 3
    assert ctypes.CFUNCTYPE(ctypes.c_void_p)(code["pointer"])() == part["two"]
