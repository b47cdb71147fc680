"""As much of Gluon as warp-specialised attention uses, on NumPy: warps are threads, and nothing happens before it must.

Copies arrive late, after their place has been filled with NaN; products are taken when they are waited for, not when
they are asked for. So a block that is given back too early, or read too soon, shows in the result, and barriers that
do not fit together stop the test. Layouts mean nothing here: what they cost is seen in compiled code only.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

PATIENCE = 20.0  # seconds that a barrier is waited for


class Values(np.ndarray):
    """An array with the one method that NumPy lacks."""

    def to(self, dtype: Any) -> Values:
        return self.astype(dtype)


def values(x: Any) -> Values:
    return np.asarray(x).view(Values)


class Barrier:
    """An mbarrier: arrivals and bytes that are still to come, and the parity of the phase that it is in."""

    def __init__(self, world: World) -> None:
        self.world, self.changed = world, threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def _settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            self.changed.notify_all()

    def arrive(self, expected: int = 0) -> None:
        with self.changed:
            assert self.pending > 0, "more arrivals than a barrier counts"
            self.pending, self.bytes = self.pending - 1, self.bytes + expected
            self._settle()

    def copied(self, size: int) -> None:
        with self.changed:
            self.bytes -= size
            self._settle()

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase & 1 != int(parity) or self.world.failed, PATIENCE)
        assert done, "a barrier is waited for that never comes"
        assert not self.world.failed, "other warps have failed"


class Shared:
    """Shared memory: an array, or a part of one."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def index(self, i: int) -> Any:
        found = self.array[int(i)]
        return found if isinstance(found, Barrier) else Shared(found)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.array.reshape(shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.array.transpose(order))

    def store(self, x: np.ndarray) -> None:
        self.array[...] = x


class Pointer:
    """The address of an array's elements."""

    def __init__(self, array: np.ndarray, place: Any = 0) -> None:
        self.array, self.place = array, place

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.array, self.place + step)

    def store(self, x: np.ndarray, mask: np.ndarray) -> None:
        self.array.reshape(-1)[np.asarray(self.place)[mask]] = x[mask]


class Later:
    """A product that is taken when it is waited for."""

    def __init__(self, make: Callable[[], np.ndarray]) -> None:
        self.make = make


class Descriptor:
    """Rows of blocks in memory; outside of it, copies bring zeros and take nothing."""

    def __init__(self, base: np.ndarray, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> None:
        steps = [int(s) * base.itemsize for s in strides]
        self.view = np.lib.stride_tricks.as_strided(base, [int(n) for n in shape], steps)
        self.block = block

    def window(self, corner: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        ends = [min(int(c) + b, n) for c, b, n in zip(corner, self.block, self.view.shape, strict=True)]
        here = tuple(slice(int(c), max(e, int(c))) for c, e in zip(corner, ends, strict=True))
        return here, tuple(slice(0, s.stop - s.start) for s in here)


class World:
    """One program of a grid."""

    def __init__(self, program: int, programs: int, seed: int) -> None:
        self.program, self.programs = program, programs
        self.random = random.Random(seed)
        self.failed: BaseException | None = None

    def barrier_memory(self, shape: Sequence[int]) -> Any:
        return Barrier(self) if len(shape) == 1 else Shared([Barrier(self) for _ in range(shape[0])])

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        return self.barrier_memory(shape) if dtype is np.int64 else Shared(np.full(shape, np.nan, dtype))

    def load(self, source: Descriptor, corner: Sequence[int], barrier: Barrier, target: Shared) -> None:
        target.array[...] = np.nan
        here, there = source.window(corner)

        def arrive() -> None:
            made = np.zeros(target.array.shape, target.array.dtype)
            made[there] = source.view[here]
            target.array[...] = made
            barrier.copied(made.nbytes)

        threading.Timer(self.random.random() * 0.003, arrive).start()

    def save(self, target: Descriptor, corner: Sequence[int], source: Shared) -> None:
        here, there = target.window(corner)
        target.view[here] = source.array[there]

    def specialise(self, parts: Sequence[tuple[Any, Sequence[Any]]], warps: Any, registers: Any) -> None:
        def run(function: Any, arguments: Sequence[Any]) -> None:
            try:
                function(*arguments)
            except BaseException as error:  # noqa: BLE001 - handed on to the test
                self.failed = self.failed or error

        threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed

    def language(self) -> dict[str, Any]:
        """What the text imports, by name."""
        tl = SimpleNamespace(
            constexpr=lambda x: x, static_range=range, program_id=lambda _: self.program,
            num_programs=lambda _: self.programs, float32=np.float32, float16=np.float16, int64=np.int64,
            int32=np.int32, bfloat16=np.float32, warp_specialize=self.specialise, allocate_shared_memory=self.allocate,
            where=lambda c, a, b: values(np.where(c, a, b)), maximum=np.maximum, minimum=np.minimum,
            max=lambda x, axis: x.max(axis), sum=lambda x, axis: x.sum(axis), exp2=np.exp2, log2=np.log2,
            store=Pointer.store,
            arange=lambda a, b, _: values(np.arange(a, b)), zeros=lambda shape, t, _: values(np.zeros(shape, t)),
            convert_layout=lambda x, _: x, SliceLayout=_nothing, DotOperandLayout=_nothing,
            NVMMASharedLayout=_nothing, NVMMADistributedLayout=_nothing,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=_nothing, init=Barrier.init, wait=Barrier.wait, expect=Barrier.arrive, arrive=Barrier.arrive
        )
        tma = SimpleNamespace(
            make_tensor_descriptor=lambda base, shape, strides, block, _: Descriptor(base, shape, strides, block),
            async_copy_global_to_shared=self.load, async_copy_shared_to_global=self.save, store_wait=_nothing,
        )  # fmt: skip
        return {
            "tl": tl, "gluon": SimpleNamespace(jit=lambda f: f), "mbarrier": mbarrier, "tma": tma,
            "fence_async_shared": _nothing, "warpgroup_mma": _product, "warpgroup_mma_wait": _waited,
        }  # fmt: skip


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _product(a: Any, b: Shared, sums: np.ndarray, *, use_acc: bool = True, is_async: bool = False) -> Later:
    assert is_async

    def make() -> np.ndarray:
        left = a.array if isinstance(a, Shared) else a
        made = left.astype(np.float32) @ b.array.astype(np.float32)
        return values(made + sums if use_acc else made)

    return Later(make)


def _waited(outstanding: int, deps: Sequence[Later]) -> np.ndarray:
    (found,) = deps
    return found.make()


def run(text: str, name: str, grid: int, arguments: Sequence[Any]) -> None:
    """All programs of a grid, one after the other."""
    body = text[text.index("\nPART = ") :]  # behind its imports
    for program in range(grid):
        space = World(program, grid, program).language()
        exec(compile(body, "<gluon>", "exec"), space)  # noqa: S102 - a text that the renderer wrote
        space[name](*arguments)
