"""Machine code of whole plans, to be put into bundles and taken out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from strata.backends.llvm import jit
from strata.backends.llvm.kernels import copy_code, generator_version
from strata.backends.llvm.pool import native_code
from strata.core import Target
from strata.lir import Lir

if TYPE_CHECKING:
    from strata.backends.llvm.executable import CpuExecutable


class CpuArchive:
    """Levels of instruction sets, from the least to the most, and the code of a plan for each."""

    @property
    def levels(self) -> tuple[str, ...]:
        return ("neon",) if Target.host().has("neon") else ("baseline", "avx2", "avx512")

    @property
    def version(self) -> str:
        """Code is called as the version that made it says: another version must not load it."""
        return f"{generator_version()[:32]} {jit.VERSION}"

    def record(self, lir: Lir) -> dict[str, bytes]:
        """The machine code that the plan runs with, by key."""
        from strata.backends.llvm.executable import CpuExecutable

        with jit.recording() as codes:
            CpuExecutable(lir, lir.target)
            if any(s.updates for s in lir.schedule):
                jit.note(copy_code(lir.target))
            jit.note(native_code())
        return codes

    def load(self, lir: Lir, codes: Mapping[str, bytes]) -> CpuExecutable:
        """An executable whose code comes from a bundle."""
        from strata.backends.llvm.executable import CpuExecutable

        with jit.bundled(codes):
            return CpuExecutable(lir, lir.target)
