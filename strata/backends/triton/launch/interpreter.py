"""A device for tests: kernels run by Triton's interpreter on NumPy memory.

It shows what the text of a kernel means, not what a GPU makes of it. Triton decides when it is imported whether it
interprets, so that a process for this device is started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from strata.backends.driver import DeviceDriver
from strata.backends.triton.codegen.render import Rendered, render
from strata.backends.triton.launch.compile import is_interpreting
from strata.backends.triton.launch.jobs import function_of
from strata.backends.triton.launch.launchable import LaunchableKernel
from strata.core import here
from strata.errors import DeviceError, RunError
from strata.kernel import Kernel

_TYPES = {  # of pointers, as Triton takes them from tensors
    "*u8": "uint8", "*i8": "int8", "*u16": "uint16", "*i16": "int16", "*u32": "uint32", "*i32": "int32",
    "*u64": "uint64", "*i64": "int64", "*fp16": "float16", "*bf16": "uint16", "*fp32": "float32", "*fp64": "float64",
}  # fmt: skip


class Pointer:
    """As much of a tensor as the interpreter asks for: an address and a type."""

    def __init__(self, array: np.ndarray, kind: str) -> None:
        self.array, self.dtype = array, _TYPES[kind]

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> Pointer:
        return self

    def cpu(self) -> Pointer:
        return self

    def new_empty(self, *_: Any, **__: Any) -> Pointer:
        return self

    def set_(self, *_: Any) -> None:
        """It is where it was."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return (self.array.size,)

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def copy_(self, other: Pointer) -> None:
        """It is the same memory."""


@cache
def _spread_conditions() -> None:
    """Triton 3.6 makes floats of a condition of one element when it meets those of a block; here it stays one."""
    from triton.runtime.interpreter import InterpreterBuilder

    spread = InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        made = spread(self, kind, value)
        if value.data.dtype == np.bool_:
            made.data = made.data.astype(np.bool_)
        return made

    InterpreterBuilder.create_splat = create_splat


class InterpreterDriver(DeviceDriver):
    """Buffers are NumPy bytes that start as garbage."""

    has_parts = True
    has_arena = True
    has_guards = True

    def __init__(self) -> None:
        if not is_interpreting():
            raise DeviceError(
                "Triton's interpreter is off in this process", code="E101", place=here(), fix="TRITON_INTERPRET=1"
            )
        super().__init__()
        _spread_conditions()
        self.launches: list[str] = []

    def allocate(self, size: int) -> np.ndarray:
        whole = np.full(size + 64, 0xA5, np.uint8)
        start = -whole.ctypes.data % 64
        return whole[start : start + size]

    def release(self, buffer: np.ndarray) -> None:
        """Memory goes with its last reference."""

    def part(self, place: np.ndarray, offset: int) -> np.ndarray:
        return place[offset:] if offset else place

    def write(self, buffer: np.ndarray, array: np.ndarray) -> None:
        buffer[: array.nbytes] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)

    def read(self, buffer: np.ndarray, array: np.ndarray) -> None:
        array[...] = np.frombuffer(buffer[: array.nbytes].tobytes(), array.dtype).reshape(array.shape)

    def copy(self, source: np.ndarray, target: np.ndarray, size: int) -> None:
        target[:size] = source[:size]

    def make(self, kernel: Kernel) -> LaunchableKernel:
        return self.make_rendered(render(kernel))

    def make_rendered(self, rendered: Rendered) -> LaunchableKernel:
        return LaunchableKernel(rendered)

    def launch(self, made: LaunchableKernel, buffers: Sequence[np.ndarray], sizes: Mapping[str, int]) -> None:
        for program, chosen, numbers, grid in made.launches(buffers, sizes):
            function = function_of(program.text(interpreted=True), program.name)
            kinds = list(program.signature.values())
            pointers = [Pointer(b, kind) for b, kind in zip(chosen, kinds, strict=False)]
            self.launches.append(program.name)
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore", RuntimeWarning)  # NumPy on rows of NaN: what GPUs do without a word
                try:
                    function[grid](*pointers, *numbers)
                except Exception as error:
                    raise RunError(f"Triton's interpreter fails in {program.name}: {error}", code="X112") from error

    def finish(self) -> None:
        """The interpreter does one thing after the other."""
