"""The code generator: many threads at once, equal texts once, and modules that LLVM rejects or cannot select."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata
from strata.backends.llvm.codegen import kernels
from strata.backends.llvm.codegen.compile import lower
from strata.backends.llvm.executor.arena import Arena
from strata.backends.llvm.executor.thread_pool import native_code
from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.ir.overrides import NativeOp, Planned
from strata.backends.llvm.jit import isolate, jit
from strata.backends.llvm.jit.calling_convention import LoopUsage, MatmulUsage, read_usage
from strata.backends.llvm.jit.isolate import KNOWN, is_unusual
from strata.backends.llvm.jit.outlined_functions import split
from strata.backends.llvm.jit.worker_process import Died
from strata.cache import default_store
from strata.config import using
from strata.core import Table, Target, sym
from strata.errors import CompileError, RunError
from strata.mir import Graph
from strata.runtime import Session

HOST = Target.host()
IS_X86 = HOST.triple.startswith("x86_64")


def plain(number: int) -> str:
    return f"define i64 @k(i64 %a) {{\n  %b = mul i64 %a, {number}\n  ret i64 %b\n}}\n"


def special(name: str, kind: str, *rest: str) -> str:
    types = ", ".join([kind, *rest])
    arguments = ", ".join([f"{kind} %a", *(f"{t} %a" if t == kind else f"{t} -1" for t in rest)])
    return (
        f"define {kind} @k({kind} %a) {{\n  %r = call {kind} @llvm.{name}({arguments})\n  ret {kind} %r\n}}\n"
        f"declare {kind} @llvm.{name}({types})\n"
    )


WIDE = special("x86.avx512.rcp14.ps.512", "<16 x float>", "<16 x float>", "i16")


def test_threads_make_the_same_objects() -> None:
    texts = [plain(n) for n in range(40)]
    one_by_one = [jit.compile_text(t, HOST) for t in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda t: jit.compile_text(t, HOST), texts * 3)) == one_by_one * 3


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("define i64 @k(i64 %a) {\n  %b = mul i64 %a, %c\n  ret i64 %b\n}", "%b = mul i64 %a, %c"),
        ("define i64 @k(i64 %a) {\n  ret i32 %a\n}", "ret i32 %a"),
    ],
)
def test_text_that_is_not_well_formed(text: str, line: str) -> None:
    with pytest.raises(CompileError, match="line") as error:
        jit.compile_text(text, HOST)
    assert error.value.code == "C120"
    assert line in str(error.value)


def test_module_that_verification_rejects() -> None:
    with pytest.raises(CompileError) as error:
        jit.compile_text(
            "define i64 @k(i64 %a) {\n  br label %x\nx:\n  %b = add i64 %c, 1\n  %c = add i64 %b, 1\n  ret i64 %c\n}",
            HOST,
        )
    assert error.value.code == "C120"


@pytest.mark.skipif(not IS_X86, reason="instructions of x86")
@pytest.mark.parametrize("level", ["baseline", "avx2"])
def test_instruction_that_the_target_lacks_is_an_error(level: str) -> None:
    """LLVM would end this process."""
    with pytest.raises(CompileError, match=level) as error:
        jit.compile_text(WIDE, Target.named(level))
    assert error.value.code == "C122"


def test_assembly_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(CompileError) as error:
        jit.compile_text('define i64 @k() {\n  %r = call i64 asm "bogus $0", "=r"()\n  ret i64 %r\n}', HOST)
    assert error.value.code == "C122"


def test_vectors_without_a_length_are_an_error() -> None:
    text = "define <vscale x 4 x i32> @k(<vscale x 4 x i32> %a) {\n  ret <vscale x 4 x i32> %a\n}"
    if not IS_X86:
        pytest.skip("other processors have them")
    with pytest.raises(CompileError) as error:
        jit.compile_text(text, HOST)
    assert error.value.code == "C122"


def test_unusual_text_with_a_mistake_names_its_line() -> None:
    with pytest.raises(CompileError) as error:
        jit.compile_text(WIDE.replace("ret <16 x float> %r", "ret <16 x float> %s"), HOST)
    assert error.value.code == "C120"


def test_target_that_llvm_does_not_know() -> None:
    with pytest.raises(CompileError) as error:
        jit.compile_text(plain(3), replace(HOST, triple="pdp11-dec-unix-gnu"))
    assert error.value.code == "C122"
    with pytest.raises(CompileError):
        jit.assembly(plain(3), replace(HOST, triple="pdp11-dec-unix-gnu"))


def test_code_for_another_processor() -> None:
    other = Target.named("neon") if IS_X86 else replace(Target.named("baseline"), triple="x86_64-unknown-linux-gnu")
    made = jit.compile_text(plain(5), other)
    assert made[:4] in (b"\x7fELF", b"\xcf\xfa\xed\xfe")
    assert made != jit.compile_text(plain(5), HOST)


@pytest.mark.skipif(not IS_X86, reason="instructions of x86")
def test_what_counts_as_unusual() -> None:
    dot = special("x86.avx512.pmaddw.d.512", "<16 x i32>")
    assert not is_unusual(plain(1), HOST)
    assert not is_unusual(special("fma.v8f32", "<8 x float>"), Target.named("baseline"))
    assert not is_unusual(dot, Target.named("avx512"))
    assert is_unusual(dot, Target.named("avx2"))
    assert is_unusual(special("x86.something.new", "i64"), HOST)
    assert is_unusual(plain(1), Target.named("neon"))


def test_the_emitters_use_known_instructions_only() -> None:
    """Others would each be compiled in a process of their own: give `isolate.KNOWN` the features that they need."""
    used = set[str]()
    for file in (Path(strata.__file__).parent / "backends" / "llvm").glob("*.py"):
        used |= set(re.findall(r"\"llvm\.((?:x86|aarch64)\.[\w.]+)", file.read_text("utf-8")))
    # a name that goes on with a width or a kind ends in a dot
    strange = {n for n in used if n not in KNOWN and not (n.endswith(".") and any(k.startswith(n) for k in KNOWN))}
    assert not strange, f"not in isolate.KNOWN: {sorted(strange)}"


def test_equal_texts_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native_code()  # what runs kernels is compiled with the first ones
    compiled: list[str] = []
    real = jit.compile_text
    monkeypatch.setattr(
        jit, "compile_text", lambda text, *more, **named: compiled.append(text) or real(text, *more, **named)
    )

    def op(name: str, number: int) -> NativeOp:
        def emit(module: Any) -> None:
            f = module.function("f", (("ptr", "arguments"), ("i64", "begin"), ("i64", "end")))
            f.store("i64", number, "%arguments", 8)
            f.ret()

        return NativeOp(name, emit, ("f",), lambda sizes: Planned([]))

    with using(cache_dir=tmp_path):
        sources = [kernels.op_source(op(f"{tmp_path} {i}", i % 3), HOST) for i in range(12)]
        pieces = kernels.native_pieces([*sources, sources[0]], HOST)
    assert len(compiled) == len(set(compiled)) == 3
    assert pieces[0] is pieces[-1]
    assert len({p.code.key for p in pieces}) == 12
    assert len({p.code.address("f") for p in pieces}) == 3


def test_failure_of_one_piece_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def emit(module: Any, text: str) -> None:
        f = module.function("f", (("ptr", "arguments"), ("i64", "begin"), ("i64", "end")))
        f.op(text)
        f.ret()

    def op(name: str, text: str) -> NativeOp:
        return NativeOp(f"{tmp_path} {name}", lambda m: emit(m, text), ("f",), lambda sizes: Planned([]))

    with using(cache_dir=tmp_path):
        good = [kernels.op_source(op(f"g{i}", f"add i64 %begin, {i}"), HOST) for i in range(5)]
        bad = kernels.op_source(op("bad", "add i64 %begin, %nothing"), HOST)
        for _ in range(2):  # a second try fails alike, and does not wait for the first one
            with pytest.raises(CompileError, match="nothing"):
                kernels.native_pieces([*good, bad], HOST)
        assert len(kernels.native_pieces(good, HOST)) == 5


def chain(name: str, steps: int) -> Graph:
    g = Graph(name)
    n = sym("n", 1, 512)
    x = g.input("x", (n, 24))
    y = x
    for i in range(steps):
        y = y @ g.param(f"w{i}", (24, 24)) * (i + 1.0)
    g.outputs(y)
    return g


def test_many_threads_compile_the_same_graph(rng: np.random.Generator, tmp_path: Path) -> None:
    weights = {f"w{i}": rng.standard_normal((24, 24)).astype(np.float32) / 5 for i in range(4)}
    x = rng.standard_normal((7, 24)).astype(np.float32)

    def result(_: int) -> bytes:
        made = Session("cpu").compile(chain("threads", 4))
        made.set_params(weights)
        return made.run(x=x)[0].tobytes()

    with using(cache_dir=tmp_path), ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(result, range(16)))) == 1


def test_the_first_compile_of_a_process_may_come_from_many_threads(tmp_path: Path) -> None:
    """The pool and the code that everybody shares are made once, whoever comes first."""
    program = """
