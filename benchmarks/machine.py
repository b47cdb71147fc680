"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import statistics
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


def copy_speed(threads: int, count: int = 64 << 20) -> float:
    """Bytes read and written a second by the fastest copy of so many bytes: through the caches, or past them."""
    import ctypes

    import numpy as np

    from strata.backends.llvm.codegen.compile import compile_kernel
    from strata.backends.llvm.executor.thread_pool import default_pool
    from strata.core import f32
    from strata.kernel import KernelBuilder, parse_schedule

    k = KernelBuilder("copy")
    x = k.input("x", f32[count // 4])
    k.output("y", f32[count // 4], lambda index: x[index])
    source, target = np.ones(count // 4, np.float32), np.ones(count // 4, np.float32)
    pool = default_pool()
    pool.ensure(threads)
    ways: list[list[float]] = []
    for past in ("", "; nontemporal y"):
        native = compile_kernel(k.build(), None, parse_schedule(f"parallel 1 grain 262144; vectorise 0 by 64{past}"))
        block = native.arguments([source, target], {})
        ways.append([])
        for _ in range(15):
            start = time.perf_counter()
            pool.parallel(native.address, ctypes.addressof(block), count // 4, 262144, threads)
            ways[-1].append(time.perf_counter() - start)
    return 2 * count / min(map(statistics.median, ways))
