"""The only module that uses JAX and PJRT: clients, compiled modules, device arrays. Made for jax 0.10 and 0.11.

JAX is imported when a device of the `xla` kind is first used, not before. Its global settings are left alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np

from strata.backends.base import ThreadSpread
from strata.errors import DeviceError, OptionError, OutOfMemoryError, RunError
from strata.modules import imported

# what a compile must not do: keep more precision than the program says, or compute as if there were no NaN
_OPTIONS = {
    "xla_allow_excess_precision": False, "xla_cpu_enable_fast_math": False, "xla_cpu_enable_fast_min_max": False,
}  # fmt: skip


def listening(call: Callable[[], Any]) -> Any:
    """The result of a call that may never end: the main thread hears signals meanwhile, and may give it up."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            done.put((None, error))

    threading.Thread(target=work, name="strata-xla", daemon=True).start()
    result, error = done.get()
    if error is not None:
        raise error
    return result


def decoded(bytecode: bytes) -> str:
    """The text of a module in MLIR bytecode, plain or as a portable artifact."""
    try:
        ir, dialect = imported("jaxlib.mlir.ir"), imported("jaxlib.mlir.dialects.stablehlo")
        interpreters = imported("jax.interpreters.mlir")
    except ModuleNotFoundError:
        raise DeviceError(
            "MLIR bytecode is decoded by jaxlib, which is not installed; the module's text needs nothing", code="E130",
            fix="pip install 'strata[xla]', or give the text: exported.mlir_module()",
        ) from None  # fmt: skip
    context = interpreters.make_ir_context()
    problem: Exception | None = None
    for read in (dialect.deserialize_portable_artifact, lambda _, raw: ir.Module.parse(raw)):
        try:
            with context:
                return str(read(context, bytecode))
        except Exception as error:  # noqa: BLE001 - bindings raise kinds of their own
            problem = error
    raise OptionError(f"load: the bytecode cannot be decoded: {str(problem).splitlines()[0]}", code="O509") from None


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

    def place(self, index: int) -> DevicePlace:
        """One of the devices."""
        return DevicePlace(self, (index,))

    def grid(self, spread: ThreadSpread) -> Grid:
        """As many devices as a grid has places."""
        if spread.count > len(self.devices):
            fix = None
            if self.platform == "cpu":
                fix = f"XLA_FLAGS=--xla_force_host_platform_device_count={spread.count}, before JAX is imported"
            here = f"{self.platform} has {len(self.devices)} here"
            raise DeviceError(f"device 'xla': a grid of {spread.count} is not available; {here}", code="E101", fix=fix)
        return Grid(self, spread)

    def load(self, text: str, indices: Sequence[int], name: str) -> Any:
        """A module, compiled for devices that run it together."""
        options = self._xla.CompileOptions()
        options.env_option_overrides = list(_OPTIONS.items())
        if len(indices) > 1:
            build = options.executable_build_options
            options.num_partitions = build.num_partitions = len(indices)
            options.num_replicas = build.num_replicas = 1
            build.use_spmd_partitioning = build.use_shardy_partitioner = True
            ids = np.array([self.devices[i].id for i in indices]).reshape(1, -1)
            options.device_assignment = self._xla.DeviceAssignment.create(ids)
        devices = self._xla.DeviceList(tuple(self.devices[i] for i in indices))
        return self._guarded(lambda: self._client.compile_and_load(text, devices, options), f"compiling {name!r}")

    def put(self, parts: Sequence[np.ndarray], shape: Sequence[int], sharding: Any, indices: Sequence[int]) -> Any:
        """Parts of an array on devices. On a CPU they may stay in place: they must not change while in use."""
        with self._jax.enable_x64(True):  # of this thread: without it, 64 bits are silently cut to 32
            kind = self._jax.core.ShapedArray(tuple(shape), parts[0].dtype)
            places = [self.devices[i] for i in indices]
            return self._guarded(
                lambda: self._xla.batched_device_put(kind, sharding, list(parts), places, True), "moving arrays"
            )

    def on_one(self, index: int) -> Any:
        return self._jax.sharding.SingleDeviceSharding(self.devices[index])

    def on_grid(self, spread: ThreadSpread, cuts: Sequence[tuple[str, ...]]) -> Any:
        sharding = self._jax.sharding
        devices = np.array(self.devices[: spread.count]).reshape([n for _, n in spread.axes])
        return sharding.NamedSharding(
            sharding.Mesh(devices, [n for n, _ in spread.axes]), sharding.PartitionSpec(*(c or None for c in cuts))
        )

    def whole(self, parts: Sequence[Any], sharding: Any) -> Any:
        """One array of equal copies on several devices."""
        with self._jax.enable_x64(True):
            return self._jax.make_array_from_single_device_arrays(parts[0].shape, sharding, list(parts))

    def run(self, executable: Any, arguments: Sequence[Any]) -> list[Any]:
        """The results, which may not be there yet."""
        made: list[Any] = self._guarded(lambda: executable.execute(arguments), "running")
        return made

    def scratch_bytes(self, executable: Any) -> int:
        """Memory that a run of a module takes beside its arguments and results, on each device."""
        return int(executable.get_compiled_memory_stats().temp_size_in_bytes)

    def run_together(self, executable: Any, arguments: Sequence[Any]) -> list[list[Any]]:
        """The results of a module that several devices run: for each, what every device has of it."""
        made: list[list[Any]] = self._guarded(
            lambda: executable.execute_sharded(arguments).disassemble_into_single_device_arrays(), "running"
        )
        return made

    def take(self, array: Any) -> np.ndarray:
        """A result as an array that must not be written; waits until it is there."""
        made: np.ndarray = self._guarded(lambda: np.asarray(array), "running")
        return made

    def foreign(self, x: Any, index: int) -> Any:
        """An array of JAX, or of DLPack, that is on a device, as a row-major array of JAX; None for others.

        Arrays of the host that others may write to are not XLA's, even where XLA runs on the host.
        """
        if not isinstance(x, self._jax.Array):
            kind = {"rocm": 10}.get(self.platform, 2)
            if self.platform == "cpu" or not hasattr(x, "__dlpack_device__"):
                return None
            if tuple(map(int, x.__dlpack_device__())) != (kind, index):
                return None
            with self._jax.enable_x64(True):
                try:
                    return self._jax.numpy.array(self._jax.dlpack.from_dlpack(x), copy=True)
                except (self._jax.errors.JaxRuntimeError, TypeError, BufferError, RuntimeError):
                    return None  # a layout or a type that JAX does not take
        if x.devices() != {self.devices[index]}:
            return None
        order = x.format.layout.major_to_minor
        with self._jax.enable_x64(True):
            return x if order == tuple(range(x.ndim)) else self._jax.numpy.array(x, copy=True)

    def wait(self, index: int) -> None:
        made = self.put([np.zeros(1, np.float32)], (1,), self.on_one(index), (index,))
        self._guarded(made.block_until_ready, "running")

    def memory_limit(self, index: int) -> int | None:
        """What the device has; None where it does not say."""
        stats = self.devices[index].memory_stats()
        return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None

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


