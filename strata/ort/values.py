"""OrtValue, OrtDevice, OrtMemoryInfo: values of a session and where they are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.errors import ArgumentError, StrataError
from strata.io import onnx
from strata.ort.enums import OrtAllocatorType, OrtDeviceMemoryType, OrtDeviceVendorId, OrtMemType
from strata.ort.exceptions import Fail, InvalidArgument, NotOffered, RuntimeException
from strata.places import here

_DEVICE_TYPES = {"cpu": 0, "cuda": 1, "gpu": 1, "dml": 1, "webgpu": 1, "fpga": 2, "cann": 3, "npu": 3}
_MAKERS = {"cuda": OrtDeviceVendorId.NVIDIA, "dml": OrtDeviceVendorId.MICROSOFT, "cann": OrtDeviceVendorId.HUAWEI}


class OrtDevice:
    """A device by its kind and number."""

    def __init__(self, kind: int, number: int, vendor: int = 0) -> None:
        self._kind, self._number, self._vendor = kind, number, vendor

    @staticmethod
    def make(ort_device_name: str, device_id: int, vendor_id: int | OrtDeviceVendorId = -1) -> OrtDevice:
        """The device of a name."""
        kind = _DEVICE_TYPES.get(ort_device_name.lower()) if isinstance(ort_device_name, str) else None
        if kind is None:
            raise RuntimeException(f"Unsupported device type: {ort_device_name}", code="O701", plain=True)
        maker = _MAKERS.get(ort_device_name.lower(), 0) if int(vendor_id) < 0 else int(vendor_id)
        return OrtDevice(kind, int(device_id), maker)

    @staticmethod
    def cpu() -> int:
        """The number of the kind of CPUs."""
        return _DEVICE_TYPES["cpu"]

    @staticmethod
    def cuda() -> int:
        """The number of the kind of GPUs."""
        return _DEVICE_TYPES["cuda"]

    @staticmethod
    def default_memory() -> int:
        """The number of the kind of a device's own memory."""
        return int(OrtDeviceMemoryType.DEFAULT)

    def device_id(self) -> int:
        """Its number."""
        return self._number

    def device_type(self) -> int:
        """The number of its kind: 0 is a CPU."""
        return self._kind

    def device_vendor_id(self) -> int:
        """The number of its maker."""
        return self._vendor

    def device_mem_type(self) -> int:
        """The number of the kind of its memory."""
        return 0


@dataclass(frozen=True)
class OrtMemoryInfo:
    """Where memory is."""

    name: str
    allocator_type: OrtAllocatorType
    device_id: int
    mem_type: OrtMemType


CPU_MEMORY = OrtMemoryInfo("Cpu", OrtAllocatorType.ORT_DEVICE_ALLOCATOR, 0, OrtMemType.DEFAULT)


def element_dtype(element_type: Any) -> np.dtype[Any]:
    """NumPy's type for one of NumPy's or for a number of ONNX's."""
    if isinstance(element_type, int) and not isinstance(element_type, bool):
        if element_type not in onnx.dtypes.NUMPY:
            raise RuntimeException(f"tensor type {element_type} is not supported", code="O701", plain=True)
        return _of_numbers(onnx.dtypes.NUMPY[element_type])
    try:
        return _of_numbers(np.dtype(element_type))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"not an element type: {error}", code="O702", place=here()) from None


