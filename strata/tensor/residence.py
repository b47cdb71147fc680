"""What tensors say of where they live: devices, and memory that is shared with other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from strata.backends import HOMES, DeviceArray, DeviceName
from strata.config import config
from strata.core import here
from strata.errors import DeviceError
from strata.mir import Value
from strata.tensor.copies import copied
from strata.tensor.data import Handle, handle_of
from strata.tensor.placement import HOST, device_of, handle_device, home_of
from strata.tensor.realize import realize_value
from strata.tensor.structure_key import is_traced


class Residence:
    """The part of a tensor that is about its memory."""

    __slots__ = ()

    if TYPE_CHECKING:
        _handle: Handle | None

        @property
        def value(self) -> Value: ...
        @property
        def _held(self) -> Handle | None: ...
        def _hold(self, handle: Handle) -> Handle: ...
        def _array(self) -> np.ndarray: ...
        @classmethod
        def of(cls, handle: Handle) -> Self: ...

    @property
    def device(self) -> DeviceName:
        """Where its elements are, or will be."""
        held = self._held
        if not HOMES or is_traced(self.value):
            return HOST
        found = device_of(self.value) if held is None else handle_device(held)
        if found is None:
            home = None if held is not None else home_of(config().device)
            found = HOST if home is None else home.name
        return found

    def to(self, device: Any, /) -> Self:
        """The tensor on a device: itself if it is there already, a copy otherwise.

        The copy of what is not computed yet is lazy, too: it is made when its elements are asked for, and is a step of
        the plans that need it."""
        if is_traced(self.value):
            raise DeviceError(
                f"to({str(device)!r}) of a tensor that is traced: a program runs on one device", code="E105",
                place=here(), fix="move the arguments of the function",
            )  # fmt: skip
        home = home_of(device)
        there = HOST if home is None else home.name
        if HOMES and self._held is None and handle_of(self.value) is None and self.value.type.is_static:
            where = device_of(self.value)
            if where == there:
                return self
            if where is not None:
                return type(self)(copied(self.value, str(there)))  # type: ignore[call-arg]
        held = self._hold(realize_value(self.value))
        array = held.array
        if home is None:
            return self.of(Handle(array.numpy(), held.type, held.binding)) if type(array) is DeviceArray else self
        if type(array) is DeviceArray and array.home is home:
            return self
        return self.of(Handle(home.upload(np.asarray(array)), held.type, held.binding, is_own=True))

    def to_device(self, device: Any, /, *, stream: Any = None) -> Self:
        """The Array API's name for it."""
        return self.to(device)

    def __resident__(self, *, keep: bool = False) -> tuple[Any, Any]:
        """Its array for compiled graphs, which may keep it, and how results of a device become tensors."""
        handle = self._handle or self._hold(realize_value(self.value))
        array = handle.for_keeping() if keep else handle.array
        return (array, self._results) if type(array) is DeviceArray else (self._array(), None)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The memory itself, without a copy: who takes it may write to it, so no other tensor has it from here on."""
        if self.device != HOST:
            if dl_device is not None and dl_device[0] == 1:
                return np.array(self._array()).__dlpack__(max_version=max_version)
            held = self._hold(realize_value(self.value)).for_writing()
            given = held.copy() if copy else held
            return given.__dlpack__(stream=stream, max_version=max_version)
        array = self._array()
        if copy:
            array = array.copy()
        elif array.flags.writeable:
            array = self._for_writing()
        elif not array.flags.writeable and (max_version is None or max_version < (1, 0)):
            array = array.copy()  # the old protocol has no way to say that memory is read-only
        options: dict[str, Any] = {} if max_version is None else {"max_version": max_version}
        if dl_device is not None:
            options["dl_device"] = dl_device
        return array.__dlpack__(stream=stream, **options)

    def _for_writing(self) -> np.ndarray:
        """The host's memory, for a holder that may write to it: read-only memory is copied first."""
        array = self._array()
        if self.device != HOST:
            return np.array(array)
        given: np.ndarray = self._hold(realize_value(self.value)).for_writing()
        return given

    def __dlpack_device__(self) -> tuple[int, int]:
        where = self.device
        home = None if where == HOST else home_of(where)
        return (1, 0) if home is None else home.dlpack_device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        held = None if self.device == HOST else self._hold(realize_value(self.value)).for_writing()
        if held is None:
            raise AttributeError("__cuda_array_interface__: the tensor is not on a CUDA device")
        found: dict[str, Any] = held.__cuda_array_interface__
        return found

    @classmethod
    def _results(cls, arrays: Sequence[Any]) -> tuple[Self, ...]:
        """Results of a compiled graph as tensors."""
        return tuple([cls.of(Handle(a, is_own=True)) for a in arrays])