class DevicePlace:
    """A device: where modules are loaded and run, and arrays are kept."""

    def __init__(self, client: Client, indices: Sequence[int]) -> None:
        self.client, self.indices = client, tuple(indices)
        self._sharding = client.on_one(self.indices[0])

    def load(self, text: str, name: str) -> Any:
        return self.client.load(text, self.indices, name)

    def put(self, array: np.ndarray, name: str | None = None) -> Any:
        """An array on the device; the name is that of an input or parameter."""
        return self.client.put([array], array.shape, self._sharding, self.indices)

    def run(self, executable: Any, arguments: Sequence[Any]) -> list[Any]:
        return self.client.run(executable, arguments)

    def take(self, array: Any) -> np.ndarray:
        return self.client.take(array)


class Grid(DevicePlace):
    """Devices that run one module together, each on its part of the arrays. Results are whole on each of them."""

    def __init__(self, client: Client, spread: ThreadSpread) -> None:
        super().__init__(client, range(spread.count))
        self.spread = spread
        self._copies = client.on_grid(spread, ())

    def put(self, array: np.ndarray, name: str | None = None) -> Any:
        cuts = self.spread.cuts.get(name, ()) if name is not None else ()
        parts = [np.ascontiguousarray(array[self.spread.part(cuts, array.shape, at)]) for at in self.indices]
        sharding = self.client.on_grid(self.spread, cuts) if cuts else self._copies
        return self.client.put(parts, array.shape, sharding, self.indices)

    def run(self, executable: Any, arguments: Sequence[Any]) -> list[Any]:
        return [self.client.whole(parts, self._copies) for parts in self.client.run_together(executable, arguments)]
