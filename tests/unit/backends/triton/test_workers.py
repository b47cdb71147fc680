"""Workers that compile Triton programs: what they import, what they answer, and what comes of those that end."""

import ast
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import strata as st
from strata.backends.triton.codegen.render import TritonProgram, render
from strata.backends.triton.launch import compile as compiling
from strata.backends.triton.launch import jobs, workers
from strata.backends.triton.target import Gpu
from strata.cache import default_store
from strata.kernel import parse_kernel


def test_a_worker_imports_nothing_of_strata() -> None:
    tree = ast.parse(Path(jobs.__file__).read_text(encoding="utf-8"))
    names = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
    assert not [name for name in names if name.partition(".")[0] == "strata"]


def test_a_job_that_fails_is_answered_and_the_next_one_is_taken() -> None:
    line = json.dumps({"text": "no program", "name": "f", "kind": "cuda", "overlaps": False}) + "\n"
    command = [sys.executable, "-P", jobs.__file__]
    made = subprocess.run(command, input=line * 2, capture_output=True, text=True, check=True)
    answers = [json.loads(answer) for answer in made.stdout.splitlines()]
    assert len(answers) == 2
    assert all(len(answer) == 1 and answer[0] for answer in answers), "a reason, and no binary"


GPU = Gpu.named("sm_90")
WORKER = """
import base64, json, os, sys, time
for line in sys.stdin:
    name = json.loads(line)["name"]
    if name == "crashes":
        os.abort()
    if name == "is_ended":
        sys.exit(1)
    if name == "hangs":
        time.sleep(600)
    if name == "nothing":
        print("null", flush=True)
    if name == "babbles":
        print("what a library prints", flush=True)
    print(json.dumps([base64.b64encode(name.encode()).decode(), name, 128, 0, 2, 0]), flush=True)
"""


@pytest.fixture
def other_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Workers that do as the name of a program says; nothing else compiles."""
    path = tmp_path / "worker.py"
    path.write_text(WORKER, encoding="utf-8")
    monkeypatch.setattr(jobs, "__file__", str(path))
    monkeypatch.setattr(compiling, "triton_version", lambda: "3.6")
    monkeypatch.setattr(workers, "_done_here", lambda job: "done here")
    with st.config.using(cache_dir=tmp_path / "cache"):
        yield


def programs(*names: str) -> list[TritonProgram]:
    text = "kernel @{}(x: f32[8]) -> y: f32[8] {{\n  axis i in 8\n  %0 = x[i]\n  store y[i] = %0 over i\n}}"
    return [p for name in names for p in render(parse_kernel(text.format(name)), GPU).programs]


@pytest.mark.usefixtures("other_workers")
def test_a_worker_that_ends_costs_its_own_job_only() -> None:
    """What crashes the compiler does not come near this process; what ended a worker otherwise is done here."""
    names = ["a", "b", "crashes", "c", "is_ended", "babbles", "d", "e"]
    made = programs(*names)
    rejected = workers.compile_ahead(made, GPU, workers=2)
    store = default_store()
    for program in made:
        kept = store.get(compiling.CompileJob.of(program, GPU).key)
        if program.name in {"crashes", "is_ended", "babbles"}:
            assert kept is None
            wanted = "its compiler crashed (SIGABRT)" if program.name == "crashes" else "done here"
            assert wanted in rejected.pop(program.text())
        else:
            assert kept is not None
            assert compiling.Binary.unpack(kept).code == program.name.encode()
    assert rejected == {}


@pytest.mark.usefixtures("other_workers")
def test_a_job_that_takes_too_long_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LONGEST", 1.5)
    rejected = workers.compile_ahead(programs("a", "hangs", "b", "nothing", "c"), GPU, workers=2)
    told = sorted(rejected.values())
    assert len(told) == 2
    assert "its compiler took longer than 2 s" in told[0]
    assert told[1] == "done here"


@pytest.mark.usefixtures("other_workers")
@pytest.mark.parametrize("executable", ["/there/is/no/python", "", None])
def test_without_processes_the_jobs_are_done_here(monkeypatch: pytest.MonkeyPatch, executable: str | None) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert set(workers.compile_ahead(programs(*"abcdef"), GPU, workers=2).values()) == {"done here"}


@pytest.mark.usefixtures("other_workers")
def test_a_program_that_is_frozen_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executable is the program itself, whatever arguments it is given."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(workers, "_Worker", lambda: pytest.fail("a process was started"))
    assert set(workers.compile_ahead(programs(*"abcdef"), GPU, workers=2).values()) == {"done here"}


@pytest.mark.usefixtures("other_workers")
def test_a_binary_that_cannot_be_read_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_job(job: compiling.CompileJob) -> object:
        return f"no binary of {job.name}"

    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/there/is/no/python")
    monkeypatch.setattr(compiling, "triton_version", lambda: "3.6")
    monkeypatch.setattr(workers, "run_job", run_job)
    found = workers.compile_ahead(programs(*"abcdef"), GPU, workers=2)
    assert len(found) == len("abcdef")
    assert all("'str' object has no attribute 'asm'" in told for told in found.values())


@pytest.mark.usefixtures("other_workers")
def test_an_error_while_programs_are_written_ends_the_workers() -> None:
    def written() -> Iterator[TritonProgram]:
        yield from programs(*"abcdef")
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        workers.compile_ahead(written(), GPU, workers=2)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
