"""A slice of the mutants of every format, from a fresh seed; `python -m tests.fuzz.mutate` runs many more."""

from __future__ import annotations

import secrets
from types import SimpleNamespace

import pytest

from tests.fuzz.mutate import machine
from tests.fuzz.mutate.base import Format
from tests.fuzz.mutate.formats import FORMATS, format_named, missing
from tests.fuzz.mutate.machine import Machine
from tests.fuzz.mutate.worker import attempt, generator

ENDLESS = 100.0  # seconds of a core: what never ends is found, how fast the rest is says `python -m tests.fuzz.mutate`
COUNTS = {"kernel": 60, "onnx": 150, "config": 120, "graph": 150, "tokenizer": 100, "family": 60}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", FORMATS)
def test_mutants_are_refused_or_read(name: str) -> None:
    if missing(name):
        pytest.skip(f"{name} needs {', '.join(missing(name))}")
    seed = secrets.randbelow(1 << 31)
    print(f"python -m tests.fuzz.mutate --format {name} --seed {seed}")
    found = Machine(seed, jobs=1, seconds=ENDLESS).run([(name, 0, COUNTS.get(name, 300))])
    assert not found.violations, "\n".join(map(str, found.violations))
    assert found.outcomes[name]["refused"] > 10


@pytest.mark.parametrize("name", ["safetensors", "gguf", "npz", "graph"])
def test_a_mutant_can_be_made_again(name: str, tmp_path: object) -> None:
    form = format_named(name)
    form.prepare(tmp_path)  # type: ignore[arg-type]
    assert form.mutant(generator(name, 7, 3)) == form.mutant(generator(name, 7, 3))
    assert form.mutant(generator(name, 7, 3)) != form.mutant(generator(name, 7, 4))


class _Bad(Format):
    """Does what the machine must notice."""

    name = "bad"

    def mutant(self, rng: object) -> dict[str, bytes]:
        return {"x": b"1"}

    def attempt(self, folder: object, rng: object) -> str:
        self.made = bytearray(300 << 20)
        self.made[::4096] = b"x" * len(self.made[::4096])
        return "read"


def test_memory_is_watched(tmp_path: object) -> None:
    form = _Bad()
    outcome, wrong = attempt(form, tmp_path / "x", 0, 0)  # type: ignore[operator]
    assert outcome == "memory" or not hasattr(form, "made")
    assert "MB for a file of 1 bytes" in wrong
    form.attempt = lambda folder, rng: {}["x"]  # type: ignore[method-assign, misc]
    outcome, wrong = attempt(form, tmp_path / "x", 0, 0)  # type: ignore[operator]
    assert outcome == "foreign"
    assert wrong.startswith("KeyError")


def test_a_loaded_machine_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a clock count only while a worker uses no core at all."""
    clock, used = 0.0, 3.0
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock)
    monkeypatch.setattr(machine, "_core_seconds", lambda pid: used)
    monkeypatch.setattr(machine.threading.Thread, "start", lambda thread: None)
    watch = machine._Watch(SimpleNamespace(pid=0), 5.0)  # type: ignore[arg-type]
    watch.heard({"at": 0, "cpu": 3.0})
    for _ in range(9):
        clock, used = clock + 100, used + 0.01
        assert not watch._late()
    clock += 121
    assert watch._late() == "idle for 121 seconds"
    used = 8.1
    assert watch._late() == "more than 5 seconds of a core"