def _of_numbers(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype not in onnx.dtypes.NUMBER or onnx.dtypes.is_text(dtype):
        raise RuntimeException(
            "Creation of OrtValues is currently only supported from non-string numpy arrays", code="O701", plain=True
        )
    return dtype


def require_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape whose sizes are whole numbers from 0 on."""
    sizes = tuple(int(d) for d in shape)
    if any(d < 0 for d in sizes):
        raise RuntimeException(f"Tensor shape.Size() must be >= 0, the shape is {list(sizes)}", code="S701", plain=True)
    return sizes


def require_host(device_type: str) -> None:
    """Refuse memory that is not the host's."""
    if not isinstance(device_type, str) or device_type.lower() not in ("cpu", "cuda_pinned"):
        OrtDevice.make(device_type, 0)
        raise NotOffered(f"values in the memory of {device_type!r}: give arrays of the host")


def type_of(value: Any) -> str:
    """The type of a value in ONNX's words."""
    if isinstance(value, list):
        return f"seq({type_of(value[0])})" if value else "seq(tensor(float))"
    if isinstance(value, dict):
        key = "string" if value and isinstance(next(iter(value)), str) else "int64"
        return f"map({key},tensor(float))"
    if value is None:
        return "optional"
    number = onnx.dtypes.STRING if value.dtype.kind in "OUS" else onnx.dtypes.NUMBER.get(value.dtype)
    return (
        f"tensor({onnx.dtypes.NAMES.get(number, value.dtype.name)})"
        if number is not None
        else f"tensor({value.dtype.str if value.dtype.byteorder == '>' else value.dtype.name})"
    )


class OrtValue:
    """A tensor, or a sequence of them, in the memory of the host. Arrays are shared, not copied."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, (np.ndarray, list, dict, type(None))):
            raise InvalidArgument(f"an OrtValue is made from an array, got {type(value).__name__}", plain=True)
        self._value = value

    @classmethod
    def ortvalue_from_numpy(
        cls, numpy_obj: np.ndarray, /, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """A value that shares an array's memory."""
        require_host(device_type)
        _of_numbers(numpy_obj.dtype if isinstance(numpy_obj, np.ndarray) else onnx.dtypes.TEXT)
        return cls(np.ascontiguousarray(numpy_obj) if numpy_obj.ndim else numpy_obj)

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(cls, data: np.ndarray, /, onnx_element_type: int) -> OrtValue:
        """A value whose bytes are an array's, with another type of the same width."""
        if not isinstance(data, np.ndarray):
            raise ArgumentError(f"data is a NumPy array, got {type(data).__name__}", code="O702", place=here())
        dtype = element_dtype(onnx_element_type)
        if dtype.itemsize != data.dtype.itemsize:
            raise RuntimeException(
                f"elements of {data.dtype} have {data.dtype.itemsize} bytes, those of type {onnx_element_type} "
                f"have {dtype.itemsize}", code="O701", plain=True,
            )  # fmt: skip
        return cls(np.ascontiguousarray(data).view(dtype))

    @classmethod
    def ortvalue_from_shape_and_type(
        cls,
        shape: Sequence[int],
        element_type: Any,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int = -1,
        memory_info: OrtMemoryInfo | None = None,
    ) -> OrtValue:
        """A value of a shape, whose elements are not set."""
        if memory_info is None:
            require_host(device_type)
        return cls(np.empty(require_sizes(shape), element_dtype(element_type)))

    @classmethod
    def from_dlpack(cls, data: Any, /) -> OrtValue:
        """A value that shares the memory of any array of the host."""
        if isinstance(data, OrtValue):
            return cls(data._tensor())
        try:
            return cls(np.from_dlpack(data))
        except (TypeError, ValueError, BufferError, RuntimeError, AttributeError) as error:
            raise ArgumentError(f"from_dlpack: {error}", code="O702", place=here()) from None

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        found = self._tensor().__dlpack_device__()
        return int(found[0]), int(found[1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy) if copy else np.asarray(self.numpy(), dtype=dtype)

    def _tensor(self) -> np.ndarray:
        if not isinstance(self._value, np.ndarray):
            raise RuntimeException("Only OrtValues that are Tensors are currently supported", code="O701", plain=True)
        return self._value

    def numpy(self) -> np.ndarray:
        """The array."""
        return self._tensor()

    def data_ptr(self) -> int:
        """The address of its first element."""
        return int(self._tensor().ctypes.data)

    def device_name(self) -> str:
        """Where it is."""
        return "cpu"

    def shape(self) -> list[int]:
        """Its sizes."""
        return list(self._tensor().shape)

    def data_type(self) -> str:
        """Its type in ONNX's words."""
        return type_of(self._value)

    def element_type(self) -> int:
        """The number of its element type; of the elements' type where it is a sequence."""
        held = self._value[0] if isinstance(self._value, list) and self._value else self._tensor()
        return onnx.dtypes.NUMBER[held.dtype]

    def tensor_size_in_bytes(self) -> int:
        """Bytes of its elements."""
        return int(self._tensor().nbytes)

    def has_value(self) -> bool:
        """Whether an optional has an element."""
        return self._value is not None

    def is_tensor(self) -> bool:
        """Whether it is a tensor."""
        return isinstance(self._value, np.ndarray)

    def is_sparse_tensor(self) -> bool:
        """Whether it is a sparse tensor."""
        return False

    def is_tensor_sequence(self) -> bool:
        """Whether it is a sequence of tensors."""
        return isinstance(self._value, list)

    def update_inplace(self, data: np.ndarray | OrtValue) -> None:
        """Copy elements into the memory of this value."""
        if not isinstance(data, (np.ndarray, OrtValue)):
            raise ArgumentError("data must be a numpy.ndarray or an OrtValue.", code="O702", place=here())
        source, target = data._tensor() if isinstance(data, OrtValue) else data, self._tensor()
        if source.size != target.size:
            raise RuntimeException(
                "The input size of numpy arrays does not match the size of the OrtValue.", code="S701", plain=True
            )
        if source.dtype != target.dtype:
            raise Fail(f"the value is {type_of(target)}, the data are {type_of(source)}", code="O701")
        np.copyto(target, source.reshape(target.shape))


class OrtValueVector(list[OrtValue]):
    """Values in a row, as bindings hand them out."""

    def push_back(self, value: OrtValue) -> None:
        """Add a value at the end."""
        self.append(value)

    def element_type_at(self, index: int) -> int:
        """The number of the element type of a value."""
        return self[index].element_type()

    def bool_tensor_indices(self) -> list[int]:
        """Which values are tensors of truth values."""
        return [i for i, x in enumerate(self) if x.data_type() == "tensor(bool)"]


def at_address(address: int, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray:
    """An array over memory that somebody else holds."""
    sizes = require_sizes(shape)
    count = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
    if not count:
        return np.empty(sizes, dtype)
    if not isinstance(address, int) or address <= 0:
        raise InvalidArgument(f"the address of a buffer is {address!r}", plain=True)
    return np.frombuffer(memoryview((ctypes.c_char * count).from_address(address)), dtype).reshape(sizes)


def as_feed(name: str, value: Any) -> Any:
    """What a session takes for an input: arrays, values, lists of numbers, sequences."""
    if isinstance(value, OrtValue):
        return value._value
    if isinstance(value, np.ndarray) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(x, (np.ndarray, OrtValue)) for x in value):
            return [as_feed(name, x) for x in value]
        try:
            np.asarray(value)
        except (ValueError, StrataError):
            raise RuntimeException("Could not create tensor from given input list", code="O701", plain=True) from None
        return list(value)  # numbers, which become elements of the declared type
    if isinstance(value, np.generic) or hasattr(value, "__dlpack__") or hasattr(value, "__array__"):
        return np.asarray(value)
    if isinstance(value, dict):
        if not value:
            raise RuntimeException(
                "Size of dictionary is empty, unable to run the prediction.", code="O701", plain=True
            )
        return value
    if not isinstance(value, Iterable):
        raise RuntimeException(f"Unable to handle object of type {type(value)}", code="O701", plain=True)
    raise RuntimeException(
        f"Input must be a list of dictionaries or a single numpy array for input '{name}'.", code="O701", plain=True
    )
