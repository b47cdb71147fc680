"""Histories of state machines: the machines of the modules beside this one, run from a seed."""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.reporting import with_reporter
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

HERE = Path(__file__).parent
BATCH = 10  # histories from one seed, which resemble each other; the next batch has the next seed
STEPS = 30  # of a history, at most


@dataclass(frozen=True)
class Outcome:
    """What a batch of histories did."""

    machine: str
    seed: int
    histories: int
    violation: str | None  # with the steps that show it


def machines() -> dict[str, type[RuleBasedStateMachine]]:
    """Every state machine of the modules `*_machine.py` here, by its name; a leading underscore marks a base class."""
    found: dict[str, type[RuleBasedStateMachine]] = {}
    for path in sorted(HERE.glob("*_machine.py")):
        module = importlib.import_module(f"tests.machines.{path.stem}")
        for name, value in vars(module).items():
            is_machine = isinstance(value, type) and issubclass(value, RuleBasedStateMachine)
            if is_machine and value.__module__ == module.__name__ and name[0] != "_":
                assert name not in found, f"two machines are named {name}"
                found[name] = value
    return found


def run_batch(name: str, first: int, count: int = BATCH, *, steps: int = STEPS, shrink: bool = True) -> Outcome:
    """Run `count` histories of one machine from a seed. A machine may set `steps` to have longer or shorter ones."""
    machine = machines()[name]
    made = 0
    told: list[str] = []

    def make() -> RuleBasedStateMachine:
        nonlocal made
        made += 1
        return machine()

    chosen = settings(
        max_examples=count,
        stateful_step_count=getattr(machine, "steps", steps),
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    try:
        with with_reporter(lambda text: told.append(str(text))):
            run_state_machine_as_test(seed(first)(make), settings=chosen)  # type: ignore[arg-type]
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return Outcome(name, first, made, "\n".join([*told, traceback.format_exc()]))
    return Outcome(name, first, made, None)
