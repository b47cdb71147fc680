"""The cache of lazy expressions by structure: interpreted while small, compiled when it pays.

The rule is that of renting or buying: what NumPy has taken for a structure so far is added up, and the structure is
compiled once that is more than compiling it takes. A structure that comes in many shapes is compiled once, with symbols
for its sizes. Both prices are computed from the expression, so the choice depends on the program and on nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from strata.backends import HOMES, REPLACED, DeviceArray, DeviceHome
from strata.config import Config, config
from strata.core import Table, new_lock
from strata.errors import SymbolError
from strata.mir import Value
from strata.runtime import CompiledGraph, Session, compile_price, run_price
from strata.tensor.data import LooseHandle
from strata.tensor.interpret import Interpreter
from strata.tensor.placement import common_home, default_home
from strata.tensor.shape_generic import NEEDS_NUMBERS, General, generalize
from strata.tensor.storage import slices
from strata.tensor.structure_key import Outline, outline

WORTH_A_LOOK = 50e-6  # seconds of work below which the general form of an expression is not looked for


@dataclass(slots=True)
class Family:
    """Expressions that differ in sizes only."""

    shapes: int = 0
    spent: float = 0.0
    compiled: CompiledGraph | None = None
    failed: bool = False


@dataclass(slots=True)
class Counts:
    """What has happened since the process started; tests and `explain` read it."""

    interpreted: int = 0
    compiled: int = 0
    runs: int = 0
    hits: int = 0


@dataclass(slots=True)
class LazyProgram:
    """One structure with its sizes."""

    interpreter: Interpreter | None  # None: sizes are symbolic
    price: float  # of a run by NumPy
    compile_price: float
    always: bool  # the device has no interpreter of small programs
    spent: float = 0.0
    general: General | None = None
    family: Family | None = None
    compiled: CompiledGraph | None = None
    lock: threading.Lock = field(default_factory=new_lock)


COUNTS = Counts()
_programs: Table[Any, LazyProgram] = Table("lazy")
_families: Table[Any, Family] = Table("lazy families")


def clear() -> None:
    """Forget all programs."""
    _programs.clear()
    _families.clear()


def run_values(roots: Sequence[Value], home: DeviceHome | None = None) -> tuple[list[Any], dict[str, int]]:
    """The arrays of expressions, computed together, and the symbolic sizes that they were computed for.

    They are where the leaves are; without leaves, at a home that is given, or where new tensors go.
    """
    plan = outline(roots)
    settings = config()
    COUNTS.runs += 1
    if settings.device != "cpu" and all(type(h) is LooseHandle for h in plan.leaves):
        home = home or default_home()
    elif HOMES:
        for handle in plan.leaves:  # in every run: without a call where all are arrays of the host
            if type(handle._array) is DeviceArray:
                home = common_home("realize", [(h, h.array) for h in plan.leaves])
                break
    if home is not None and settings.device != home.name:
        settings = replace(settings, device=str(home.name))
    key = (plan.key, settings.device, home, len(REPLACED), settings.code_settings)
    program = _programs.get(key) if settings.lazy_cache else None
    if program is None:
        program = _kept(key, plan, roots, settings)
    else:
        COUNTS.hits += 1
    if home is not None:
        return _run_on_device(program, plan, roots, settings)
    if program.interpreter is None:
        return _run_symbolic(program, plan, roots, settings)
    arrays = [h.array for h in plan.leaves]
    compiled = program.compiled
    if compiled is None and settings.device != "reference":
        compiled = _consider(program, plan, roots, settings)
    if compiled is None:
        COUNTS.interpreted += 1
        return _apart(program.interpreter.run(arrays), arrays), {}
    return list(compiled.run({f"d{i}": a for i, a in enumerate(arrays)})), {}


def _kept(key: Any, plan: Outline, roots: Sequence[Value], settings: Config) -> LazyProgram:
    """A new program, kept as the settings say."""
    if not settings.lazy_cache:
        return _make(plan, roots, settings)
    program = _programs.get_or_make(key, lambda: _make(plan, roots, settings))
    _programs.shrink(settings.lazy_cache_limit)
    return program


def _run_on_device(
    program: LazyProgram, plan: Outline, roots: Sequence[Value], settings: Config
) -> tuple[list[Any], dict[str, int]]:
    """The same where arrays are in the memory of a device: results stay there."""
    if program.interpreter is None:
        compiled, binding = _symbolic(program, plan, roots, settings)
        return compiled.run_resident(slices(plan.leaves, binding)), binding
    found = program.compiled or _consider(program, plan, roots, settings)
    assert found is not None, "a device without an interpreter compiles at once"
    made = found.run_resident({f"d{i}": h.array for i, h in enumerate(plan.leaves)})
    if not plan.leaves:  # all of it depends on nothing, and would be kept for the next time
        found.forget_weights()
    return made, {}


def _apart(made: list[np.ndarray], given: list[np.ndarray]) -> list[np.ndarray]:
    """Results in separate memory, as a compiled program has them: NumPy also makes views."""
    for i, array in enumerate(made):
        others = (*given, *made[:i], *made[i + 1 :])
        is_view = array.base is not None or any(array is x for x in others)
        if is_view and any(np.may_share_memory(array, x) for x in others):
            made[i] = array.copy()
    return made


def _make(plan: Outline, roots: Sequence[Value], settings: Config) -> LazyProgram:
    always = settings.device not in ("cpu", "reference")
    if any(not h.type.is_static for h in plan.leaves) or any(not x.type.is_static for x in roots):
        return LazyProgram(None, 0.0, 0.0, always)
    price = run_price(plan.nodes)
    program = LazyProgram(Interpreter(plan), price, compile_price(len(plan.nodes)), always)
    if price > WORTH_A_LOOK:
        _find_family(program, plan, settings)
    return program


def _find_family(program: LazyProgram, plan: Outline, settings: Config) -> None:
    program.general = generalize(plan)
    if program.general is not None:
        key = (program.general.key, settings.device, len(REPLACED), settings.code_settings)
        program.family = _families.get_or_make(key, Family)
        program.family.shapes += 1


def _consider(program: LazyProgram, plan: Outline, roots: Sequence[Value], settings: Config) -> CompiledGraph | None:
    """The compiled program, if there is one or if it is time to make one."""
    program.spent += program.price
    family = program.family
    if family is not None:
        family.spent += program.price
        if family.compiled is not None:
            program.compiled = family.compiled
            return program.compiled
    spent = program.spent if family is None else max(program.spent, family.spent)
    if spent < program.compile_price and not program.always:
        return None
    with program.lock:
        if program.compiled is None:
            program.compiled = _compile(program, plan, roots, settings)
        return program.compiled


def _compile(program: LazyProgram, plan: Outline, roots: Sequence[Value], settings: Config) -> CompiledGraph | None:
    if program.general is None:
        _find_family(program, plan, settings)
    family = program.family
    session = Session(settings.device)
    if family is not None and program.general is not None and family.shapes > 1 and not family.failed:
        if family.compiled is None:
            try:
                family.compiled = session.compile(program.general.graph)
                COUNTS.compiled += 1
            except NEEDS_NUMBERS:
                family.failed = True
        if family.compiled is not None:
            return family.compiled
    if program.spent < program.compile_price and not program.always:  # the family is hot, this shape is not
        return None
    COUNTS.compiled += 1
    return session.compile(plan.graph(roots))


def _run_symbolic(
    program: LazyProgram, plan: Outline, roots: Sequence[Value], settings: Config
) -> tuple[list[np.ndarray], dict[str, int]]:
    """Leaves have symbolic sizes: one compiled program for all of them."""
    compiled, binding = _symbolic(program, plan, roots, settings)
    return list(compiled.run(slices(plan.leaves, binding))), binding


def _symbolic(
    program: LazyProgram, plan: Outline, roots: Sequence[Value], settings: Config
) -> tuple[CompiledGraph, dict[str, int]]:
    binding = plan.binding()
    if program.compiled is None:
        graph = plan.graph(roots)
        missing = [name for name in graph.symbols() if name not in binding]
        if missing:
            unknown = ", ".join(missing)
            raise SymbolError(f"the tensor cannot be computed while its size {unknown} has no value", code="S353")
        COUNTS.compiled += 1
        program.compiled = Session(settings.device).compile(graph)
    return program.compiled, binding
