"""Functions of onnxruntime that speak of the whole process: providers, version, logging."""

from __future__ import annotations

import platform
import sys
from typing import Any

from strata.config import logger
from strata.errors import ArgumentError
from strata.ort.exceptions import RuntimeException
from strata.ort.options import shared
from strata.ort.providers import ALL_PROVIDERS, available_providers
from strata.places import here

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
    _require_number("severity", severity)
    if not 0 <= severity < len(_LEVELS):
        raise RuntimeException(
            f"Invalid logging severity {severity!r}. 0:Verbose, 1:Info, 2:Warning, 3:Error, 4:Fatal", code="O701",
            plain=True,
        )  # fmt: skip
    logger.setLevel(_LEVELS[severity])


def set_default_logger_verbosity(verbosity: int) -> None:
    """Only onnxruntime has levels below its most verbose one."""
    _require_number("verbosity", verbosity)


def _require_number(name: str, value: Any) -> None:
    if not isinstance(value, int):
        raise ArgumentError(
            f"{name} is a number, got {value!r}: incompatible function arguments", code="O702", place=here()
        )


def set_global_thread_pool_sizes(intra_op_num_threads: int = 0, inter_op_num_threads: int = 0) -> None:
    """Threads of the sessions made from now on whose options say `use_per_session_threads = False`."""
    for name, value in (("intra_op_num_threads", intra_op_num_threads), ("inter_op_num_threads", inter_op_num_threads)):
        _require_number(name, value)
    shared.threads = intra_op_num_threads


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
