"""Functions of onnxruntime that speak of the whole process: providers, version, logging."""

from __future__ import annotations

import platform
import sys
from typing import Any

from strata.config import logger
from strata.ort.exceptions import RuntimeException
from strata.ort.providers import ALL_PROVIDERS, available_providers

INTERFACE = "1.31.1"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def get_available_providers() -> list[str]:
    """Providers whose devices are here, the fastest first."""
    return list(available_providers())


def get_all_providers() -> list[str]:
    """Every provider that onnxruntime has a name for."""
    return list(ALL_PROVIDERS)


def get_device() -> str:
    """GPU where one is here, else CPU."""
    return "GPU" if "CUDAExecutionProvider" in available_providers() else "CPU"


def get_version_string() -> str:
    """The version of the interface that is offered."""
    return INTERFACE


def get_build_info() -> str:
    """What stands behind the interface."""
    return f"strata.ort: the interface of onnxruntime {INTERFACE} over strata"


def has_collective_ops() -> bool:
    """Whether ops that several machines share are built in."""
    return False


def set_default_logger_severity(severity: int) -> None:
    """The level of strata's logger: 0 is everything, 4 only what is fatal."""
    if not isinstance(severity, int) or not 0 <= severity < len(_LEVELS):
        raise RuntimeException(
            f"Invalid logging severity {severity!r}. 0:Verbose, 1:Info, 2:Warning, 3:Error, 4:Fatal", code="O701",
            plain=True,
        )  # fmt: skip
    logger.setLevel(_LEVELS[severity])


def set_default_logger_verbosity(verbosity: int) -> None:
    """Only onnxruntime has levels below its most verbose one."""


def enable_telemetry_events() -> None:
    """There are none."""


def disable_telemetry_events() -> None:
    """There are none."""


def preload_dlls(cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: Any = None) -> None:
    """There are none to load before others."""


def print_debug_info() -> None:
    """What a report of a problem should say."""
    sys.stdout.write(
        f"{get_build_info()}\npython {sys.version}\n{platform.platform()}\nproviders {get_available_providers()}\n"
    )
