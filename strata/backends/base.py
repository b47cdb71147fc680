"""The contract of backends and executables, with defaults: the runtime asks for nothing beyond it.

A backend gives its `name` and `compile`; all else has a default here. What it can do beside running plans is its
`capabilities`, data that is read once, when a program is compiled.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from strata.backends.resident import DeviceArray, DeviceHome
from strata.core import Target, TensorType, here, new_lock
from strata.errors import OutOfMemoryError, StrataError
from strata.lir import Lir, Step, may_take_over
from strata.mir import Graph, Node, Op, run_op

Arrays = Sequence[np.ndarray]
Entry = Callable[[Sequence[Any], Mapping[int, DeviceArray] | None], list[DeviceArray] | None]
# (step, begin, end, spans of threads as (thread, begin, end), reader of buffers by name); times in nanoseconds
Tell = Callable[[int, int, int, Sequence[tuple[int, int, int]], Callable[[str], np.ndarray | None]], None]


class Executable(ABC):
    """A compiled plan. Safe to run from many threads at once."""

    observes_steps: ClassVar[bool] = False
    """Whether `run_observed` tells of steps; else a run is seen as a whole."""
    home: DeviceHome | None = None
    """The memory that it computes in, where that is not the host's."""
    resident_entry: Entry | None = None
    """A short way into `run_resident` of a plan of fixed sizes, where there is one now; None is for the long way."""

    def __init__(self, lir: Lir, lock: AbstractContextManager[Any] | None = None) -> None:
        self.lir = lir
        self.lock = lock or new_lock()  # held while parameters are set and clones are made
        self.values: dict[str, Any] = {  # constants and parameters, by buffer, in the form that runs read
            b.name: lir.constants[b.key] for b in lir.buffers if b.role == "constant" and isinstance(b.key, int)
        }
        self.prologue = [(at, s) for at, s in enumerate(lir.schedule) if s.phase == "prologue"]
        self.is_prepared = not self.prologue  # whether what depends on parameters only is computed

    # parameters

    def set_param(self, name: str, array: np.ndarray) -> None:
        """Take a parameter's value: kept (and packed where kernels want it packed) until it is set again."""
        with self.lock:
            self.hold(name, array)
            self.forget()

    def hold(self, name: str, array: np.ndarray) -> None:
        """Keep a value that stays from run to run; the lock is held."""
        self.values[name] = array

    def forget(self) -> None:
        """Drop what was computed from parameters; the lock is held."""
        self.is_prepared = not self.prologue

    def clone(self) -> Self:
        """Another with the same code and parameters: what is set on one of them later is not seen by the other."""
        with self.lock:
            made = copy.copy(self)
            made.part(self)
        return made

    def part(self, other: Self) -> None:
        """Part a fresh copy from what it was copied from: whatever `set_param` changes must be its own."""
        self.values = dict(other.values)

    # running

    @abstractmethod
    def run(self, inputs: Arrays, outputs: Arrays, binding: Mapping[str, int], threads: int | None = None) -> None:
        """Fill the output arrays. Inputs are in the order of the plan's io, contiguous and of the declared types.

        An output may be the array of an input: only where the plan has read that before it writes the output.
        """

    def run_observed(
        self, inputs: Arrays, outputs: Arrays, binding: Mapping[str, int], threads: int | None, tell: Tell
    ) -> None:
        """Run the steps one by one, and tell of each."""
        self.run(inputs, outputs, binding, threads)

    def run_resident(
        self, inputs: Sequence[Any], binding: Mapping[str, int], over: Mapping[int, DeviceArray] | None = None
    ) -> list[DeviceArray]:
        """The results in the device's memory, which may not be there yet; for those that have a home.

        Inputs are arrays of the host or of that memory. Some results, by number, are written `over` arrays of the
        caller, where `takes_over` allows that.
        """
        raise NotImplementedError

    def takes_over(self, name: str, output: int) -> bool:
        """Whether an output may be written where an input lies, which the caller gives up."""
        return may_take_over(self.lir, name, output)

    def run_host(self, step: Step, arrays: Arrays, binding: Mapping[str, int]) -> Arrays:
        """The results of a step of one op by its NumPy meaning."""
        (node,) = step.nodes
        types = [t.bind(binding) for t in node.types]
        return run_op(node.op.bind(binding), step.operands(arrays, binding), types)

    @staticmethod
    def fill(outputs: Arrays, results: Arrays) -> None:
        """Copy results to where the caller wants them; one may be a view of an input that an output lies over."""
        apart = [r.copy() if any(np.may_share_memory(r, o) for o in outputs) else r for r in results]
        for out, result in zip(outputs, apart, strict=True):
            out[...] = result

    @property
    def fast_call(self) -> FastCall | None:
        """A short way into a plan of fixed sizes, where there is one."""
        return None

    # seeing

    @property
    def host_steps(self) -> list[str]:
        """Ops that run in Python: reports name them, so that none is a surprise."""
        steps = enumerate(self.lir.schedule)
        return [s.name if s.kernel is None else s.label for at, s in steps if self.is_host_step(at, s)]

    def is_host_step(self, at: int, step: Step) -> bool:
        return step.kernel is None

    @property
    def packed_bytes(self) -> int:
        """Of copies of parameters in the order that kernels read."""
        return 0

    @property
    def scratch_bytes(self) -> int | None:
        """Scratch memory of a run, where the device's own compiler plans it; None where the plan's arena is used."""
        return None

    @property
    def workspace_bytes(self) -> int | None:
        """What kernels take beside the plan's buffers (packed operands, say), at the upper bounds of sizes; None
        where a size has none."""
        return 0

    def limit_scratch(self, limit: int) -> None:  # noqa: B027 - a plan with an arena has kept the limit already
        """Refuse to take more scratch memory than this: for those whose memory the plan alone does not decide."""

    def stablehlo(self, binding: Mapping[str, int] | None = None) -> str | None:
        """The text that runs, for sizes of the symbols; None where it is not StableHLO."""
        return None


