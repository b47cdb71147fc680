"""Arrays of other libraries at the boundary of programs: taken without a copy, and the same kind given back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from strata.backends import DeviceArray, DeviceHome
from strata.core import TensorType, here
from strata.errors import DeviceError
from strata.modules import imported
from strata.runtime.execute.arrays import read_array

Wrap = Callable[[Sequence[Any]], tuple[Any, ...]]
_LIBRARIES = {  # by the first part of a type's module: where arrays are made of DLPack
    "torch": ("torch", "from_dlpack"), "cupy": ("cupy", "from_dlpack"), "jax": ("jax.dlpack", "from_dlpack"),
    "jaxlib": ("jax.dlpack", "from_dlpack"),
}  # fmt: skip


def like_first(given: Iterable[Any]) -> Wrap | None:
    """How results on the host become arrays of the library that the first foreign input comes from; None says NumPy."""
    for value in given:
        library = type(value).__module__.partition(".")[0]
        if library in _LIBRARIES:
            return partial(_as_library, library, type(value))
    return None


def as_given(given: Iterable[Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """Results on the host in the form of the inputs; what is not an array of numbers stays as it is."""
    wrap = like_first(given)
    if wrap is None:
        return tuple(results)
    return tuple([wrap([x])[0] if type(x) is np.ndarray and x.dtype.kind not in "OUS" else x for x in results])


def cast_to(value: Any, dtype: np.dtype) -> Any:
    """An array of a dtype, of the library and on the device that it comes from."""
    library = type(value).__module__.partition(".")[0]
    if library == "torch":
        return value.to(getattr(imported("torch"), dtype.name))
    if library in _LIBRARIES or hasattr(value, "__resident__"):
        return value.astype(dtype)
    return np.asarray(value, dtype)


def gathered(
    kinds: Sequence[tuple[str, TensorType]], find: Callable[[str], Any], home: DeviceHome
) -> tuple[list[Any], Wrap | None]:
    """Arrays for the inputs of a program at a home, and how its results become what the caller uses.

    None says NumPy: what the caller gave is on the host. The first array that is on the device, or of another library,
    decides.
    """
    arrays: list[Any] = []
    wrap: Wrap | None = None
    for name, kind in kinds:
        value = find(name)
        array, same = taken(name, kind, value, home, "input")
        arrays.append(array)
        wrap = wrap or same
    return arrays, wrap


def taken(name: str, kind: TensorType, value: Any, home: DeviceHome, what: str) -> tuple[Any, Wrap | None]:
    """One array, on the device if it is there already, checked against its type."""
    wrap: Wrap | None = None
    if type(value) is np.ndarray:
        return read_array(name, kind, value, what), None
    if hasattr(value, "__resident__"):  # a tensor
        value, wrap = value.__resident__()
    elif isinstance(value, DeviceArray):
        wrap = tuple
    else:
        library = type(value).__module__.partition(".")[0]
        if library in _LIBRARIES:
            found = _adopted(value, home)
            if library == "torch" and isinstance(found, DeviceArray) and value.is_cuda:
                wrap = TorchResults(value, home)
            else:
                wrap = partial(_as_library, library, type(value))
                if not isinstance(found, DeviceArray):
                    wrap = _from_host(wrap)
            value = found
    if isinstance(value, DeviceArray) and value.home is not home:
        raise DeviceError(
            f"{what} {name!r} is on {value.device!r}, the program runs on {home.name!r}", code="E103", place=here(),
            fix=f"{name}.to({str(home.name)!r})",
        )  # fmt: skip
    return read_array(name, kind, value, what), wrap


class TorchResults:
    """Results that PyTorch's allocator has the memory of: written there, they are its tensors without more ado."""

    def __init__(self, like: Any, home: DeviceHome) -> None:
        self._torch = imported("torch")
        self._like, self._home = like, home
        self._made: list[tuple[Any, DeviceArray]] = []

    def targets(self, makers: Sequence[Any]) -> dict[int, DeviceArray]:
        """Memory for results, by number."""
        for _, shape, dtype in makers:
            kind = getattr(self._torch, dtype.name, None)  # they have NumPy's names
            if kind is None:
                self._made.clear()
                return {}
            tensor = self._torch.empty(shape, dtype=kind, device=self._like.device)
            self._made.append((tensor, DeviceArray(self._home, dtype, shape, tensor.data_ptr(), tensor)))
        return {i: array for i, (_, array) in enumerate(self._made)}

    def __call__(self, results: Sequence[Any]) -> tuple[Any, ...]:
        self._home.before(self._torch.cuda.current_stream(self._like.device.index).cuda_stream)
        known = {id(array): tensor for tensor, array in self._made}
        return tuple([known[id(x)] if id(x) in known else self._torch.from_dlpack(x) for x in results])


def _adopted(value: Any, home: DeviceHome) -> Any:
    """The array in the device's memory, or what was given."""
    found = home.adopt(value)
    if found is not None:
        return found
    where = getattr(value, "__dlpack_device__", None)
    if where is not None and int(where()[0]) != 1:  # neither here nor on the host
        raise DeviceError(
            f"a {type(value).__module__.partition('.')[0]} array is on {getattr(value, 'device', where())}, "
            f"the program runs on {home.name!r}", code="E103", place=here(),
        )  # fmt: skip
    return value


def _from_host(wrap: Wrap) -> Wrap:
    """Arrays of the host come back there: a library may not know the device, and a device no library."""

    def wrapped(results: Sequence[Any]) -> tuple[Any, ...]:
        return wrap([x.numpy() if isinstance(x, DeviceArray) else x for x in results])

    return wrapped


def _as_library(library: str, kind: type, results: Sequence[Any]) -> tuple[Any, ...]:
    module, attribute = _LIBRARIES[library]
    make = getattr(imported(module), attribute)
    made: list[Any] = []
    for x in results:
        if isinstance(x, DeviceArray) and isinstance(x.place, kind):
            made.append(x.place)
        elif type(x) is np.ndarray and x.dtype.isbuiltin != 1:
            made.append(_narrow(library, x))
        else:
            made.append(make(x if isinstance(x, DeviceArray) or x.flags.writeable else x.copy()))
    return tuple(made)


def _narrow(library: str, x: np.ndarray) -> Any:
    """An array of a dtype that NumPy cannot hand over by DLPack (bf16, f8); NumPy's where the library has none."""
    if library == "torch":
        torch = imported("torch")
        kind = getattr(torch, x.dtype.name, None)  # they have the names of ml_dtypes
        return x if kind is None else torch.from_numpy(x.view(f"u{x.dtype.itemsize}")).view(kind)
    return imported("jax.numpy").asarray(x) if library in ("jax", "jaxlib") else x


def read_param(name: str, kind: TensorType, value: Any, home: DeviceHome | None) -> Any:
    """A parameter: an array of the host, or one that is on the program's device already."""
    if home is None or type(value) is np.ndarray:
        return read_array(name, kind, value, "parameter")
    if hasattr(value, "__resident__"):
        value = value.__resident__(keep=True)[0]
    return taken(name, kind, value, home, "parameter")[0]
