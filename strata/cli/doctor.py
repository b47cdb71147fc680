"""`strata doctor`: what this machine offers, in a table or as JSON."""

from __future__ import annotations

import json
import os
import platform
from argparse import Namespace
from pathlib import Path
from typing import Any

from strata.config import config
from strata.core import available_threads, cgroup_quota


def doctor(options: Namespace) -> None:
    """Print the report."""
    print(report(as_json=options.json))


def report(*, as_json: bool = False) -> str:
    """Facts about the machine and the settings in force."""
    facts = {**_machine(), **_threads(), **_settings(), **_memories(), **_cache(), **_packages()}
    if as_json:
        return json.dumps(facts, indent=2)
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {_show(value)}" for name, value in facts.items())


def _show(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _machine() -> dict[str, object]:
    import llvmlite
    from llvmlite import binding

    # The vector sets that change which code is generated; the full list runs to a hundred names.
    telling = ["sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vnni", "avx512bf16", "amx-tile"]
    telling += ["neon", "dotprod", "fullfp16", "bf16", "i8mm", "sve", "sve2"]
    present = binding.get_host_cpu_features()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "llvm": ".".join(map(str, binding.llvm_version_info)),
        "llvmlite": llvmlite.__version__,
        "cpu": binding.get_host_cpu_name(),
        "features": [name for name in telling if present.get(name)],
        "memory": _memory(),
    }


def _memory() -> str | None:
    """Bytes that this process may use: the machine's, or the container's limit where that is smaller."""
    from strata.cli.show import size

    total = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit() and (total is None or int(limit) < total):
        return f"{size(int(limit))} (container limit)"
    return None if total is None else size(total)


def _threads() -> dict[str, object]:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": os.cpu_count(), "cores in affinity mask": affinity, "cgroup quota (cores)": cgroup_quota(),
        "threads used": available_threads(config().num_threads),
    }  # fmt: skip


def _settings() -> dict[str, object]:
    from strata.runtime import devices

    now = config()
    return {
        "threads asked for": now.num_threads,
        "devices": [str(d) for d in devices()],
        "device": now.device,
        "code settings": now.key_fields(),
    }


def _memories() -> dict[str, object]:
    """Devices with their own memory: what they are, and how much of it there is."""
    from strata.backends import backend_for
    from strata.cli.show import size
    from strata.runtime import devices

    found: dict[str, object] = {}
    for name in devices():
        backend = backend_for(name)
        if backend.home is not None:
            total = backend.home.total_bytes()
            about = [backend.description, f"{size(total)} of memory" if total is not None else ""]
            found[f"device {name}"] = ", ".join(part for part in about if part) or "its own memory"
    return found


def _cache() -> dict[str, object]:
    from strata.cache import default_store
    from strata.cli.show import size

    store = default_store()
    entries = list(store.entries())
    trouble = store.trouble()
    state = "can be written" if trouble is None else f"compiled code is not kept: {trouble}"
    return {
        "cache directory": str(config().cache_dir),
        "cache": f"{len(entries)} entries, {size(sum(e.size for e in entries))} of {size(store.limit)}; {state}",
    }


def _packages() -> dict[str, Any]:
    """Packages that open more formats or serve as peers in benchmarks, with their versions."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("numpy", "scipy", "onnx", "safetensors", "tokenizers", "gguf", "onnxruntime", "openvino", "torch",
                 "jax", "wgpu", "triton", "cuda-core"):  # fmt: skip
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return {"packages": found}


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