import threading
import numpy as np
import strata as st
from strata.backends.llvm.executor.thread_pool import default_pool
start, results, pools = threading.Barrier(12), [], []
def run():
    g = st.Graph("first")
    x = g.input("x", (64, 300), "f32")
    g.outputs((x @ g.param("w", (300, 200), "f32")).softmax(axis=-1))
    start.wait()
    pools.append(default_pool())
    made = st.Session("cpu").compile(g)
    made.set_param("w", np.full((300, 200), 0.5, "f4"))
    for _ in range(20):
        results.append(made.run(x=np.ones((64, 300), "f4"))[0].tobytes())
threads = [threading.Thread(target=run) for _ in range(12)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(set(results)) == 1 and len(results) == 240, len(results)
assert len(set(map(id, pools))) == 1
"""
    for _ in range(3):  # a cold store, then a warm one
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "STRATA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_usage_is_kept_beside_the_code() -> None:
    made = Session("cpu").compile(chain("usage", 2))
    usages = [k.usage for k in made._executable.kernels.values()]  # type: ignore[attr-defined]
    assert any(isinstance(u, MatmulUsage) for u in usages)
    g = Graph("loops")
    g.outputs(g.input("x", (sym("n"), 5)) * 2.0)
    usages += [k.usage for k in Session("cpu").compile(g)._executable.kernels.values()]  # type: ignore[attr-defined]
    assert any(isinstance(u, LoopUsage) for u in usages)
    assert [read_usage(u.to_text()) for u in usages] == usages


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_does_not_wait_for_compiles_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_loaded", Table("code"))
    children = []

    def make(_: Any) -> list[int]:
        children.append(os.fork())
        if children[-1] == 0:  # its parent's thread is not there to make it
            signal.alarm(60)
            os._exit(kernels._loaded.get_or_make("pending", lambda: 0))
        return [1]

    assert kernels._loaded.get_or_make_all(["pending"], make) == [1]
    assert os.waitpid(children[0], 0)[1] == 0


def test_memory_that_the_system_does_not_have() -> None:
    for size in (1 << 50, 1 << 62, 1 << 70):
        with pytest.raises(RunError) as error:
            Arena(size)
        assert error.value.code == "X121"


def test_store_is_read_before_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with using(cache_dir=tmp_path):
        monkeypatch.setattr(kernels, "_loaded", Table("code"))
        Session("cpu").compile(chain("stored", 3))
        assert any(e.about.get("kind") == "kernel" for e in default_store().entries())
        monkeypatch.setattr(kernels, "_loaded", Table("code"))

        def refuse(*_: Any, **__: Any) -> bytes:
            raise AssertionError("compiled again")

        monkeypatch.setattr(jit, "compile_text", refuse)
        Session("cpu").compile(chain("stored", 3))


def doubled(name: str, number: int, *, table: bool = False) -> IrModule:
    """f(p) stores twice a number, through an internal function that others may share."""
    module = IrModule(HOST.triple)
    helper = module.function("helper", (("ptr", "p"),), attributes="nounwind noinline", linkage="internal")
    if table:
        value = helper.load("i64", module.table("i64", [number]), 8)
        helper.store("i64", value, "%p", 8)
    else:
        helper.store("i64", number, "%p", 8)
    helper.ret()
    twice = module.function("twice", (("ptr", "p"),), attributes="nounwind noinline", linkage="internal")
    twice.call("void", "helper", ("ptr", "%p"))
    twice.store("i64", twice.mul(twice.load("i64", "%p", 8), 2), "%p", 8)
    twice.ret()
    f = module.function(name, (("ptr", "arguments"), ("i64", "begin"), ("i64", "end")))
    f.call("void", "twice", ("ptr", "%arguments"))
    f.ret()
    return module


def stored_by(code: jit.MachineCode, name: str) -> int:
    word = ctypes.c_int64(0)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(code.address(name))(
        ctypes.byref(word), 0, 1
    )
    return word.value


def test_parts_are_split_off() -> None:
    one, other = split(doubled("f", 3), HOST), split(doubled("f", 4), HOST)
    assert list(one.parts) == ["helper", "twice"]
    assert one.parts["twice"].calls == ("helper",)
    assert one.text == other.text
    assert one.parts["twice"] == other.parts["twice"]
    keys = one.keys, other.keys
    assert keys[0]["helper"] != keys[1]["helper"]
    assert keys[0]["twice"] != keys[1]["twice"], "what a part calls is part of its key"
    assert split(doubled("f", 3, table=True), HOST).parts == {}, "a table is the module's own"
    assert list(split(doubled("f", 3), HOST, ["f"]).parts) == ["helper", "twice", "f"]
    whole = IrModule()
    whole.add_text("f", "define void @f() {\n  ret void\n}")
    assert split(whole, HOST).parts == {}


@pytest.mark.parametrize("is_kept", [True, False])
def test_parts_call_what_their_module_called(tmp_path: Path, is_kept: bool) -> None:
    """Whether from a full store, or from one that takes nothing."""

    def op(number: int, table: bool) -> NativeOp:
        def emit(module: IrModule) -> None:
            made = doubled("f", number, table=table)
            module._functions, module.declarations, module._globals = (
                made._functions, made.declarations, made._globals
            )  # fmt: skip

        return NativeOp(f"{tmp_path} {number} {table}", emit, ("f",), lambda sizes: Planned([]))

    if not is_kept:
        (tmp_path / "objects").write_text("no folder")
    wanted = [(n, table) for n in (3, 4, 5) for table in (False, True)]
    for _ in range(2):
        with using(cache_dir=tmp_path):
            pieces = kernels.native_pieces([kernels.op_source(op(n, table), HOST) for n, table in wanted], HOST)
        assert [stored_by(p.code, "f") for p in pieces] == [2 * n for n, _ in wanted]
        kernels._loaded.clear()


def test_lost_part_is_made_again(tmp_path: Path) -> None:
    def op() -> NativeOp:
        def emit(module: IrModule) -> None:
            made = doubled("f", 21)
            module._functions, module.declarations = made._functions, made.declarations

        return NativeOp(f"{tmp_path} lost", emit, ("f",), lambda sizes: Planned([]))

    with using(cache_dir=tmp_path):
        kernels.native_pieces([kernels.op_source(op(), HOST)], HOST)
        store = default_store()
        parts = [e.key for e in store.entries() if e.about["kind"] == "part"]
        assert len(parts) == 2
        for key in parts:
            kernels._loaded.clear()
            gc.collect()
            store._remove(store._path(key))
            (piece,) = kernels.native_pieces([kernels.op_source(op(), HOST)], HOST)
            assert stored_by(piece.code, "f") == 42
            assert key in store
            del piece


def test_a_process_that_never_became_ready_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that was asleep may have taken longer than a start may take; the module is not to blame."""
    deaths = [Died(was_ready=False), Died(was_ready=False)]
    real = isolate.Child.object_code

    def sleepy(child: isolate.Child, *given: Any) -> tuple[bool, bytes]:
        if deaths:
            raise deaths.pop()
        return real(child, *given)

    monkeypatch.setattr(isolate.Child, "object_code", sleepy)
    assert isolate.isolated_object(plain(3), HOST, 2) == jit.compile_text(plain(3), HOST)
    deaths += [Died(was_ready=False)] * isolate.TRIES
    with pytest.raises(CompileError, match="was ready, 3 times"):
        isolate.isolated_object(plain(3), HOST, 2)
    deaths.append(Died(was_ready=True, said=b"LLVM ERROR: Cannot select: something"))
    with pytest.raises(CompileError, match="LLVM has no code for host: Cannot select: something"):
        isolate.isolated_object(plain(3), HOST, 2)


def test_places_of_a_batch_take_no_lanes() -> None:
    """The best of dear values over rows of a batch: vectors run along the rows, as they do without a batch."""
    g = Graph("best")
    x = g.input("x", (sym("N", 1, None), 50, 128))
    g.outputs(x.tanh().max(axis=1))
    made = Session("cpu").compile(g)
    (step,) = [s for s in made.lir.schedule if s.kernel is not None]
    schedule = lower(step.kernel, made.lir.target).schedule
    assert schedule.lanes(1) > 1 == schedule.lanes(2)
    for images in (1, 3):
        feed = np.random.default_rng(0).standard_normal((images, 50, 128)).astype(np.float32)
        np.testing.assert_allclose(made.run(x=feed)[0], np.tanh(feed).max(axis=1), rtol=1e-6)
