"""Backends by device name, imported on first use."""

from __future__ import annotations

from typing import Any

from strata.backends.base import Backend
from strata.core import Target, here, new_lock
from strata.errors import DeviceError, OptionError
from strata.mir import near
from strata.modules import imported

_BUILT_IN = {
    "cpu": ("strata.backends.llvm.executable", "CpuBackend"),
    "reference": ("strata.backends.reference", "ReferenceBackend"),
}
_NEEDS = {  # what devices of these kinds run on, when they are there
    "cuda": "pip install 'strata[cuda]', on a machine with an NVIDIA GPU and its driver",
    "wgpu": "pip install 'strata[wgpu]', on a machine with Vulkan, Metal or DirectX 12",
    "xla": "pip install 'strata[xla]'",
}
_made: dict[str, Backend] = {}
_levels: dict[str, Backend] = {}  # of the processor, for instruction sets by name: `cpu:avx2`
_lock = new_lock()


def register_backend(name: str, backend: Backend) -> None:
    """Make a backend available as a device; an existing one of that name is replaced."""
    lacks = [part for part in ("name", "target", "takes", "compile") if not hasattr(backend, part)]
    if lacks or not isinstance(name, str) or not name.isidentifier():
        reason = f"a {type(backend).__name__} without {', '.join(lacks)}" if lacks else f"the name {name!r}"
        raise OptionError(f"register_backend: takes a name and a backend, got {reason}", code="O413", place=here())
    with _lock:
        _made[name] = backend


def known_backends() -> list[str]:
    return sorted({*_BUILT_IN, *_made})


def backend_for(name: str) -> Backend:
    """The backend of a device name, `cuda:1` and `cpu:avx2` included."""
    if not isinstance(name, str):
        raise DeviceError(f"a device is given by its name, got {name!r}", code="E101", place=here())
    kind, _, part = name.partition(":")
    if kind == "cpu" and part and not part.isdecimal():
        return _cpu_for(part)
    with _lock:
        if kind in _made:
            return _made[kind]
        if kind not in _BUILT_IN:
            known = sorted({*_BUILT_IN, *_made})
            hint = "" if kind in _NEEDS else near(kind, known)
            raise DeviceError(
                f"device {name!r} is not available; there are {', '.join(known)}{hint}",
                code="E101",
                fix=_NEEDS.get(kind),
            )
        module, attribute = _BUILT_IN[kind]
        backend: Any = getattr(imported(module), attribute)()
        _made[kind] = backend
        return backend


def _cpu_for(level: str) -> Backend:
    """The processor, with code that needs no more than one of the known instruction sets."""
    target = Target.named(level)
    with _lock:
        if f"cpu:{level}" not in _levels:
            module, attribute = _BUILT_IN["cpu"]
            _levels[f"cpu:{level}"] = getattr(imported(module), attribute)(target)
        return _levels[f"cpu:{level}"]
