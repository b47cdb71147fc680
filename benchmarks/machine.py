"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """The machine, the versions, the commit, and how busy the machine was."""
    versions = {}
    for name in (
        "numpy",
        "scipy",
        "llvmlite",
        "torch",
        "onnxruntime",
        "openvino",
        "onnx",
        "jax",
        "tinygrad",
        "xllamacpp",
    ):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load": load(),
    }


def load() -> float:
    """Processes that wanted a core in the last minute, on average."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def _cpu() -> str:
    from llvmlite import binding

    name = next(
        (
            line.split(":", 1)[1].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    features = binding.get_host_cpu_features()
    sets = [
        f for f in ("avx2", "fma", "avx512f", "avx512vnni", "avx512bf16", "amx-tile", "neon", "sve") if features.get(f)
    ]
    return f"{name or platform.processor()} ({binding.get_host_cpu_name()}; {' '.join(sets)})"


def _commit() -> str:
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
