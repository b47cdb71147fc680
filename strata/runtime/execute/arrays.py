"""Callers' arrays: anything with `__array__`, `__dlpack__` or a buffer, checked against declared types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.arguments import public
from strata.backends import HOMES, DeviceArray
from strata.core import TensorType, as_dtype, bf16, check_unmasked, f16, f32, from_dlpack, here
from strata.errors import DeviceError, DTypeError, OptionError, OutOfMemoryError, ShapeError, StrataError

FEW = 4  # arrays that are compared with each other sooner than put in order
HALVES = (f16.np, bf16.np)
NAMED = 4  # parameters that a message names
USABLE = 0x101  # flags of an array whose elements lie one after the other, each at a multiple of its size


@public
@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array that is kept elsewhere, in a file: it is read each time that somebody asks for it."""

    read: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.read()
        return array if dtype is None else array.astype(dtype, copy=False)


def read_array(name: str, kind: TensorType, value: Any, what: str) -> Any:
    """The value as a contiguous array of the declared type, without a copy where that is possible.

    Parameters of f32 take f16 and bf16, as checkpoints have them: no digit is lost."""
    array: Any = value if type(value) is DeviceArray else to_numpy(value, name, what)
    is_python = isinstance(value, (bool, int, float, complex, list, tuple))
    widens = kind.dtype is f32 and what == "parameter" and array.dtype in HALVES and type(array) is not DeviceArray
    if array.dtype != kind.dtype.np and not widens and not _converts(array.dtype, kind.dtype.np, is_python):
        raise DTypeError(f"{what} {name!r} is {kind}, got {describe(array)}", code="D102", place=here())
    fits = len(array.shape) == kind.ndim and all(
        not isinstance(d, int) or d == n for d, n in zip(kind.shape, array.shape, strict=True)
    )
    if not fits:
        raise ShapeError(f"{what} {name!r} is {kind}, got {describe(array)}", code="S107", place=here())
    if type(array) is DeviceArray or (array.flags.num & USABLE == USABLE and array.dtype == kind.dtype.np):
        return array
    try:
        return np.array(array, kind.dtype.np, order="C").reshape(array.shape)
    except MemoryError as error:
        raise OutOfMemoryError(f"{what} {name!r} must be copied: {error}", code="X121", place=here()) from None


def _converts(given: np.dtype, declared: np.dtype, is_python: bool) -> bool:
    """Numbers of Python become what is declared unless a part of them would be lost; others only change byte order."""
    if not is_python:
        return given.newbyteorder("=") == declared
    kinds = "biufc"
    return (
        given.kind not in kinds or kinds.find(given.kind) <= max(2, kinds.find(declared.kind)) or declared.kind == "V"
    )


def to_numpy(value: Any, name: str, what: str) -> np.ndarray:
    """NumPy's view of an array-like object."""
    if isinstance(value, np.ndarray):
        check_unmasked(value)
        return value
    if HOMES:
        _check_host(value, name, what)
    try:
        if not hasattr(value, "__dlpack__"):
            array = np.asarray(value)
        elif not hasattr(value, "__array__"):
            return from_dlpack(value)
        else:
            try:
                array = np.asarray(value)
            except TypeError:  # elements that NumPy has no type for
                return from_dlpack(value)
    except StrataError:
        raise
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise DTypeError(
            f"{what} {name!r}: {type(value).__name__} cannot be read as an array: {error}", code="D401", place=here()
        ) from None
    if array.dtype.kind in "OUSV" and array.dtype.isbuiltin == 1:
        raise DTypeError(
            f"{what} {name!r}: {type(value).__name__} cannot be read as an array of numbers", code="D401", place=here()
        )
    return array


def _check_host(value: Any, name: str, what: str) -> None:
    """Refuse what is in the memory of a device: it comes to the host only where somebody says so."""
    if hasattr(value, "__resident__"):
        value = value.__resident__()[0]
    if isinstance(value, DeviceArray):
        raise DeviceError(
            f"{what} {name!r} is on {value.device!r}, the program runs on 'cpu'", code="E103", place=here(),
            fix=f"{name}.to('cpu'), or Session({str(value.device)!r})",
        )  # fmt: skip


