"""Devices: their names, which of them exist here, and the default for a graph."""

from __future__ import annotations

from dataclasses import dataclass

from strata.arguments import own_checks
from strata.backends import Backend, backend_for, known_backends
from strata.core import here
from strata.errors import CompileError, DeviceError, OptionError


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
