"""The only module that uses the `wgpu` package: a device, its buffers, shader launches."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from strata.backends.driver import DeviceDriver, Launchable
from strata.backends.recipe import number as size_of
from strata.backends.wgsl.bounds import MOST
from strata.backends.wgsl.phases import phases_of
from strata.backends.wgsl.render import FLAG, Shader, render
from strata.core import Table, substitute
from strata.errors import CompileError, DeviceError, OutOfMemoryError, RunError
from strata.kernel import Buffer, Kernel, Phases
from strata.modules import imported

INSTALL = "pip install 'strata[wgpu]', on a machine with Vulkan, Metal or DirectX 12"
SIDE = 65535  # workgroups along one dimension of a grid
MOST_POINTS = (1 << 31) - (1 << 24)  # of a grid: those beyond the last must have numbers, too
_BATCH = 64  # launches that are recorded before they are handed to the device
_BETWEEN = 4  # storage buffers that are left for those between phases, and for a guard's flag
_WANTED = ("max-storage-buffers-per-shader-stage", "max-storage-buffer-binding-size", "max-buffer-size")


class BufferPart(NamedTuple):
    """Memory inside of a buffer."""

    buffer: Any
    offset: int


class CompiledShader(Launchable):
    """The shaders of a kernel, and the buffers between them."""

    def __init__(self, kernel: Kernel, shaders: tuple[Shader, ...], between: Sequence[Buffer]) -> None:
        super().__init__(kernel, between)
        self.shaders = shaders
        self.declared = {b.name: b for b in (*kernel.buffers, *between)}
        self.pipelines: dict[bool, list[Any]] = {}  # by whether memory is written in a buffer that is read, too
        self.tables: Table[tuple[int, tuple[int, ...]], Any] = Table("uniforms")
        self._guarded: CompiledShader | None = None

    def guarded(self) -> CompiledShader:
        if self._guarded is None:
            kernel = replace(self.kernel, inputs=(FLAG, *self.kernel.inputs))
            self._guarded = CompiledShader(kernel, tuple(s.guarded() for s in self.shaders), self.between)
        return self._guarded


def open_device(number: int = 0) -> WgpuDriver:
    """A driver for an adapter: the one that wgpu would choose, or one by its number.

    A DeviceError says what is missing where there is none; ModuleNotFoundError is left to who asked."""
    wgpu: Any = imported("wgpu")
    _load_triton_first()
    try:
        if not number:
            adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
        else:
            adapter = dict(enumerate(wgpu.gpu.enumerate_adapters_sync())).get(number)
    except Exception as error:  # noqa: BLE001 - wgpu raises RuntimeError, and its own classes, by version
        raise DeviceError(f"device 'wgpu' is not available: {error}", code="E101", fix=INSTALL) from None
    if adapter is None:
        raise DeviceError(f"device 'wgpu:{number}' is not available: wgpu finds no such GPU", code="E101", fix=INSTALL)
    return WgpuDriver(wgpu, adapter)


def _load_triton_first() -> None:
    """Vulkan in software (Mesa) has an LLVM inside, and so has Triton, which ends the process if it is loaded second.

    Whoever uses torch after this device would load it: its optimisers and its compiler do.
    """
    found = find_spec("triton") if sys.platform == "linux" else None
    if found is None or found.origin is None or "triton" in sys.modules:
        return
    with suppress(OSError):  # there is none, or it cannot be loaded, then or now
        ctypes.CDLL(str(Path(found.origin).parent / "_C" / "libtriton.so"))


class WgpuDriver(DeviceDriver):
    """Runs shaders on a GPU. Launches are recorded, and handed over when something waits for them."""

    has_parts = True
    alignment = 256  # the most that WebGPU lets a device ask for
    has_guards = True

    def __init__(self, wgpu: Any, adapter: Any) -> None:
        super().__init__()
        self._wgpu = wgpu
        limits = {name: adapter.limits[name] for name in _WANTED if name in adapter.limits}
        self.has_halves = "shader-f16" in adapter.features
        features = ["shader-f16"] if self.has_halves else []
        self._device = adapter.request_device_sync(required_limits=limits, required_features=features)
        info = adapter.info if hasattr(adapter.info, "get") else {}
        self.name = str(info.get("device", "GPU"))
        self.is_software = info.get("adapter_type") == "CPU"  # shaders run on the processor
        self.limits = {name: int(self._device.limits[name]) for name in _WANTED}
        # of a kernel: its phases may hand on a few more, and a guard has a flag
        self.most_buffers = max(self.limits["max-storage-buffers-per-shader-stage"] - _BETWEEN, 4)
        self._encoder: Any = None
        self._recorded = 0
        self._usage = (
            wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST  # fmt: skip
        )

    # memory

    def allocate(self, size: int) -> Any:
        most = min(self.limits["max-storage-buffer-binding-size"], self.limits["max-buffer-size"])
        if size > most:
            raise OutOfMemoryError(
                f"a buffer of {size:,} bytes: {self.name} binds {most:,} bytes at most (maxStorageBufferBindingSize)",
                code="X121",
            )
        try:
            return self._device.create_buffer(size=-(-size // 4) * 4, usage=self._usage)
        except Exception as error:
            if "emory" not in str(error):
                raise
            raise OutOfMemoryError(f"{size:,} bytes on {self.name}: {error}", code="X121") from None

    def release(self, buffer: Any) -> None:
        self._flush()
        buffer.destroy()

    def part(self, place: Any, offset: int) -> Any:
        buffer, start = _buffer_and_offset(place)
        return BufferPart(buffer, start + offset) if start + offset else buffer

    def write(self, buffer: Any, array: np.ndarray) -> None:
        if not array.nbytes:
            return
        self._flush()
        buffer, offset = _buffer_and_offset(buffer)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.size % 4:
            data = np.concatenate([data, np.zeros(-data.size % 4, np.uint8)])
        self._device.queue.write_buffer(buffer, offset, data)

    def read(self, buffer: Any, array: np.ndarray) -> None:
        if not array.nbytes:
            return
        self._flush()
        count = -(-array.nbytes // 4) * 4
        data = np.frombuffer(self._device.queue.read_buffer(*_buffer_and_offset(buffer), count), np.uint8)
        array.reshape(-1).view(np.uint8)[...] = data[: array.nbytes]

    def copy(self, source: Any, target: Any, size: int) -> None:
        if size:
            ends = (*_buffer_and_offset(source), *_buffer_and_offset(target))
            self._recorder().copy_buffer_to_buffer(*ends, -(-size // 4) * 4)

    # kernels

    def make(self, kernel: Kernel) -> CompiledShader:
        return self.make_phases(kernel, phases_of(kernel))

    def make_phases(self, kernel: Kernel, phases: Phases) -> CompiledShader:
        """Normalized kernels that together compute what one with these buffers would."""
        shaders = tuple(render(phase, halves=self.has_halves) for phase in phases.kernels)
        return CompiledShader(kernel, shaders, phases.scratch)

    def _pipeline(self, shader: Shader, *, shared: bool) -> Any:
        """With `shared`, for memory that is read in a buffer that is written elsewhere: all of it is then declared as
        written, since a buffer has one use in a dispatch."""
        most = self.limits["max-storage-buffers-per-shader-stage"]
        if len(shader.buffers) + shader.is_guarded > most:
            raise CompileError(
                f"kernel {shader.name} reads and writes {len(shader.buffers)} buffers, {self.name} takes {most}",
                code="C161",
            )
        try:
            text = shader.text.replace("var<storage, read>", "var<storage, read_write>") if shared else shader.text
            module = self._device.create_shader_module(code=text)
        except Exception as error:  # noqa: BLE001 - classes differ by version of wgpu
            raise CompileError(f"kernel {shader.name}: {self.name} refuses its shader: {error}", code="C160") from None
        kinds = self._wgpu.BufferBindingType
        entries = [
            {
                "binding": number,
                "visibility": self._wgpu.ShaderStage.COMPUTE,
                "buffer": {"type": kinds.storage if shared or name in shader.written else kinds.read_only_storage},
            }
            for number, name in enumerate(shader.buffers)
        ]
        if shader.sizes:
            entries.append({
                "binding": len(entries), "visibility": self._wgpu.ShaderStage.COMPUTE, "buffer": {"type": kinds.uniform}
            })  # fmt: skip
        if shader.is_guarded:
            flag = {"type": kinds.storage if shared else kinds.read_only_storage}
            entries.append({"binding": len(entries), "visibility": self._wgpu.ShaderStage.COMPUTE, "buffer": flag})
        layout = self._device.create_bind_group_layout(entries=entries)
        whole = self._device.create_pipeline_layout(bind_group_layouts=[layout])
        pipeline = self._device.create_compute_pipeline(layout=whole, compute={"module": module, "entry_point": "main"})
        return pipeline, layout

    def launch(self, made: CompiledShader, buffers: Sequence[Any], sizes: Mapping[str, int]) -> None:
        known = {name: _buffer_and_offset(place) for name, place in made.named(buffers).items()}
        shared = len({id(buffer) for buffer, _ in known.values()}) < len(known)
        if shared not in made.pipelines:
            made.pipelines[shared] = [self._pipeline(shader, shared=shared) for shader in made.shaders]
        for number, (shader, (pipeline, layout)) in enumerate(zip(made.shaders, made.pipelines[shared], strict=True)):
            for dim in shader.axes:
                _number(dim, sizes, shader.name)
            groups = 1
            for extents, each in shader.grid:
                count = prod(_number(d, sizes, shader.name) for d in extents)
                if count * groups > MOST_POINTS:
                    raise OutOfMemoryError(f"kernel {shader.name} has {count:,} points: shaders take {MOST_POINTS:,}")
                groups *= -(-count // each)
            groups = -(-groups // shader.many)
            if not groups:
                continue
            entries = []
            for at, name in enumerate(shader.buffers):
                buffer, offset = known[name]
                size = buffer.size
                if shared or offset:
                    size = max(-(-size_of(made.declared[name].type.nbytes, sizes) // 4) * 4, 4)
                entries.append({"binding": at, "resource": {"buffer": buffer, "offset": offset, "size": size}})
            if shader.sizes:
                table = self._table(made, number, tuple(_number(d, sizes, shader.name) for d in shader.sizes))
                entries.append(
                    {"binding": len(entries), "resource": {"buffer": table, "offset": 0, "size": table.size}}
                )
            if shader.is_guarded:
                buffer, offset = known[FLAG.name]
                flag = {"buffer": buffer, "offset": offset, "size": 4}
                entries.append({"binding": len(entries), "resource": flag})
            group = self._device.create_bind_group(layout=layout, entries=entries)
            work = self._recorder().begin_compute_pass()
            work.set_pipeline(pipeline)
            work.set_bind_group(0, group)
            work.dispatch_workgroups(min(groups, SIDE), -(-groups // SIDE))
            work.end()
            self._recorded += 1
        if self._recorded >= _BATCH:
            self._flush()

    def _table(self, made: CompiledShader, number: int, values: tuple[int, ...]) -> Any:
        """A buffer with the sizes of a launch; launches of the same sizes share it."""

        def make() -> Any:
            data = np.zeros(-(-len(values) // 4) * 4, np.int32)
            data[: len(values)] = values
            return self._device.create_buffer_with_data(data=data, usage=self._wgpu.BufferUsage.UNIFORM)

        return made.tables.get_or_make((number, values), make)

    def _recorder(self) -> Any:
        if self._encoder is None:
            self._encoder = self._device.create_command_encoder()
        return self._encoder

    def _flush(self) -> None:
        if self._encoder is not None:
            encoder, self._encoder, self._recorded = self._encoder, None, 0
            self._device.queue.submit([encoder.finish()])

    def submit(self) -> None:
        self._flush()

    def finish(self) -> None:
        self._flush()


def _buffer_and_offset(place: Any) -> tuple[Any, int]:
    return place if isinstance(place, BufferPart) else (place, 0)


def _number(dim: Any, sizes: Mapping[str, int], name: str) -> int:
    value = substitute(dim, sizes)
    if not isinstance(value, int):
        raise RunError(f"size {dim} is not known when kernel {name} runs", code="X110")
    if value > MOST:
        raise OutOfMemoryError(f"kernel {name} goes over {value:,} elements along {dim}: shaders take {MOST:,}")
    return value
