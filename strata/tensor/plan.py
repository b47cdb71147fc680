"""Plans: expressions compiled once, with their own memory, run as often as you like.

A run reads the arrays of the leaves as they are now, so a loop writes into an input's array, executes, and reads the
output, and no graph is touched. Symbolic sizes are given to `execute` by name and stay until they are given again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.arguments import own_checks
from strata.config import Config, config
from strata.core import Dim, here
from strata.errors import OptionError, SymbolError, UnknownNameError
from strata.mir import Value, near
from strata.runtime import CompiledGraph, Profile, Session
from strata.tensor.data import Handle, handle_of, handle_value
from strata.tensor.storage import bound_view, capacity, slices
from strata.tensor.structure_key import outline
from strata.tensor.variable import check_range


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """One step of a plan."""

    name: str
    label: str
    source: str  # kernel text, or the op that runs on the host
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes: Dim  # read and written


class Plan:
    """Made by `Tensor.prepare` and `st.prepare`. The tensors belong to it: they show what the last run computed.

    Before the first run that is zeros. Other tensors never have the plan's memory, equal expressions included.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        settings = config()
        self.tensors = tuple(tensors)
        for t in self.tensors:
            if not hasattr(t, "__mir_value__"):
                raise OptionError(f"Plan: a {type(t).__name__} is not a tensor", code="T208", place=here())
        pending = list(dict.fromkeys(t.value for t in tensors if handle_of(t.value) is None))
        self._compiled: CompiledGraph | None = None
        self._handles: list[Handle] = []
        self._buffers: list[np.ndarray] = []
        self._leaves: list[Handle] = []
        self.variables: dict[str, int] = {}
        self._limits: dict[str, tuple[int, int | None]] = {}
        if pending:
            self._prepare(pending, settings)
        self._outputs = [self._output(t, dict(zip(pending, self._handles, strict=True))) for t in tensors]

    def _output(self, tensor: Any, made: Mapping[Value, Handle]) -> Handle:
        """Where a tensor is from now on: in the plan's memory, which equal expressions elsewhere know nothing of."""
        handle = made.get(tensor.value)
        if handle is None:
            found: Handle = tensor._hold(handle_of(tensor.value))
            return found
        tensor.value = handle_value(handle)
        return handle

    def _prepare(self, pending: list[Value], settings: Config) -> None:
        plan = outline(pending)
        graph = plan.graph(pending, "plan")
        known = {s for h in plan.leaves for s in h.type.symbols()}
        for name, symbol in graph.symbols().items():
            if name not in known:
                raise SymbolError(
                    f"the size {name} belongs to no array: a plan cannot know it", code="S353", place=here()
                )
            self._limits[name] = (symbol.lo, symbol.hi)
            self.variables[name] = max(symbol.lo, 0)
        self.variables |= {n: v for n, v in plan.binding().items() if n in self.variables}
        self._compiled = Session(settings.device).compile(graph)
        self._leaves = plan.leaves
        for value in pending:
            buffer = np.zeros(capacity(value.type), value.dtype.np)  # until the first run there is nothing else to show
            view = bound_view(buffer, value.type, self.variables)
            handle = Handle(view, value.type, dict(self.variables) or None, is_open=True)
            self._buffers.append(buffer)
            self._handles.append(handle)

    @own_checks("variables")
    def execute(self, **variables: int) -> Plan:
        """Run. Values of variables are checked before anything changes, and kept for the runs that follow."""
        given: dict[str, int] = {}
        for name, value in variables.items():
            if name not in self._limits:
                known = ", ".join(self._limits) or "none"
                raise UnknownNameError(
                    f"execute: the plan has no variable {name!r}; it has {known}{near(name, self._limits)}",
                    code="N114", place=here(),
                )  # fmt: skip
            given[name] = check_range(name, value, *self._limits[name])
        binding = self.variables | given
        if self._compiled is None:
            return self
        feeds = slices(self._leaves, binding)
        views = [bound_view(b, h.type, binding) for b, h in zip(self._buffers, self._handles, strict=True)]
        self._compiled.run_into(feeds, views)
        self.variables = binding
        for handle, view in zip(self._handles, views, strict=True):
            handle.rebind(view, binding or None)
        return self

    run = execute

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def output(self, i: int = 0) -> np.ndarray:
        """What the last run computed for the i-th tensor: the plan's own memory, written again by the next run."""
        if not -len(self._outputs) <= i < len(self._outputs):
            raise OptionError(f"output: the plan has {len(self._outputs)} outputs, not {i}", code="O150", place=here())
        return self._outputs[i].array

    @property
    def outputs(self) -> tuple[np.ndarray, ...]:
        return tuple(self.output(i) for i in range(len(self._outputs)))

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        if self._compiled is None:
            return ()
        lir = self._compiled.lir
        return tuple(
            KernelInfo(
                s.name, s.label, str(s.kernel) if s.kernel is not None else s.label, s.inputs, s.outputs,
                sum((lir.buffer(b).type.nbytes for b in (*s.inputs, *s.outputs)), start=0),
            )
            for s in lir.schedule
        )  # fmt: skip

    def profile(self, repeat: int = 10, **variables: int) -> Profile:
        """Run, then time each step on its own; printed, it is a table."""
        self.execute(**variables)
        if self._compiled is None:
            return Profile("plan", ())
        return self._compiled.profile(slices(self._leaves, self.variables), repeats=repeat)

    def explain(self) -> str:
        """The plan's steps, what was not fused and why, and its memory."""
        if self._compiled is None:
            return "an empty plan: its tensors have their arrays already"
        lir = self._compiled.lir
        cuts = "\n".join(f"not fused: {c.producer.op.name}, {c.reason}" for c in lir.cuts)
        return f"{lir.summary()}\n{cuts}{chr(10) if cuts else ''}{self._compiled.memory}"

    def __repr__(self) -> str:
        return f"<Plan of {len(self._outputs)} outputs, {len(self.kernels)} steps>"
