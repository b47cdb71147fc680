"""GPUs that kernels are compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from strata.core import Target
from strata.errors import CompileError


@dataclass(frozen=True, slots=True)
class Gpu:
    """An architecture as Triton names it: (`cuda`, 90, 32) or (`hip`, `gfx942`, 64)."""

    kind: str
    arch: int | str
    warp: int
    is_real: bool = True  # not Triton's interpreter, which knows no Gluon

    @staticmethod
    def named(name: str) -> Gpu:
        """`sm_90`, `gfx942`."""
        if found := re.fullmatch(r"sm_(\d{2,3})", name):
            return Gpu("cuda", int(found[1]), 32)
        if re.fullmatch(r"gfx[0-9a-f]{3,5}", name):
            return Gpu("hip", name, 64 if name.startswith("gfx9") else 32)
        raise CompileError(f"{name!r} is not a GPU that strata knows; sm_90 and gfx942 are", code="C110")

    @property
    def key(self) -> str:
        return f"{self.kind} {self.arch} {self.warp}"

    @property
    def overlaps(self) -> bool:
        """Whether a launch may begin while the one before it ends: its programs then wait before they read anything."""
        return self.kind == "cuda" and isinstance(self.arch, int) and self.arch >= 90

    @property
    def target(self) -> Target:
        """For plans: a GPU's lanes are its warps."""
        return Target(str(self), "nvptx64-nvidia-cuda" if self.kind == "cuda" else "amdgcn-amd-amdhsa",
                      str(self), (), 4 * self.warp, 255)  # fmt: skip

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.kind == "cuda" else str(self.arch)
