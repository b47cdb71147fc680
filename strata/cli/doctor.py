"""`strata doctor`: what this machine offers, in a table or as JSON."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from strata.config import config


def report(*, as_json: bool = False) -> str:
    """Facts about the machine and the settings in force."""
    facts = {**_machine(), **_threads(), **_settings()}
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
    }


def _threads() -> dict[str, object]:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cores": os.cpu_count(), "cores in affinity mask": affinity, "cgroup quota (cores)": cgroup_quota()}


def _settings() -> dict[str, object]:
    now = config()
    return {
        "threads asked for": now.num_threads,
        "device": now.device,
        "cache directory": str(now.cache_dir),
        "code settings": now.key_fields(),
    }


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores that the container may use: the smallest quota from our control group up to the root; None is no limit."""
    quotas: list[float] = []
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: "quota period" or "max period"
            for folder in _upwards(root, path):
                quotas += _ratio(_read(folder / "cpu.max").split())
        elif "cpu" in controllers.split(","):  # version 1
            for folder in _upwards(root / "cpu", path):
                quotas += _ratio([_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")])
    return min(quotas, default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """The group's folder and its parents; inside a container the path may name folders that only the host sees."""
    folder = root / path.lstrip("/")
    return [folder, *(p for p in folder.parents if p.is_relative_to(root))]


def _ratio(words: list[str]) -> list[float]:
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:  # "max", -1 or no such file
        return []
    return [int(words[0]) / int(words[1])]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
