"""Targets: what generated code may assume about the processor, as plain data."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

from strata.errors import CompileError, OptionError
from strata.places import here

_AVX2: Final = (
    "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe",
    "cx16",
)  # fmt: skip
_AVX512: Final = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
_LEVELS: Final = {
    "baseline": ("x86-64", (), 16, 16),
    "avx2": ("haswell", _AVX2, 32, 16),
    "avx512": ("skylake-avx512", _AVX512, 64, 32),
    "neon": ("generic", ("neon", "fp-armv8"), 16, 32),
}
# features of the host worth generating code for; the rest of what the processor reports is left out, so that a
# target's text (and with it every cache key) depends only on what can change the code
_KNOWN: Final = {
    "x86_64": frozenset((
        *_AVX512, "avx512vnni", "avx512bf16", "avx512vbmi", "gfni", "avxvnni",
        "amx-tile", "amx-int8", "amx-bf16", "avx512fp16",
    )),
    "aarch64": frozenset(("neon", "fp-armv8", "dotprod", "fullfp16", "bf16", "i8mm")),
}  # fmt: skip
_LINUX_NAMES: Final = {
    "sse4_1": "sse4.1", "sse4_2": "sse4.2", "pni": "sse3", "bmi1": "bmi", "abm": "lzcnt", "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16", "avx512_vbmi": "avx512vbmi", "avx_vnni": "avxvnni", "amx_tile": "amx-tile",
    "amx_int8": "amx-int8", "amx_bf16": "amx-bf16", "avx512_fp16": "avx512fp16", "asimd": "neon", "fp": "fp-armv8",
    "asimddp": "dotprod", "asimdhp": "fullfp16",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A processor: its name for the code generator, instruction-set features, vector width, registers and caches."""

    name: str
    triple: str
    cpu: str
    features: tuple[str, ...]
    vector_bytes: int
    vector_registers: int
    l1_bytes: int = 32 << 10
    l2_bytes: int = 512 << 10
    l3_bytes: int = 8 << 20
    line_bytes: int = 64
    splits_vectors: bool = False  # the widest vectors take two turns, so that half of them is no slower

    def has(self, feature: str) -> bool:
        return feature in self.features

    @cached_property
    def has_fma(self) -> bool:
        return "fma" in self.features or "neon" in self.features

    @property
    def has_avx2(self) -> bool:
        return "avx2" in self.features

    @cached_property
    def has_avx512(self) -> bool:
        return {"avx512f", "avx512vl", "avx512dq", "avx512bw"} <= set(self.features)

    @cached_property
    def has_f16c(self) -> bool:
        return "f16c" in self.features or "neon" in self.features

    @cached_property
    def feature_text(self) -> str:
        """As the code generator takes it: `+avx2,+fma`."""
        # without the last one, 512-bit operations are split in two on cores that are tuned to avoid them
        wide = ["-prefer-256-bit"] if self.vector_bytes == 64 else []
        return ",".join([f"+{feature}" for feature in self.features] + wide)

    @cached_property
    def key(self) -> str:
        """Everything that can change the generated code, for cache keys."""
        return (
            f"{self.triple} {self.cpu} {self.feature_text} v{self.vector_bytes} r{self.vector_registers} "
            f"l{self.l1_bytes},{self.l2_bytes},{self.l3_bytes}{' split' if self.splits_vectors else ''}"
        )

    def lanes(self, itemsize: int) -> int:
        """Elements of a size in one vector register."""
        if itemsize < 1:
            raise OptionError(f"an element has at least 1 byte, got {itemsize}", code="O101", place=here())
        return max(1, self.vector_bytes // itemsize)

    def runs_on(self, host: Target) -> bool:
        """Whether code for this target runs on the host."""
        return self.triple == host.triple and set(self.features) <= set(host.features)

    @staticmethod
    def named(name: str) -> Target:
        """One of the fixed levels: baseline, avx2, avx512, neon; or host."""
        if name == "host":
            return Target.host()
        if name not in _LEVELS:
            known = ", ".join(["host", *_LEVELS])
            raise CompileError(f"{name!r} is not an instruction set that strata knows; known: {known}", code="C110")
        cpu, features, vector_bytes, registers = _LEVELS[name]
        machine = "aarch64" if name == "neon" else "x86_64"
        return Target(name, _triple(machine), cpu, features, vector_bytes, registers)

    @staticmethod
    def shaders() -> Target:
        """GPUs that take compute shaders: what is made for them is text, and the same for all."""
        return Target("wgsl", "wgsl", "wgsl", (), 16, 16)

    @staticmethod
    def of_plan(name: str) -> Target:
        """What a plan's text names: one of the fixed levels, or shaders."""
        return Target.shaders() if name == "wgsl" else Target.named(name)

    @staticmethod
    def host() -> Target:
        """The processor that runs this process."""
        return _host()

    def __str__(self) -> str:
        return self.name


@cache
def _host() -> Target:
    machine = _machine()
    reported = _host_features() & _KNOWN.get(machine, frozenset())  # an emulator shows what its own host reports
    if machine == "aarch64":
        level = "neon"
        reported |= {"neon", "fp-armv8"}
    elif set(_AVX512) <= reported:
        level = "avx512"
    elif set(_AVX2) <= reported:
        level = "avx2"
    else:
        level = "baseline"
    cpu, base, vector_bytes, registers = _LEVELS[level]
    cpu = cpu if machine in _KNOWN else "generic"
    extra = tuple(sorted(f for f in reported if f not in base)) if level != "baseline" else ()
    l1, l2, l3 = _cache_sizes()
    splits = level == "avx512" and _splits_vectors()
    return Target("host", _triple(machine), cpu, (*base, *extra), vector_bytes, registers, l1, l2, l3, 64, splits)


def _machine() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def _triple(machine: str) -> str:
    system = {"Linux": "unknown-linux-gnu", "Darwin": "apple-darwin", "Windows": "pc-windows-msvc"}
    return f"{machine}-{system.get(platform.system(), 'unknown-linux-gnu')}"


def _host_features() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return {_LINUX_NAMES.get(flag, flag) for flag in value.split()}
    except OSError:
        pass
    return _features_by_code_generator()


def _splits_vectors() -> bool:
    """The first AMD cores with 512-bit registers have 256-bit units."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            lines = [[part.strip() for part in line.split(":", 1)] for line in file.read(4096).splitlines()]
    except OSError:
        return False
    return ["vendor_id", "AuthenticAMD"] in lines and ["cpu family", "25"] in lines


def _features_by_code_generator() -> set[str]:
    """Where the system has no /proc, the code generator itself knows the host."""
    try:
        import llvmlite.binding as llvm

        return {name for name, present in llvm.get_host_cpu_features().items() if present}
    except (ImportError, RuntimeError):
        return set()


def _cache_sizes() -> tuple[int, int, int]:
    sizes = {1: 32 << 10, 2: 512 << 10, 3: 8 << 20}
    base = "/sys/devices/system/cpu/cpu0/cache"
    try:
        for entry in os.listdir(base):
            if not entry.startswith("index") or _read(f"{base}/{entry}/type") == "Instruction":
                continue
            size = _read(f"{base}/{entry}/size")
            scale = {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
            sizes[int(_read(f"{base}/{entry}/level"))] = int(size.rstrip("KM")) * scale
    except (OSError, ValueError):
        pass
    return sizes[1], sizes[2], sizes[3]


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()
