"""Processes that make machine code: the same code as here, errors that say where, and none of them left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from strata.backends.llvm.jit import compile_workers as makers
from strata.backends.llvm.jit import jit
from strata.backends.llvm.jit import worker_process as child
from strata.backends.llvm.jit.generator import object_code
from strata.backends.llvm.jit.outlined_functions import INNER
from strata.backends.llvm.jit.worker_process import Died
from strata.core import Target
from strata.errors import CompileError

HOST = Target.host()


def text(number: int) -> str:
    return f"define i64 @k(i64 %a) {{\n  %b = mul i64 %a, {number}\n  ret i64 %b\n}}\n"


def test_the_same_code() -> None:
    texts = [text(n) for n in range(20)]
    expected = [object_code(t, HOST, 2) for t in texts]
    with makers.many(100, 2):
        there = makers.current()
        assert there is not None
        with ThreadPoolExecutor(5) as pool:
            assert list(pool.map(lambda t: jit.compile_text(t, HOST), texts)) == expected
        with makers.many(100, 2):
            assert makers.current() is there
        assert makers.current() is there
    assert makers.current() is None
    assert all(each.process.returncode is not None for each in there._all)


def test_inner_loops_are_the_same_code_wherever_they_are_made() -> None:
    address = "getelementptr i64, ptr"
    loop = (
        "define void @k(ptr %x, i64 %n) {\nentry:\n  br label %l\nl:\n"
        "  %i = phi i64 [ 0, %entry ], [ %j, %l ]\n  %m = mul i64 %i, 3\n"
        f"  %p = {address} %x, i64 %m\n  %v = load i64, ptr %p\n  %q = {address} %x, i64 %i\n  store i64 %v, ptr %q\n"
        "  %j = add i64 %i, 7\n  %c = icmp slt i64 %j, %n\n  br i1 %c, label %l, label %e\ne:\n  ret void\n}\n"
    )
    with makers.many(100, 1):
        plain = jit.compile_text(loop, HOST)
        assert jit.compile_text(loop, HOST, level=INNER) == object_code(loop, HOST, INNER) != plain
        assert jit.compile_text(loop, HOST) == plain


def test_few_modules_need_no_process() -> None:
    with makers.many(makers.FEW - 1, 2):
        assert makers.current() is None


def test_text_that_is_not_well_formed() -> None:
    with makers.many(100, 1):
        with pytest.raises(CompileError, match="line 2") as error:
            jit.compile_text("define i64 @k(i64 %a) {\n  %b = mul i64 %a, %c\n  ret i64 %b\n}", HOST)
        assert error.value.code == "C120"
        assert jit.compile_text(text(3), HOST) == object_code(text(3), HOST, 2)  # the process is still there


def test_processes_that_die() -> None:
    with makers.many(100, 1):
        there = makers.current()
        assert there is not None
        for each in there._all:
            each.process.kill()
            each.process.wait()
        assert jit.compile_text(text(5), HOST) == object_code(text(5), HOST, 2)


def test_an_answer_that_was_not_waited_for_is_nobody_elses() -> None:
    """As when Ctrl-C comes between a question and its answer."""

    class Interrupted:
        def __init__(self, pipe: Any) -> None:
            self.pipe = pipe

        def readline(self) -> bytes:
            raise KeyboardInterrupt

        def close(self) -> None:
            self.pipe.close()

    with makers.many(100, 1):
        there = makers.current()
        assert there is not None
        process = there._all[0].process
        process.stdout = Interrupted(process.stdout)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            there.object_code(text(3), HOST, 2)
        with pytest.raises(Died):
            there.object_code(text(5), HOST, 2)
        assert jit.compile_text(text(5), HOST) == object_code(text(5), HOST, 2)


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("no processes here")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with makers.many(100, 2):
        assert makers.current() is None
        assert jit.compile_text(text(7), HOST) == object_code(text(7), HOST, 2)


def test_one_process_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = subprocess.Popen

    def once(*args: Any, **options: Any) -> Any:
        if started:
            raise BlockingIOError("no more processes")
        started.append(start(*args, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", once)
    with makers.many(100, 4):
        assert jit.compile_text(text(7), HOST) == object_code(text(7), HOST, 2)
    assert started[0].returncode is not None


@pytest.mark.parametrize("other", ["/bin/true", "/bin/cat"])
def test_an_interpreter_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: str) -> None:
    """Python inside of another program: its executable is that program."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nexec {other}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(child, "START_SECONDS", 0.5)
    with makers.many(100, 2):
        assert jit.compile_text(text(7), HOST) == object_code(text(7), HOST, 2)


def test_a_frozen_program_does_not_start_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with makers.many(100, 2):
        assert makers.current() is None
        assert jit.compile_text(text(7), HOST) == object_code(text(7), HOST, 2)


def test_answers_to_other_questions_are_not_taken() -> None:
    with makers.many(100, 1):
        there = makers.current()
        assert there is not None
        there.object_code(text(2), HOST, 2)
        there._all[0]._asked += 1  # as if somebody else had asked, too
        assert jit.compile_text(text(3), HOST) == object_code(text(3), HOST, 2)


def test_a_forked_child_leaves_them_to_its_parent() -> None:
    with makers.many(100, 1):
        child = os.fork()
        if child == 0:
            os._exit(0 if makers.current() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert jit.compile_text(text(9), HOST) == object_code(text(9), HOST, 2)


PROGRAM = """
import json, sys
import numpy as np
import strata as st
from strata.config import using
g = st.Graph("many")
x = y = g.input("x", (4, 8))
for i in range(12):
    y = (y @ g.param(f"w{i}", (8 + i, 9 + i))).exp().sum(axis=-1, keepdims=True) * 0.001 + np.ones((1, 9 + i), "f4")
g.outputs(y)
with using(cache_dir=sys.argv[1]):
    made = st.Session("cpu").compile(g)
    for i in range(12):
        made.set_param(f"w{i}", np.full((8 + i, 9 + i), 0.01, "f4"))
    result = made.run(x=np.ones((4, 8), "f4"))[0]
z = np.ones((4, 8))
for i in range(12):
    z = np.exp(z @ np.full((8 + i, 9 + i), 0.01)).sum(-1, keepdims=True) * 0.001 + np.ones((1, 9 + i))
print(json.dumps(["llvmlite.binding" in sys.modules, bool(np.allclose(result, z, rtol=1e-4))]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="objects are put into memory without LLVM on Linux")
def test_a_model_is_compiled_without_llvm_in_its_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == [False, True]
