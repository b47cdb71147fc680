"""Parameters that are packed, and every way to change them: none goes unseen, however few elements it touches."""

from __future__ import annotations

import gc
import mmap
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import strata as st
from strata.torch import options as torch_options
from strata.torch import program, writes

SIZE = 300  # 360 KB: larger than what is compared whole


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    st.torch.register()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="strata", options={"strict": True, **options})


def one_element(w: torch.Tensor) -> None:
    w.data[203, 17] += 5


def by_numpy(w: torch.Tensor) -> None:
    w.detach().numpy()[71, 2:4] += 3


def by_a_file(w: torch.Tensor) -> None:
    """The system itself writes."""
    bits = memoryview(w.detach().numpy().reshape(-1)).cast("B")
    reader, writer = os.pipe()
    os.write(writer, np.float32([7, 8]).tobytes())
    with os.fdopen(reader, "rb", buffering=0) as file:
        file.readinto(bits[SIZE * 400 : SIZE * 400 + 8])  # type: ignore[call-overload]
    os.close(writer)


@pytest.mark.parametrize("change", [one_element, by_numpy, by_a_file])
@pytest.mark.parametrize("tells", [True, False])
def test_a_few_elements(change: Callable[[Any], None], tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not tells:
        for module in (torch_options, program):
            monkeypatch.setattr(module, "available", lambda: False)
    model, x = torch.nn.Linear(SIZE, SIZE), torch.randn(3, SIZE)
    run = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x))
            change(model.weight)
            torch.testing.assert_close(run(x), model(x))


def test_packed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells nothing and packing was asked for, places are compared: what changes a whole parameter is
    seen."""
    monkeypatch.setattr(program, "available", lambda: False)
    monkeypatch.setattr(program, "watch", lambda memories: [None] * len(memories))
    model, x = torch.nn.Linear(SIZE, SIZE), torch.randn(3, SIZE)
    run = compiled(model, freeze=True)
    with torch.no_grad():
        run(x)
        [bound] = program.TorchProgram._noted(None, [model.weight])  # type: ignore[arg-type]
        assert bound[3] == bound[4]
        model.weight.data.mul_(2)
        assert bound[3] != bound[4]
        torch.testing.assert_close(run(x), model(x))


def test_programs_that_share_a_parameter() -> None:
    """One that reads it again does not make the other forget that it has to."""
    model, x = torch.nn.Linear(SIZE, SIZE), torch.randn(3, SIZE)
    first, second = compiled(model), compiled(lambda x: model(x).sin())
    with torch.no_grad():
        first(x), second(x)
        one_element(model.weight)
        torch.testing.assert_close(second(x), model(x).sin())
        torch.testing.assert_close(first(x), model(x))


@pytest.mark.parametrize("strided", [False, True])
def test_parameters_of_inference_mode(strided: bool) -> None:
    """They count no writes. A view with gaps is copied to be read, and watched where it lies."""
    with torch.inference_mode():
        model, x = torch.nn.Linear(SIZE, SIZE), torch.randn(3, SIZE)
        if strided:
            model.weight = torch.nn.Parameter(torch.randn(SIZE, 2 * SIZE)[:, ::2], requires_grad=False)
        run = compiled(model)
        for change in (None, one_element, by_numpy):
            if change is not None:
                change(model.weight) if not strided else model.weight[203, 17].add_(5)
            torch.testing.assert_close(run(x), model(x))
        model.bias[2] = 9
        torch.testing.assert_close(run(x), model(x))


def test_memory_of_another_process() -> None:
    """What another process writes is seen as well: such memory is compared."""
    model, x = torch.nn.Linear(SIZE, SIZE).share_memory(), torch.randn(3, SIZE)
    run = compiled(model)
    with torch.no_grad():
        run(x)
        if (child := os.fork()) == 0:
            model.weight.detach().numpy()[250, 9] += 4
            os._exit(0)
        os.waitpid(child, 0)
        torch.testing.assert_close(run(x), model(x))


def test_memory_that_arrays_share_with_another_process() -> None:
    """Torch does not know that such memory is shared; the system does."""
    with mmap.mmap(-1, 4 * SIZE * SIZE) as memory:
        model, x = torch.nn.Linear(SIZE, SIZE), torch.randn(3, SIZE)
        shared = np.frombuffer(memory, np.float32).reshape(SIZE, SIZE)
        shared[:] = model.weight.detach()
        model.weight = torch.nn.Parameter(torch.from_numpy(shared))
        run = compiled(model)
        with torch.no_grad():
            run(x)
            if (child := os.fork()) == 0:
                shared[250, 9] += 4
                os._exit(0)
            os.waitpid(child, 0)
            torch.testing.assert_close(run(x), model(x))
        torch._dynamo.reset()
        del model, run, shared
        gc.collect()


def test_pinned_memory_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU writes to it past the page tables."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    [bound] = program.TorchProgram._noted(None, [torch.zeros(SIZE, SIZE)])  # type: ignore[arg-type]
    assert bound[3] == bound[4]
    assert len(bound[3]) == 4 * SIZE * SIZE


watched = pytest.mark.skipif(not writes.available(), reason="the system does not tell of writes")


def watch(array: np.ndarray) -> Any:
    [made] = writes.watch([(memoryview(array.reshape(-1).view(np.uint8)), array.ctypes.data)])
    return made


@watched
@pytest.mark.parametrize("at", [0, 1, 5_000, 99_998, 99_999])
def test_any_byte(at: int) -> None:
    array = np.zeros(100_000, np.uint8)
    seen = watch(array)
    assert not seen.is_written()
    assert array.sum() == 0  # reading is no write
    assert not seen.is_written()
    array[at] = 1
    assert seen.is_written()
    assert not watch(array).is_written()


@watched
def test_memory_of_a_file(tmp_path: Path) -> None:
    np.zeros(100_000, np.uint8).tofile(tmp_path / "file")
    array = np.memmap(tmp_path / "file", np.uint8, "c")
    seen = watch(array)
    assert not seen.is_written()
    array[50_000] = 1
    assert seen.is_written()


@watched
def test_a_watch_of_a_part() -> None:
    array = np.zeros(100_000, np.uint8)
    whole, array[70_000] = watch(array), 1
    part = watch(array[60_000:])
    assert whole.is_written()
    assert not part.is_written()
    array[10_000] = 1
    assert not part.is_written()


@watched
def test_a_forked_process_watches_its_own_memory() -> None:
    array = np.zeros(100_000, np.uint8)
    seen = watch(array)
    if (child := os.fork()) == 0:
        own = watch(array)
        before, array[50_000] = own.is_written(), 1
        os._exit(0 if seen.is_written() and not before and own.is_written() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not seen.is_written()


@watched
def test_a_watch_that_begins_while_another_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system has forgotten, the older watch knows before anyone can ask it."""
    array = np.zeros(100_000, np.uint8)
    older, array[50_000] = watch(array), 1
    forgot, go_on = threading.Event(), threading.Event()
    protect = writes._System.protect

    def slow(*args: int) -> bool:
        made = protect(*args)  # type: ignore[arg-type]
        forgot.set()
        go_on.wait()
        return made

    monkeypatch.setattr(writes._System, "protect", slow)
    newer = threading.Thread(target=watch, args=(array,))
    newer.start()
    forgot.wait()
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(older.is_written()))
    asking.start()
    asking.join(0.2)
    go_on.set()
    asking.join()
    newer.join()
    assert answers == [True]


