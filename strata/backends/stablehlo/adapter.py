"""The one place that names JAX and PJRT: clients, compiled modules, arrays on a device. Made for jax 0.10.

JAX is imported when a device of the `xla` kind is first used, not before. Its global settings are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from strata.errors import DeviceError, OutOfMemoryError, RunError
from strata.modules import imported

# what a compile must not do: keep more precision than the program says, or compute as if there were no NaN
_OPTIONS = {
    "xla_allow_excess_precision": False, "xla_cpu_enable_fast_math": False, "xla_cpu_enable_fast_min_max": False,
}  # fmt: skip


@cache
def client() -> Client:
    """The client of the platform that JAX runs on: TPU, GPU or CPU. A ModuleNotFoundError where JAX is missing."""
    return Client()


class Client:
    """A PJRT client with its devices."""

    def __init__(self) -> None:
        self._jax = imported("jax")
        self._xla = imported("jaxlib.xla_client")
        try:
            self._client = imported("jax.extend.backend").get_backend()
        except RuntimeError as error:  # no platform could be started
            raise DeviceError(f"device 'xla' is not available: no PJRT client: {error}", code="E101") from None
        self._process = os.getpid()
        self.platform: str = self._client.platform
        self.devices: tuple[Any, ...] = tuple(self._client.local_devices())

    @property
    def version(self) -> str:
        return f"jax {self._jax.__version__}, {self.platform}"

    def compile(self, text: str, device: int, name: str) -> Any:
        """A module, loaded on a device."""
        options = self._xla.CompileOptions()
        options.env_option_overrides = list(_OPTIONS.items())
        devices = self._xla.DeviceList((self.devices[device],))
        return self._guarded(lambda: self._client.compile_and_load(text, devices, options), f"compiling {name!r}")

    def put(self, array: np.ndarray, device: int) -> Any:
        """An array on a device. On a CPU it may stay where it lies: it must not change while it is used."""
        place = self.devices[device]
        sharding = self._jax.sharding.SingleDeviceSharding(place)
        with self._jax.enable_x64(True):  # of this thread: without it, 64 bits are silently cut to 32
            kind = self._jax.core.ShapedArray(array.shape, array.dtype)
            return self._guarded(
                lambda: self._xla.batched_device_put(kind, sharding, [array], [place], True), "moving arrays"
            )

    def run(self, executable: Any, arguments: Sequence[Any]) -> list[Any]:
        """The results, which may not be there yet."""
        made: list[Any] = self._guarded(lambda: executable.execute(arguments), "running")
        return made

    def take(self, array: Any) -> np.ndarray:
        """A result as an array that must not be written; waits until it is there."""
        made: np.ndarray = self._guarded(lambda: np.asarray(array), "running")
        return made

    def _guarded(self, call: Callable[[], Any], doing: str) -> Any:
        if os.getpid() != self._process:  # its threads are gone
            raise DeviceError(f"xla, {doing}: a PJRT client cannot be used in a fork of its process", code="E101")
        try:
            return call()
        except self._jax.errors.JaxRuntimeError as error:
            text = str(error)
            if "RESOURCE_EXHAUSTED" in text:
                raise OutOfMemoryError(f"xla, {doing}: {text}") from None
            raise RunError(f"xla, {doing}: {text}") from None
