"""What is known of the processor: the features that its kind can have, whatever the system shows."""

import builtins
import io
import platform

import pytest

from strata.core import target

X86 = (
    "processor : 0\nvendor_id : AuthenticAMD\ncpu family : 25\nflags : fpu pni ssse3 sse4_1 sse4_2 popcnt avx avx2 fma "
    "f16c bmi1 bmi2 abm movbe cx16 avx512f avx512bw avx512dq avx512vl avx512cd\n"
)
ARM = "processor : 0\nFeatures : fp asimd asimddp asimdhp bf16\n"


def host_with(monkeypatch: pytest.MonkeyPatch, machine: str, cpuinfo: str) -> target.Target:
    opened = builtins.open

    def fake(path, *args, **kwargs):
        return io.StringIO(cpuinfo) if path == "/proc/cpuinfo" else opened(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", fake)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    return target._host.__wrapped__()


def test_the_features_of_an_arm_processor(monkeypatch) -> None:
    made = host_with(monkeypatch, "arm64", ARM)
    assert made.triple.startswith("aarch64-")
    assert set(made.features) == {"neon", "fp-armv8", "dotprod", "fullfp16", "bf16"}
    assert (made.vector_bytes, made.vector_registers) == (16, 32)


def test_the_features_of_an_x86_processor(monkeypatch) -> None:
    made = host_with(monkeypatch, "x86_64", X86)
    assert made.has_avx512
    assert made.splits_vectors
    assert not made.has("neon")


@pytest.mark.parametrize(("machine", "cpuinfo"), [("aarch64", X86), ("x86_64", ARM)])
def test_an_emulated_processor_has_no_features_of_the_one_below(monkeypatch, machine: str, cpuinfo: str) -> None:
    """An emulator shows the file of its host: code with those instructions would end the process."""
    made = host_with(monkeypatch, machine, cpuinfo)
    assert set(made.features) == ({"neon", "fp-armv8"} if machine == "aarch64" else set())
    assert not made.has_avx2


def test_a_processor_of_another_kind_has_no_features(monkeypatch) -> None:
    made = host_with(monkeypatch, "riscv64", "processor : 0\nisa : rv64imafdc\n")
    assert (made.cpu, made.features) == ("generic", ())
    assert made.triple.startswith("riscv64-")
