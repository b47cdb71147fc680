"""The memory of a PJRT device: JAX arrays, which never change, as strata's device arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.backends.resident import DeviceArray, DeviceBlock, DeviceHome
from strata.backends.stablehlo.adapter import Client

_DLPACK = {"cpu": 1, "gpu": 2, "cuda": 2, "rocm": 10}  # kinds of devices, by platform


class XlaHome(DeviceHome):
    """One of a client's devices."""

    def __init__(self, name: str, client: Client, index: int) -> None:
        super().__init__(name)
        self.client, self.index = client, index
        self._sharding = client.on_one(index)
        self.dlpack_device = (_DLPACK.get(client.platform, 0), 0 if client.platform == "cpu" else index)

    def holding(self, array: Any, who: str) -> DeviceArray:
        """An array of JAX as one of ours."""
        with self.ledger.lock:
            self.sweep()
            self.check_room(array.nbytes, who)
            self.ledger.add(array.nbytes, who)
        block = DeviceBlock(None, array.nbytes, who, self.ledger.returned.append)
        return DeviceArray(self, np.dtype(array.dtype), tuple(array.shape), array, block)

    def empty(self, dtype: np.dtype[Any], shape: Sequence[int], who: str = "tensors") -> DeviceArray:
        return self.upload(np.zeros(tuple(shape), dtype), who)

    def upload(self, array: np.ndarray, who: str = "tensors") -> DeviceArray:
        """A copy: what JAX is given may stay where it is."""
        own = np.array(array, order="C").reshape(array.shape)
        return self.holding(self.client.put([own], own.shape, self._sharding, (self.index,)), who)

    def download(self, x: DeviceArray, out: np.ndarray | None = None) -> np.ndarray:
        found = self.client.take(x.place)
        if out is None:
            return found
        out[...] = found
        return out

    def copied(self, x: DeviceArray) -> DeviceArray:
        """The same: it never changes."""
        return x

    def assign(self, target: DeviceArray, source: DeviceArray) -> None:
        """The handle holds another array from here on; the old one stays as it was for whoever has it."""
        target.place, target.block = source.place, source.block

    def front(self, x: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
        return self.holding(x.place.reshape(-1)[: int(np.prod(shape, dtype=np.int64))].reshape(shape), x.block.who)

    def adopt(self, x: Any) -> DeviceArray | None:
        array = self.client.foreign(x, self.index)
        return None if array is None else DeviceArray(self, np.dtype(array.dtype), tuple(array.shape), array, x)

    def dlpack(self, x: DeviceArray, stream: Any, options: dict[str, Any]) -> Any:
        return x.place.__dlpack__(stream=stream, **options)

    def wait(self) -> None:
        """Reading waits for what is read; a device does things in their order."""
        self.client.wait(self.index)

    def total_bytes(self) -> int | None:
        return self.client.memory_limit(self.index)
