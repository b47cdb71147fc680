"""The few calls of the CUDA driver that every launch needs, straight through ctypes: a launch takes about 2 µs.

`cuda.core` opens devices, loads code and allocates; this module launches, copies, and builds graphs of launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from strata.errors import RunError

_EVENT_WITHOUT_TIMES = 2
_SERIAL_BUT_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_KIND_OF_MEMORY = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_EARLY = 1  # an edge of a graph whose second kernel may begin, and waits, when all programs of the first have begun


class PreparedLaunch:
    """One launch: code, grid and arguments of 8 bytes, of which addresses change from run to run."""

    __slots__ = ("arguments", "entry", "head", "patches", "pointers")

    def __init__(
        self,
        entry: Any,
        function: int,
        grid: Sequence[int],
        threads: int,
        shared: int,
        arguments: Sequence[int],
        patches: Sequence[tuple[int, int, int]],
    ) -> None:
        """`patches` are arguments that are addresses: number of the argument, of the memory, and bytes in it."""
        self.entry = entry  # keeps the code loaded
        self.head = (function, *(*grid, 1, 1)[:3], threads, 1, 1, shared)
        self.arguments = (ctypes.c_uint64 * max(len(arguments), 1))(*arguments)
        start, size = ctypes.addressof(self.arguments), ctypes.sizeof(ctypes.c_uint64)
        self.pointers = (ctypes.c_void_p * max(len(arguments), 1))(
            *(start + size * i for i in range(max(len(arguments), 1)))
        )
        self.patches = tuple(patches)

    def patch(self, places: Sequence[int]) -> None:
        """Let the addresses be those of a run."""
        arguments = self.arguments
        for i, base, offset in self.patches:
            arguments[i] = places[base] + offset


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((f"grid{i}", ctypes.c_uint) for i in range(3)),
        *((f"block{i}", ctypes.c_uint) for i in range(3)),
        ("shared", ctypes.c_uint),
        ("pointers", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        *((f"grid{i}", ctypes.c_uint) for i in range(3)),
        *((f"block{i}", ctypes.c_uint) for i in range(3)),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute"""

    _fields_ = (("kind", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _Edge(ctypes.Structure):
    """CUgraphEdgeData"""

    _fields_ = (("outgoing", ctypes.c_ubyte), ("incoming", ctypes.c_ubyte), ("kind", ctypes.c_ubyte),
                ("reserved", ctypes.c_ubyte * 5))  # fmt: skip


class DriverCalls:
    """The driver's library. With `overlaps`, launches of a graph begin while those before them end."""

    def __init__(self, *, overlaps: bool = False) -> None:
        lib = ctypes.CDLL("libcuda.so.1")
        self.overlaps = overlaps and hasattr(lib, "cuGraphAddDependencies_v2")  # of CUDA 12.3 and later
        self._quick = ctypes.CFUNCTYPE(ctypes.c_int)(("cuLaunchKernelEx", lib))
        u32, u64, ptr = ctypes.c_uint, ctypes.c_uint64, ctypes.c_void_p
        self._launch = _typed(lib.cuLaunchKernel, ptr, *[u32] * 7, ptr, ptr, ptr)
        self._copy = _typed(lib.cuMemcpyDtoDAsync_v2, u64, u64, ctypes.c_size_t, ptr)
        self._down = _typed(lib.cuMemcpyDtoHAsync_v2, ptr, u64, ctypes.c_size_t, ptr)
        self._up = _typed(lib.cuMemcpyHtoDAsync_v2, u64, ptr, ctypes.c_size_t, ptr)
        self._pinned = _typed(lib.cuMemAllocHost_v2, ptr, ctypes.c_size_t)
        self._pointer = _typed(lib.cuPointerGetAttribute, ptr, ctypes.c_int, u64)
        self._current = _typed(lib.cuCtxGetCurrent, ptr)
        self._function = _typed(lib.cuKernelGetFunction, ptr, ptr)
        self._info = _typed(lib.cuMemGetInfo_v2, ptr, ptr)
        self._graph = _typed(lib.cuGraphCreate, ptr, u32)
        self._node = _typed(lib.cuGraphAddKernelNode_v2, ptr, ptr, ptr, ctypes.c_size_t, ptr)
        self._instantiate = _typed(lib.cuGraphInstantiateWithFlags, ptr, ptr, ctypes.c_ulonglong)
        self._set_node = _typed(lib.cuGraphExecKernelNodeSetParams_v2, ptr, ptr, ptr)
        if self.overlaps:
            self._edge = _typed(lib.cuGraphAddDependencies_v2, ptr, ptr, ptr, ptr, ctypes.c_size_t)
        self._launch_graph = _typed(lib.cuGraphLaunch, ptr, ptr)
        self._end_graph = _typed(lib.cuGraphDestroy, ptr)
        self._end_executable = _typed(lib.cuGraphExecDestroy, ptr)
        self._event = _typed(lib.cuEventCreate, ptr, u32)
        self._record = _typed(lib.cuEventRecord, ptr, ptr)
        self._wait = _typed(lib.cuStreamWaitEvent, ptr, ptr, u32)
        self._query = _typed(lib.cuEventQuery, ptr)
        self._await = _typed(lib.cuEventSynchronize, ptr)
        self._version = _typed(lib.cuDriverGetVersion, ptr)
        self._error = _typed(lib.cuGetErrorName, ctypes.c_int, ptr)

    def check(self, status: int) -> None:
        if status:
            name = ctypes.c_char_p()
            self._error(status, ctypes.byref(name))
            raise RunError(f"{(name.value or b'CUDA error').decode()} ({status})", code="X140")

    def context(self) -> int | None:
        """The context that is current in this thread."""
        found = ctypes.c_void_p()
        self._current(ctypes.byref(found))
        return found.value

    def version(self) -> tuple[int, int]:
        """The newest CUDA that the driver knows."""
        found = ctypes.c_int()
        self.check(self._version(ctypes.byref(found)))
        return found.value // 1000, found.value % 1000 // 10

    def function(self, kernel: int) -> int:
        """The function of a kernel in the current context."""
        found = ctypes.c_void_p()
        self.check(self._function(ctypes.byref(found), kernel))
        return found.value or 0

    def free_and_total(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(self._info(ctypes.byref(free), ctypes.byref(total)))
        return free.value, total.value

    def launch(self, prepared: PreparedLaunch, stream: int) -> None:
        status = self._launch(*prepared.head, stream, prepared.pointers, None)
        if status:
            self.check(status)

    def launcher(self, prepared: PreparedLaunch, stream: int, *, early: bool = False) -> Callable[[], int]:
        """A call that launches with the arguments of the moment, and gives the driver's status. An early launch begins
        while the one before it on the stream ends."""
        attribute = _LaunchAttribute(_SERIAL_BUT_EARLY, 0, 1)
        given_early = (ctypes.addressof(attribute), 1) if early else (None, 0)
        config = _LaunchConfig(*prepared.head[1:], stream, *given_early)
        config.kept = attribute  # an address alone keeps nothing
        given = (ctypes.pointer(config), ctypes.c_void_p(prepared.head[0]), prepared.pointers, None)
        return partial(self._quick, *given)  # four arguments of ctypes already: each takes its time

    def copy(self, source: int, target: int, size: int, stream: int) -> None:
        self.check(self._copy(target, source, size, stream))

    def down(self, source: int, target: int, size: int, stream: int) -> None:
        """From the device to pinned memory of the host, when the stream is there."""
        self.check(self._down(target, source, size, stream))

    def up(self, source: int, target: int, size: int, stream: int) -> None:
        """From pinned memory of the host to the device, when the stream is there."""
        self.check(self._up(target, source, size, stream))

    def pinned(self, size: int) -> int:
        """Memory of the host that the device copies from and to by itself."""
        made = ctypes.c_void_p()
        self.check(self._pinned(ctypes.byref(made), size))
        return made.value or 0

    def is_known(self, address: int) -> bool:
        """Whether memory of the host is the driver's, or registered with it: copies from there do not wait."""
        kind = ctypes.c_uint()
        return not self._pointer(ctypes.byref(kind), _KIND_OF_MEMORY, address)

    def graph(self, launches: Sequence[PreparedLaunch]) -> KernelGraph:
        return KernelGraph(self, launches)

    def event(self) -> int:
        made = ctypes.c_void_p()
        self.check(self._event(ctypes.byref(made), _EVENT_WITHOUT_TIMES))
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        self.check(self._record(event, stream))

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event; the caller does not."""
        self.check(self._wait(stream, event, 0))

    def await_event(self, event: int) -> None:
        """Wait for an event."""
        self.check(self._await(event))

    def is_done(self, event: int) -> bool:
        return not self._query(event)


class KernelGraph:
    """Launches that follow each other as one. Arguments that change are set in what is launched: nothing is captured
    again."""

    def __init__(self, calls: DriverCalls, launches: Sequence[PreparedLaunch]) -> None:
        self._calls = calls
        self._graph, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        calls.check(calls._graph(ctypes.byref(self._graph), 0))
        before: ctypes.c_void_p | None = None
        self._nodes: list[tuple[int, _KernelNode]] = []
        edge = _Edge(_EARLY, 0, _EARLY)
        for launch in launches:
            node, made = _node_of(launch), ctypes.c_void_p()
            after = None if before is None or calls.overlaps else ctypes.byref(before)
            calls.check(
                calls._node(ctypes.byref(made), self._graph, after, 0 if after is None else 1, ctypes.byref(node))
            )
            if before is not None and calls.overlaps:
                ends = ctypes.byref(before), ctypes.byref(made)
                calls.check(calls._edge(self._graph, *ends, ctypes.byref(edge), 1))
            self._nodes.append((made.value or 0, node))
            before = made
        calls.check(calls._instantiate(ctypes.byref(self._executable), self._graph, 0))

    def set(self, at: int) -> None:
        """Take the arguments of a launch as they are now."""
        node, parameters = self._nodes[at]
        self._calls.check(self._calls._set_node(self._executable, node, ctypes.byref(parameters)))

    def launch(self, stream: int) -> None:
        self._calls.check(self._calls._launch_graph(self._executable, stream))

    def __del__(self) -> None:
        if self._executable.value:
            self._calls._end_executable(self._executable)
        if self._graph.value:
            self._calls._end_graph(self._graph)


def _node_of(launch: PreparedLaunch) -> _KernelNode:
    node = _KernelNode()
    node.function = launch.head[0]
    for i in range(3):
        setattr(node, f"grid{i}", launch.head[1 + i])
        setattr(node, f"block{i}", launch.head[4 + i])
    node.shared = launch.head[7]
    node.pointers = ctypes.addressof(launch.pointers)
    return node


def _typed(function: Any, *kinds: Any) -> Any:
    function.argtypes, function.restype = kinds, ctypes.c_int
    return function