@watched
def test_neighbours_stay_one_mapping() -> None:
    """A process has only so many mappings: parameters that follow each other in memory do not take two each."""

    def mappings() -> int:
        return Path("/proc/self/maps").read_bytes().count(b"\n")

    memory = np.zeros(8 << 20, np.uint8)
    parts = [memory[at : at + 80_000] for at in range(16, len(memory) - 80_000, 80_064)]
    before = mappings()
    made = writes.watch([(memoryview(part), part.ctypes.data) for part in parts])
    assert mappings() < before + len(parts) / 2
    parts[7][40_000] = 1
    assert [w.is_written() for w in made if w is not None] == [at == 7 for at in range(len(parts))]


@watched
def test_too_many_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "_MOST_MAPPINGS", 1)
    assert watch(np.zeros(100_000, np.uint8)) is None


@watched
def test_memory_twice_in_one_program() -> None:
    """Parameters that overlap are watched together, and a part that was written is no other's."""
    array = np.zeros(100_000, np.uint8)
    given = [array, array[:40_000], array[60_000:], array[:100]]
    whole, first, last, short = writes.watch([(memoryview(a), a.ctypes.data) for a in given])
    assert short is None
    array[80_000] = 1
    assert [w.is_written() for w in (whole, first, last) if w is not None] == [True, False, True]


@watched
def test_a_forked_process_lets_go_of_files() -> None:
    """Of children of children, none has more of them open than its parent."""
    files = Path("/proc/self/fd")
    open_here = len(list(files.iterdir()))
    if (child := os.fork()) == 0:
        left = len(list(files.iterdir()))
        writes.available()
        os._exit(0 if (left, len(list(files.iterdir()))) == (open_here - 2, open_here) else 1)
    assert os.waitpid(child, 0)[1] == 0


FILTERED = """
import ctypes, struct
from strata.torch import writes
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, writes._CALL[{machine!r}]), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *s) for s in steps))
program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0
assert not writes.available()
"""


@watched
def test_a_process_whose_calls_are_filtered() -> None:
    """The filter ends a process that makes the call, as that of a service may."""
    script = FILTERED.format(machine=platform.machine())
    subprocess.run([sys.executable, "-c", script], check=True)


@watched
def test_files_of_a_forked_process_are_not_closed_in_its_own_children() -> None:
    """They may have the numbers of those that were let go of."""
    if (child := os.fork()) == 0:
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
        if (grandchild := os.fork()) == 0:
            os._exit(sum(len(os.read(file, 1)) for file in files))  # an error where one is closed
        os._exit(os.waitpid(grandchild, 0)[1] != 0)
    assert os.waitpid(child, 0)[1] == 0
