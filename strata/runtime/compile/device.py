"""Devices: their names, which of them exist here, and the default for a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.arguments import own_checks, public
from strata.backends import Backend, MemoryUse, backend_for, known_backends
from strata.core import here
from strata.errors import CompileError, DeviceError, OptionError


@public
@own_checks("name")
@dataclass(frozen=True, slots=True)
class Device:
    """A place to run: `cpu`, `cuda:0`, `wgpu`, `xla`, `reference`. Making one that is not there is an error.

    `cpu:avx2`, `cpu:avx512`, `cpu:neon` and `cpu:baseline` are the processor with code for that instruction set.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise OptionError(f"a device is given by its name, got {self.name!r}", code="O405", place=here())
        try:
            backend_for(self.name)
        except (CompileError, DeviceError) as error:
            error.place = error.place or here()
            raise

    @property
    def kind(self) -> str:
        """The name without a number."""
        return self.name.partition(":")[0]

    @property
    def index(self) -> int:
        number = self.name.partition(":")[2]
        return int(number) if number.isdecimal() else 0

    @property
    def backend(self) -> Backend:
        return backend_for(self.name)

    @property
    def full_name(self) -> str:
        """The name and what it runs on."""
        description = self.backend.description
        return f"{self.name} ({description})" if description else self.name

    def __str__(self) -> str:
        return self.name


def devices() -> list[str]:
    """Devices that programs can run on here, by name."""
    found = []
    for name in known_backends():
        try:
            backend = backend_for(name)
        except DeviceError:
            continue
        found += [f"{name}:{i}" for i in range(backend.count)] or [name]
    return found


_AS_IT_IS: Any = object()


@own_checks("device", "limit")
def memory(device: str | Device, *, limit: int | None = _AS_IT_IS) -> MemoryUse:
    """Memory of a device in bytes: in use, the most so far, cached, the limit, and who holds it.

    With `limit`, that much may be in use from here on: what needs more is an OutOfMemoryError. None takes it away.
    """
    home = backend_for(str(device)).home
    if home is None:
        raise DeviceError(
            f"memory: {str(device)!r} computes in the memory of this process", code="E106", place=here(),
            fix="compiled.memory, which is of one program",
        )  # fmt: skip
    if limit is not _AS_IT_IS:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise OptionError(f"memory: limit is a number of bytes, got {limit!r}", code="O436", place=here())
        home.limit = limit
    return home.memory()