class FastCall(Protocol):
    """A short way into a plan of fixed sizes that runs again and again."""

    @property
    def asked(self) -> int | None:
        """The number of threads that `enter` is for; None for the default, another number while there is no entry."""

    @property
    def enter(self) -> Callable[[Any], tuple[Any, ...] | None]:
        """Takes a dict, or a list in the order of the plan's io, or a tuple of either and a list of arrays for the
        results; gives the results, or None where the caller has to go the long way."""

    def wants(self, asked: int | None) -> bool:
        """Whether it has to be told of a run on this many threads."""

    def learn(self, executable: Any, inputs: Sequence[Any], outputs: Sequence[Any], asked: int | None) -> None:
        """Told of a run that went the long way, with name, dtype and shape of its inputs; may keep its outputs."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """What NumPy says where there is no room, as an error of ours."""
    try:
        yield
    except MemoryError as error:
        raise error if isinstance(error, StrataError) else OutOfMemoryError(f"{error}", place=here()) from None


@dataclass(frozen=True, slots=True)
class ProcessorShare:
    """What programs get of a processor's speed, and what they cost beside. The defaults are those of another
    compiler's code, called through more layers: for trying, not for speed."""

    flops: float = 0.5
    bandwidth: float = 0.5
    dispatch_seconds: float = 1e-5
    roundtrip_seconds: float = 2e-4


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, or cannot. The defaults are those of one that runs kernels, and no more."""

    claims: frozenset[str] = frozenset()
    """Forms of convolutions that it has kernels for; `expand`: ops without a kernel are to be built from others, with
    `loops` from loops over graphs, too."""
    dtypes: frozenset[str] | None = None
    """Names of the element types that it holds; None: all."""
    narrow_matmuls: frozenset[str] = frozenset()
    """Names of the floats of 16 bits in which matmuls and attention are much faster than in f32."""
    most_buffers: int | None = None
    """Buffers that one kernel can read and write; None: any number."""
    recompute_cost: int = 6
    """Cost of a value's scalar functions up to which its readers compute it again rather than load it."""
    host_steps: bool = True
    """Ops without a kernel run on the host in between; else they are refused."""
    takes_graphs: bool = False
    """Plans have modules of many ops instead of kernels: `runs_on_host` cuts between them."""
    runs_bodies: bool = False
    """Loops and branches run natively: plans have plans of what is inside of them."""
    keeps_plans: bool = False
    """A plan decides the code, so that plans can be read back from the store."""
    searches: bool = False
    """`tune` finds schedules by measuring."""
    spreads: bool = False
    """`compile_spread` runs one program on several devices."""
    long_code: bool = False
    """Its code is shown when asked for, not with the other stages."""
    host_arrays: bool = False
    """Arrays are NumPy's: ops of a small program may as well run one by one."""
    of_processor: ProcessorShare | None = None
    """How fast it is where it runs on this processor; None: it has its own device."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """A device in five numbers."""

    device: str
    flops_per_second: float
    bytes_per_second: float
    dispatch_seconds: float  # of one kernel
    roundtrip_seconds: float  # of one run: entering, and moving inputs and outputs
    transfer_bytes_per_second: float = float("inf")  # to and from the device's own memory
    memory_bytes: int | None = None  # what fits on it; None where that is the host's memory


class Backend(ABC):
    """A way to run plans."""

    name: str = ""
    home: DeviceHome | None = None
    """The memory of its device, where that is not the host's."""
    capabilities: Capabilities = Capabilities()
    cost_model: CostModel | None = None
    """What programs cost on it; None: a guess by its kind."""

    @abstractmethod
    def compile(self, lir: Lir) -> Executable: ...

    # how programs are cut into kernels for it

    @property
    def target(self) -> Target:
        """What plans are made for."""
        return Target.named("baseline")

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        """Whether the op runs natively as it is, on these types; others are decomposed first, or run on the host."""
        return type(op).lower is not Op.lower and op.has_rule("lower")

    def reads_views(self, node: Node) -> bool:
        """Whether a node that is a separate step reads evenly spaced elements in place."""
        return False

    def runs_whole(self, node: Node) -> bool:
        """Whether a node that could be part of a kernel is better as a separate step."""
        return False

    def runs_on_host(self, node: Node) -> bool:
        """Whether no module can hold a node, for a backend that takes graphs."""
        return not self.takes(node.op, [x.type for x in node.inputs])

    # what `capabilities` promise

    def tune(self, lir: Lir, progress: Callable[[int, int], None] | None = None) -> Lir:
        """The plan with schedules that were searched for."""
        raise NotImplementedError

    def compile_spread(self, lir: Lir, spread: ThreadSpread) -> Executable:
        """A plan for several devices, each with its part of the arrays; the results are those of one."""
        raise NotImplementedError

    # about it

    @property
    def description(self) -> str:
        """What it runs on, in words."""
        return ""

    @property
    def count(self) -> int:
        """How many devices of this kind there are, where they are listed by number; 0 for one without a number."""
        return 0

    @property
    def archive(self) -> CodeArchive | None:
        """Machine code of plans that can be kept in a bundle."""
        return None

    def expecting(self, graph: Graph) -> AbstractContextManager[None]:
        """Held while a plan of a graph and its code are made: what makes the code may start meanwhile."""
        return nullcontext()

    def sources(self, lir: Lir) -> Mapping[str, str]:
        """The text that kernels become, by name, for `explain()`."""
        return {}