def kept_apart(
    arrays: list[np.ndarray], outputs: Sequence[np.ndarray], in_place: Callable[[int, int], bool]
) -> list[np.ndarray]:
    """The inputs, copied where an output lies over them. Outputs that overlap are refused.

    An array that is both is left alone where in_place(input, output) says that the one is made by changing the other.
    """
    if len(outputs) == 1 and outputs[0].base is None:  # the call that has to be quick
        for x in arrays:
            if x is outputs[0] or x.base is not None:
                break
        else:
            return arrays
    places: dict[int, int] = {}
    views = False
    for j, y in enumerate(outputs):
        places[id(y)] = j
        views = views or y.base is not None
    same = []
    for i, x in enumerate(arrays):
        views = views or x.base is not None
        if id(x) in places:
            same.append(i)
    if not views and len(places) == len(outputs):  # all have their own memory: they are the same or apart
        copied = {i for i in same if not in_place(i, places[id(arrays[i])])} if same else None
        return [x.copy() if i in copied else x for i, x in enumerate(arrays)] if copied else arrays
    copied = set()
    for j, k in _overlaps([*outputs, *arrays], len(outputs)):
        i = k - len(outputs)
        if i < 0:
            raise OptionError(f"outputs {j} and {k} overlap", code="O151", place=here())
        if not (_same(arrays[i], outputs[j]) and in_place(i, j)):
            copied.add(i)
    return [x.copy() if i in copied else x for i, x in enumerate(arrays)] if copied else arrays


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return x is y or (_start(x) == _start(y) and x.nbytes == y.nbytes)


def _start(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


def _overlaps(arrays: Sequence[np.ndarray], first: int) -> Iterator[tuple[int, int]]:
    """Pairs of contiguous arrays that share memory, by their places; one of them is among the `first` ones."""
    if len(arrays) <= FEW:
        for j in range(first):
            yield from ((j, k) for k in range(j + 1, len(arrays)) if np.may_share_memory(arrays[j], arrays[k]))
        return
    open_: list[tuple[int, int]] = []  # end and place of arrays that may reach over the next one
    for start, end, k in sorted((_start(x), _start(x) + x.nbytes, k) for k, x in enumerate(arrays) if x.nbytes):
        open_ = [(e, j) for e, j in open_ if e > start]
        yield from ((min(j, k), max(j, k)) for _, j in open_ if min(j, k) < first)
        open_.append((end, k))


def check_output(number: int, kind: TensorType, array: Any) -> None:
    """Refuse an array that results cannot be written into."""
    if not isinstance(array, np.ndarray) or array.dtype != kind.dtype.np:
        found = describe(array) if isinstance(array, np.ndarray) else type(array).__name__
        raise DTypeError(f"output {number} is {kind}, got {found}", code="D102", place=here())
    reason = ""
    if not array.flags.c_contiguous:
        reason = " that is not contiguous"
    elif not array.flags.writeable:
        reason = " that cannot be written"
    elif array.size and _start(array) % array.itemsize:
        reason = " at an address that is not a multiple of its elements' size"
    if reason or array.shape != kind.shape:
        raise ShapeError(f"output {number} is {kind}, got {describe(array)}{reason}", code="S107", place=here())


def describe(array: Any) -> str:
    """`f32[2, 3]`"""
    order = "" if array.dtype.isnative else " of another byte order"
    return f"{as_dtype(array.dtype)}{list(array.shape)}{order}"


def signature(graph: Any, most: int = NAMED) -> str:
    """The first inputs, parameters and outputs of a compiled graph, with their types."""
    inputs = [f"{n}: {t}" for n, t in graph._inputs]
    params = [f"param {n}: {t}" for n, t in graph._params.items()]
    given = [*_first(inputs, most, "input"), *_first(params, most, "parameter")]
    return f"({', '.join(given)}) -> {', '.join(_first([str(t) for t in graph._outputs], most, 'output'))}"


def _first(shown: list[str], most: int, noun: str) -> list[str]:
    rest = len(shown) - most
    return [*shown[:most], f"… {rest} more {noun}{'s' * (rest > 1)}"] if rest > 0 else shown
