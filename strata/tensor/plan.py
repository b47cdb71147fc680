"""Plans: expressions compiled once, with their own memory, run as often as you like.

A run reads the arrays of the leaves as they are now, so a loop writes into an input's array, executes, and reads the
output, and no graph is touched. Symbolic sizes are given to `execute` by name and stay until they are given again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.arguments import own_checks
from strata.backends import DeviceArray
from strata.config import Config, config, using_config
from strata.core import Dim, TensorType, here
from strata.errors import OptionError, SymbolError, UnknownNameError
from strata.kinds import counted, with_article
from strata.lir import Lir
from strata.mir import Value, near, substitute_values
from strata.runtime import CompiledGraph, Profile, Session, flops_of, phase
from strata.tensor.branches import Branches, split
from strata.tensor.copies import LAZY_COPIES, copies_in, moved
from strata.tensor.data import CopyTo, Handle, handle_of, handle_value
from strata.tensor.placement import common_home, default_home
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
    sizes: tuple[Dim, ...] = ()  # what it is launched over: the extents of the axes of its first result
    flops: int = 0  # arithmetic, at the sizes of the last run
    schedule: str = ""  # the one that a search found; without it the heuristics choose


class _Copy:
    """A step between the programs of two devices: what a plan has computed on one, in memory of the other."""

    def __init__(self, source: Plan, device: str, kind: TensorType) -> None:
        self.source, self.device = source, device
        self.handle = Handle(moved(np.zeros(kind.static_shape, kind.dtype.np), device), kind, is_open=True)
        self.info = KernelInfo("copy", f"copy to {device}", "copy", (), (), 2 * kind.nbytes)

    def run(self) -> None:
        self.source.execute()
        with phase("copy", "run", device=self.device, bytes=self.info.bytes):
            array = moved(self.source._outputs[0].array, self.device)
            if isinstance(array, np.ndarray):
                np.copyto(self.handle.array, array)
            else:
                self.handle.rebind(array, None)


class Plan:
    """Made by `Tensor.prepare` and `st.prepare`. The tensors belong to it: they show what the last run computed.

    Before the first run that is zeros. Other tensors never have the plan's memory, equal expressions included.
    """

    def __init__(self, tensors: Sequence[Any], settings: Config | None = None) -> None:
        """With settings, the plan is made and run under them, whatever others hold."""
        self._own = settings
        settings = settings or config()
        self.tensors = tuple(tensors)
        for t in self.tensors:
            if not hasattr(t, "__mir_value__"):
                raise OptionError(f"Plan: {with_article(type(t))} is not a tensor", code="T208", place=here())
        wanted = {t.value: None for t in tensors if handle_of(t.value) is None}
        self._copies: list[_Copy] = []
        table = self._prepare_copies(list(wanted)) if LAZY_COPIES else {}
        self._moved = dict(zip(wanted, substitute_values(list(wanted), table), strict=True)) if table else {}
        pending = [v for v in dict.fromkeys(self._moved.get(v, v) for v in wanted) if handle_of(v) is None]
        self._compiled: CompiledGraph | None = None  # in one program, if it is not in branches
        self._branches: Branches | None = None
        self._whole: Callable[[], CompiledGraph] | None = None
        self._pending: list[Value] = []
        self._leaf_values: list[Value] = []
        self._home: Any = None
        self._handles: list[Handle] = []
        self._buffers: list[Any] = []
        self._leaves: list[Handle] = []
        self.inputs: tuple[Any, ...] = ()
        self.variables: dict[str, int] = {}
        self._limits: dict[str, tuple[int, int | None]] = {}
        if pending:
            with using_config(self._own):
                self._prepare(pending, settings)
        self._outputs = [self._output(t, dict(zip(pending, self._handles, strict=True))) for t in tensors]

    def _output(self, tensor: Any, made: Mapping[Value, Handle]) -> Handle:
        """Where a tensor is from now on: in the plan's memory, which equal expressions elsewhere know nothing of."""
        value = self._moved.get(tensor.value, tensor.value)
        handle = made.get(value)
        if handle is None:
            known = handle_of(value)
            handle = next((c.handle for c in self._copies if c.handle is known), None)  # the last step is a copy
        if handle is None:
            found: Handle = tensor._hold(known)
            return found
        tensor.value = handle_value(handle)
        return handle

    def _prepare_copies(self, wanted: list[Value]) -> dict[Value, Value]:
        """Plans of what is copied between devices, and the memory of the copies in the place of the expressions."""
        table: dict[Value, Value] = {}
        for copy in copies_in(wanted):
            assert isinstance(copy.node.op, CopyTo)
            tensor = type(self.tensors[0])(*substitute_values(copy.node.inputs, table))
            made = _Copy(Plan([tensor], self._own), copy.node.op.device, copy.type)
            self._copies.append(made)
            table[copy] = handle_value(made.handle)
        return table

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
        home = common_home("prepare", [(h, h.array) for h in plan.leaves]) if plan.leaves else default_home()
        self._leaves = plan.leaves
        self._pending, self._leaf_values = pending, plan.leaf_values
        groups, joins = (
            split(pending) if home is None and settings.device == "cpu" and not self._limits else ([], False)
        )
        if groups:
            self._branches = Branches(groups, pending, joins=joins, settings=settings)
        device = settings.device if home is None else str(home.name)
        self._whole = lambda: Session(device).compile(graph)
        if self._branches is None:
            self._compiled = self._whole()
        self._home = home
        self._allocate()

    def _allocate(self) -> None:
        """Memory of its own for what a run computes."""
        for value in self._pending:
            buffer: Any = np.zeros(capacity(value.type), value.dtype.np)  # until the first run nothing else is to show
            if self._home is not None:
                buffer = self._home.upload(buffer)
            view = bound_view(buffer, value.type, self.variables)
            handle = Handle(view, value.type, dict(self.variables) or None, is_open=True)
            self._buffers.append(buffer)
            self._handles.append(handle)

    def clone(self, inputs: Sequence[Any] = ()) -> Plan:
        """A plan of the same programs with its own results, for another thread.

        It reads the same arrays, except those of `inputs`: of these it has copies, `clone.inputs`, in this order.
        """
        given = [self._input(t) for t in inputs]
        replaced = {id(handle): _copied(handle) for handle in given}
        made = self._cloned(replaced)
        made.inputs = tuple(type(t).of(replaced[id(handle)]) for t, handle in zip(inputs, given, strict=True))
        return made

    def _cloned(self, replaced: Mapping[int, Handle]) -> Plan:
        """The same with other storage in the place of some leaves."""
        made: Plan = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.variables, made._handles, made._buffers = dict(self.variables), [], []
        known, made._copies = dict(replaced), []
        for c in self._copies:  # a later one may read what an earlier one copied
            made._copies.append(_Copy(c.source._cloned(known), c.device, c.handle.type))
            known[id(c.handle)] = made._copies[-1].handle
        made._leaves = [known.get(id(h), h) for h in self._leaves]
        if self._branches is not None:
            made._branches = self._branches.clone()
        made._allocate()
        known |= dict(zip(map(id, self._handles), made._handles, strict=True))
        made._outputs = [known.get(id(h), h) for h in self._outputs]
        made.tensors = tuple(type(t).of(h) for t, h in zip(self.tensors, made._outputs, strict=True))
        return made

    def _input(self, tensor: Any) -> Handle:
        """The leaf that a tensor is."""
        handle = handle_of(tensor.value) if hasattr(tensor, "__mir_value__") else None
        if handle is None or not self._reads(handle):
            raise OptionError(
                "clone: an input is a tensor with an array that the plan reads", code="O150", place=here()
            )
        return handle

    def _reads(self, handle: Handle) -> bool:
        return any(h is handle for h in self._leaves) or any(c.source._reads(handle) for c in self._copies)

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
        for copy in self._copies:
            copy.run()
        if self._compiled is None and self._branches is None:
            return self
        views = [bound_view(b, h.type, binding) for b, h in zip(self._buffers, self._handles, strict=True)]
        with using_config(self._own):
            if self._branches is not None:
                leaves = dict(zip(self._leaf_values, self._leaves, strict=True))
                self._branches.run(leaves, dict(zip(self._pending, views, strict=True)), config())
            else:
                assert self._compiled is not None
                self._compiled.run_into(slices(self._leaves, binding), views)
        self.variables = binding
        for handle, view in zip(self._handles, views, strict=True):
            handle.rebind(view, binding or None)
        return self

    run = execute

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def output(self, i: int = 0) -> Any:
        """What the last run computed for the i-th tensor: the plan's own memory, written again by the next run.

        An array of NumPy; where the plan is on a device with its own memory, the tensor."""
        if not -len(self._outputs) <= i < len(self._outputs):
            raise OptionError(
                f"output: the plan has {counted(len(self._outputs), 'output')}, not {i}", code="O150", place=here()
            )
        array = self._outputs[i].array
        return self.tensors[i] if isinstance(array, DeviceArray) else array

    @property
    def outputs(self) -> tuple[Any, ...]:
        return tuple(self.output(i) for i in range(len(self._outputs)))

    @property
    def _programs(self) -> list[CompiledGraph]:
        if self._branches is not None:
            return self._branches.programs
        return [] if self._compiled is None else [self._compiled]

    @property
    def branches(self) -> int:
        """Programs that do not depend on each other, and may run at the same time."""
        return 1 if self._branches is None else len(self._branches.parts)

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        before = [info for copy in self._copies for info in (*copy.source.kernels, copy.info)]
        return (*before, *(info for program in self._programs for info in self._kernels(program.lir)))

    def _kernels(self, lir: Lir) -> list[KernelInfo]:
        return [
            KernelInfo(
                s.name, s.label, str(s.kernel) if s.kernel is not None else s.label, s.inputs, s.outputs,
                sum((lir.buffer(b).type.nbytes for b in (*s.inputs, *s.outputs)), start=0),
                () if s.kernel is None else tuple(a.extent for a in s.kernel.stores[0].axes),
                flops_of(s, self.variables), "" if s.kernel is None else s.kernel.schedule,
            )
            for s in lir.schedule
        ]  # fmt: skip

    def profile(self, repeat: int = 10, **variables: int) -> Profile:
        """Run, then time each step on its own; printed, it is a table."""
        self.execute(**variables)
        if self._whole is None:
            return Profile("plan", ())
        return (self._compiled or self._whole()).profile(slices(self._leaves, self.variables), repeats=repeat)

    def explain(self) -> str:
        """The plan's steps, what was not fused and why, and its memory."""
        parts = [part for copy in self._copies for part in (copy.source.explain(), copy.info.label)]
        parts += [_explained(program) for program in self._programs]
        return "\n".join(parts) or "an empty plan: its tensors have their arrays already"

    def __repr__(self) -> str:
        return f"<Plan of {counted(len(self._outputs), 'output')}, {counted(len(self.kernels), 'step')}>"


def _copied(handle: Handle) -> Handle:
    """Storage with the same contents."""
    made = Handle(handle.storage.copy(), handle.type, is_open=True)
    if handle.binding:
        made.rebind(bound_view(made.array, handle.type, handle.binding), handle.binding)
    return made


def _explained(program: CompiledGraph) -> str:
    lir = program.lir
    cuts = "\n".join(f"not fused: {c.producer.op.name}, {c.reason}" for c in lir.cuts)
    return f"{lir.summary()}\n{cuts}{chr(10) if cuts else ''}{program.memory}"