class SourceTexts(Mapping[str, str]):
    """Texts by name, each made when it is asked for: code of a large program is long."""

    def __init__(self, makers: Mapping[str, Callable[[], str]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> str:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class CodeArchive(Protocol):
    """Machine code of plans that can be kept in a bundle."""

    known: tuple[str, ...]
    """Names of all targets that code can be made for."""

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of targets of this machine's kind, from the least to the most demanding."""

    @property
    def version(self) -> str:
        """Of the way code is called: code of another version must not be loaded."""

    def takes(self, version: str) -> bool:
        """Whether code of this version can be loaded."""

    def record(self, lir: Lir) -> dict[str, bytes]: ...

    def load(self, lir: Lir, codes: Mapping[str, bytes]) -> Executable:
        """An executable of kept code; MissingCodeError where some is missing: none is made of a plan from a file."""


class MissingCodeError(LookupError):
    """Kept code does not have all that a plan runs."""


@dataclass(frozen=True)
class ThreadSpread:
    """Devices in a grid with named axes, and along which of them each axis of an array is cut."""

    axes: tuple[tuple[str, int], ...]
    cuts: Mapping[str, tuple[tuple[str, ...], ...]]

    @property
    def count(self) -> int:
        return prod(n for _, n in self.axes)

    def parts(self, names: tuple[str, ...]) -> int:
        """Into how many parts an axis is cut."""
        return prod(dict(self.axes)[name] for name in names)

    def part(self, cuts: Sequence[tuple[str, ...]], shape: Sequence[int], at: int) -> tuple[slice, ...]:
        """What the device at a place of the grid, counted row by row, has of an array."""
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            at, place[name] = divmod(at, size)
        found = []
        for size, names in zip(shape, cuts, strict=False):
            number = 0
            for name in names:
                number = number * dict(self.axes)[name] + place[name]
            length = size // self.parts(names)
            found.append(slice(number * length, (number + 1) * length))
        return tuple(found)
