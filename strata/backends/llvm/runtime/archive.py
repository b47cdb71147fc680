"""Machine code of whole plans, stored in bundles and loaded from them."""

from __future__ import annotations

from collections.abc import Mapping

from strata.backends.llvm.codegen.kernels import copy_code, generator_version
from strata.backends.llvm.executor.thread_pool import native_code
from strata.backends.llvm.jit import jit
from strata.backends.llvm.runtime.executable import CpuExecutable
from strata.core import Target
from strata.lir import Lir


class CpuArchive:
    """Levels of instruction sets, from the least to the most, and the code of a plan for each."""

    # code for another kind of processor can be made, not loaded
    known: tuple[str, ...] = ("baseline", "avx2", "avx512", "neon")

    @property
    def levels(self) -> tuple[str, ...]:
        return ("neon",) if Target.host().has("neon") else ("baseline", "avx2", "avx512")

    @property
    def version(self) -> str:
        """Code is called as the version that made it says: another version must not load it."""
        return f"{generator_version()[:32]} {jit.VERSION}"

    def takes(self, version: str) -> bool:
        """Whether code of a version runs here: our own, or, where nothing can make other code, any of this source."""
        made, _, generator = version.partition(" ")
        if jit.VERSION == jit.NO_GENERATOR and made == generator_version()[:32]:
            jit.adopt(generator)
        return version == self.version

    def record(self, lir: Lir) -> dict[str, bytes]:
        """The machine code that the plan runs with, by key."""
        from strata.backends.llvm.jit.isolate import one_process

        with jit.recording() as codes, jit.elsewhere(), one_process():
            CpuExecutable(lir, lir.target)
            jit.note(copy_code(lir.target))  # bodies of loops want it, too
            jit.note(native_code(lir.target))
        return codes

    def load(self, lir: Lir, codes: Mapping[str, bytes]) -> CpuExecutable:
        """An executable whose code comes from a bundle."""
        with jit.bundled(codes):
            copy_code(lir.target)  # wanted when a program is bound to its sizes, which is later
            return CpuExecutable(lir, lir.target)
