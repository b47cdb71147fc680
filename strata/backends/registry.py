"""Backends by device name, imported on first use."""

from __future__ import annotations

from typing import Any

from strata.arguments import own_checks
from strata.backends.base import Backend
from strata.core import Target, here, new_lock
from strata.errors import DeviceError, OptionError, UnknownDeviceError
from strata.kinds import with_article
from strata.mir import near
from strata.modules import imported

_MODULES = {
    "cpu": ("strata.backends.llvm.backend", "CpuBackend"),
    "reference": ("strata.backends.reference", "ReferenceBackend"),
    "cuda": ("strata.backends.triton.backend", "CudaBackend"),
    "wgpu": ("strata.backends.wgsl.backend", "WgpuBackend"),
    "xla": ("strata.backends.stablehlo.executable", "XlaBackend"),
}
_NEEDS = {  # devices by number, `xla` is `xla:0`, and what they run on: a package that may be missing
    "cuda": "pip install 'strata[cuda]', on a machine with an NVIDIA GPU and its driver",
    "wgpu": "pip install 'strata[wgpu]', on a machine with Vulkan, Metal or DirectX 12",
    "xla": "pip install 'strata[xla]'",
}
_TARGETS = ("metal", "mlx", "rocm", "tpu")  # names that plan: see backends/planned.py
_GPUS = (
    "gpu",
    "nvidia",
    "amd",
    "hip",
    "mps",
    "mtl",
    "vulkan",
    "vk",
    "webgpu",
    "opengl",
    "directx",
    "dx12",
)  # elsewhere
_made: dict[str, Backend] = {}
_named = {*_MODULES}  # names that a backend has or had
REPLACED: list[str] = []  # names that another backend took, in their order
_lock = new_lock()


@own_checks("backend")
def register_backend(name: str, backend: Backend) -> None:
    """Make a backend available as a device; an existing one of that name is replaced."""
    kind, reason = with_article(type(backend)), ""
    if not isinstance(backend, Backend):
        lacks = sorted({"name", *Backend.__abstractmethods__}.difference(dir(backend)))
        parts = f" and has no {' and no '.join(lacks)}" if lacks else ""
        reason = f"{kind}, which is not a strata.backends.Backend{parts}"
    elif not backend.name:
        reason = f"{kind} without a name"
    elif not isinstance(name, str) or not name.isidentifier():
        reason = f"the name {name!r}"
    if reason:
        raise OptionError(f"register_backend: takes a name and a backend, got {reason}", code="O413", place=here())
    with _lock:
        if name in _named and _made.get(name) is not backend:
            REPLACED.append(name)
        _named.add(name)
        _made[name] = backend


def registration(device: str) -> int:
    """Which of the backends that had a device's name has it now: part of the key of a program that is kept by name."""
    return REPLACED.count(device.partition(":")[0])


def known_backends() -> list[str]:
    """Kinds of devices that there may be; those that need a package may turn out not to be there."""
    return sorted({*_MODULES, *(name.partition(":")[0] for name in _made)})


def backend_for(name: str) -> Backend:
    """The backend of a device name, `cuda:1` and `cpu:avx2` included."""
    if not isinstance(name, str):
        raise UnknownDeviceError(f"a device is given by its name, got {name!r}", code="E101", place=here())
    kind, _, part = name.partition(":")
    key, given = kind, list[Any]()
    if kind == "cpu" and part and not part.isdecimal():  # with code that needs no more than these instructions
        key, given = name, [Target.named(part)]
    elif kind in _NEEDS and kind not in _made and (part.isdecimal() or not part):
        key, given = f"{kind}:{int(part or 0)}", [int(part or 0)]
    with _lock:
        if key not in _made:
            if key in _NEEDS or kind not in _MODULES:
                raise _not_there(name)
            module, attribute = _MODULES[kind]
            try:
                _made[key] = getattr(imported(module), attribute)(*given)
            except ModuleNotFoundError as error:
                raise _not_there(name, f": {error}") from None
        return _made[key]


def planner_for(name: str) -> Backend:
    """The backend to plan with: of a device, or of a target that another device runs."""
    if not isinstance(name, str) or name not in _TARGETS or name in _made:
        return backend_for(name)
    made: Backend = imported("strata.backends.planned").PLANNED[name](name)
    return made


def _not_there(name: str, why: str | None = None) -> DeviceError:
    kind = name.partition(":")[0]
    if kind in _TARGETS:
        found: DeviceError = imported("strata.backends.planned").no_device(kind)
        return found
    if why is None:
        known = sorted({*(_MODULES.keys() - _NEEDS), *(k for k in _made if ":" not in k)})
        told = "; a GPU is cuda (NVIDIA) or wgpu (Vulkan, Metal, DirectX 12)" if kind in _GPUS else near(kind, known)
        why = f"; known: {', '.join(known)}{'' if kind in _NEEDS else told}"
    kind_of_error = DeviceError if kind in _MODULES else UnknownDeviceError
    return kind_of_error(f"device {name!r} is not available{why}", code="E101", fix=_NEEDS.get(kind))
