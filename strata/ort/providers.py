"""Execution providers: onnxruntime's names for devices."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from strata.ort.exceptions import InvalidArgument, RuntimeException

ALL_PROVIDERS = (
    "NvTensorRTRTXExecutionProvider", "TensorrtExecutionProvider", "CUDAExecutionProvider", "MIGraphXExecutionProvider",
    "OpenVINOExecutionProvider", "DnnlExecutionProvider", "VitisAIExecutionProvider", "QNNExecutionProvider",
    "NnapiExecutionProvider", "VSINPUExecutionProvider", "JsExecutionProvider", "CoreMLExecutionProvider",
    "ArmNNExecutionProvider", "ACLExecutionProvider", "DmlExecutionProvider", "RknpuExecutionProvider",
    "WebNNExecutionProvider", "WebGpuExecutionProvider", "XnnpackExecutionProvider", "CANNExecutionProvider",
    "AzureExecutionProvider", "CPUExecutionProvider",
)  # fmt: skip
_DEVICES = {"CUDAExecutionProvider": "cuda", "WebGpuExecutionProvider": "wgpu", "CPUExecutionProvider": "cpu"}


@cache
def available_providers() -> tuple[str, ...]:
    """Providers whose devices are here, the fastest first."""
    found = []
    if find_spec("triton") is not None and find_spec("cuda") is not None:
        from strata.runtime import devices

        found += ["CUDAExecutionProvider"] * any(name.startswith("cuda") for name in devices())
    return (*found, "CPUExecutionProvider")


def normalized(providers: Any, provider_options: Any) -> dict[str, dict[str, str]]:
    """Providers by name with their options as texts, in order; those that are not here are warned about."""
    if providers is None:
        return {"CPUExecutionProvider": {}}
    if not isinstance(providers, Sequence):
        raise InvalidArgument("'providers' should be a sequence.", plain=True)
    rows = [_row(p) for p in providers] if provider_options is None else _paired(providers, provider_options)
    found: dict[str, dict[str, str]] = {}
    known = available_providers()
    for name, options in rows:
        if name not in known:
            warnings.warn(
                f"Specified provider '{name}' is not in available provider names."
                f"Available providers: '{', '.join(known)}'",
                stacklevel=5,
            )
        if name in found:
            warnings.warn(f"Duplicate provider '{name}' encountered, ignoring.", stacklevel=5)
            continue
        found[name] = {str(key): str(value) for key, value in options.items()}
    for name in found:
        if name not in ALL_PROVIDERS:
            raise RuntimeException(f"Unknown Provider Type: {name}", code="O701", plain=True)
    if "CPUExecutionProvider" in found:
        found["CPUExecutionProvider"] = {}  # which takes none, and reports none
    return found


def _row(provider: Any) -> tuple[str, Mapping[Any, Any]]:
    if isinstance(provider, str):
        return provider, {}
    if isinstance(provider, tuple) and len(provider) == 2:
        name, options = provider
        if isinstance(name, str) and isinstance(options, dict):
            return name, options
    raise InvalidArgument("'providers' values must be either strings or (string, dict) tuples.", plain=True)


def _paired(providers: Sequence[Any], provider_options: Any) -> list[tuple[str, Mapping[Any, Any]]]:
    if not isinstance(provider_options, Sequence):
        raise InvalidArgument("'provider_options' should be a sequence.", plain=True)
    if len(providers) != len(provider_options):
        raise InvalidArgument(
            "'providers' and 'provider_options' should be the same length if both are given.", plain=True
        )
    if not all(isinstance(name, str) for name in providers):
        raise InvalidArgument(
            "Only string values for 'providers' are supported if 'provider_options' is given.", plain=True
        )
    if not all(isinstance(options, dict) for options in provider_options):
        raise InvalidArgument("'provider_options' values must be dicts.", plain=True)
    return list(zip(providers, provider_options, strict=True))


def device_of(providers: Mapping[str, Mapping[str, str]]) -> str:
    """The device of the first provider that is here."""
    for name in providers:
        if name in available_providers() and name in _DEVICES:
            number = providers[name].get("device_id", "0")
            return f"{_DEVICES[name]}:{number}" if _DEVICES[name] == "cuda" and number.isdigit() else _DEVICES[name]
    return "cpu"
