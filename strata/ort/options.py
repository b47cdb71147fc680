"""SessionOptions and RunOptions: the settings of onnxruntime, with its names, defaults and checks."""

from __future__ import annotations

import os
from typing import Any

from strata.errors import ArgumentError
from strata.ort.enums import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    OrtExecutionProviderDevicePolicy,
)
from strata.ort.exceptions import Fail, NotOffered, RuntimeException
from strata.places import here


def _kind_error(name: str, kind: type, value: Any) -> ArgumentError:
    return ArgumentError(
        f"{name} is {kind.__name__}, got {type(value).__name__} {value!r}: incompatible function arguments",
        code="O702",
        place=here(),
    )


class _Settings:
    """Fields with a default and a kind; others cannot be set."""

    _defaults: dict[str, Any] = {}  # noqa: RUF012 - never written to
    __slots__ = ("_values",)

    def __init__(self) -> None:
        object.__setattr__(self, "_values", dict(self._defaults))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name in self._defaults:
            return self._values[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._defaults:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        kind = type(self._defaults[name])
        if kind is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, kind) and not (kind is int and hasattr(value, "__index__")):
            raise _kind_error(name, kind, value)
        self._values[name] = int(value) if kind is int else value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._defaults})


class SessionOptions(_Settings):
    """Settings of a session. Threads, free sizes, profiling, replaced initializers and providers have an effect; those
    that tune onnxruntime's own memory and schedule are kept, and read by nobody."""

    _defaults = {  # noqa: RUF012
        "enable_cpu_mem_arena": True,
        "enable_mem_pattern": True,
        "enable_mem_reuse": True,
        "enable_profiling": False,
        "execution_mode": ExecutionMode.ORT_SEQUENTIAL,
        "execution_order": ExecutionOrder.DEFAULT,
        "graph_optimization_level": GraphOptimizationLevel.ORT_ENABLE_ALL,
        "inter_op_num_threads": 0,
        "intra_op_num_threads": 0,
        "log_severity_level": -1,
        "log_verbosity_level": 0,
        "logid": "",
        "optimized_model_filepath": "",
        "profile_file_prefix": "onnxruntime_profile_",
        "use_deterministic_compute": False,
        "use_per_session_threads": True,
    }
    __slots__ = ("_entries", "_free_sizes", "_initializers", "_providers")

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "_entries", {})
        object.__setattr__(self, "_free_sizes", {})
        object.__setattr__(self, "_initializers", {})
        object.__setattr__(self, "_providers", [])

    def __copy__(self) -> SessionOptions:
        made = SessionOptions()
        for name in ("_values", "_entries", "_free_sizes", "_initializers"):
            getattr(made, name).update(getattr(self, name))
        made._providers.extend(self._providers)
        return made

    def add_session_config_entry(self, config_key: str, config_value: str) -> None:
        """Keep a pair of texts."""
        for value in (config_key, config_value):
            if not isinstance(value, str):
                raise _kind_error("an entry", str, value)
        self._entries[config_key] = config_value

    def get_session_config_entry(self, config_key: str) -> str:
        """A text that was kept."""
        if config_key not in self._entries:
            raise RuntimeException(
                f"SessionOptions does not have configuration with key: {config_key}", code="O701", plain=True
            )
        return str(self._entries[config_key])

    def add_free_dimension_override_by_name(self, dim_name: str, dim_value: int) -> None:
        """Fix a size that the model names."""
        if not isinstance(dim_name, str):
            raise _kind_error("the name of a size", str, dim_name)
        if not hasattr(dim_value, "__index__"):
            raise _kind_error("a size", int, dim_value)
        self._free_sizes[dim_name] = int(dim_value)

    def add_free_dimension_override_by_denotation(self, dim_denotation: str, dim_value: int) -> None:
        """Denotations are labels that hardly any model has; they are not read."""
        raise NotOffered("sizes by denotation: fix them by name, with add_free_dimension_override_by_name")

    def add_initializer(self, name: str, ort_value: Any) -> None:
        """Use this value in place of the model's initializer."""
        from strata.ort.values import OrtValue  # which needs these settings

        if not isinstance(ort_value, OrtValue):
            raise _kind_error("an initializer", OrtValue, ort_value)
        self._initializers[name] = ort_value

    def add_external_initializers(self, names: list[str], values: list[Any]) -> None:
        """The same for several."""
        if not isinstance(names, list) or not isinstance(values, list):
            raise _kind_error("initializers", list, values if isinstance(names, list) else names)
        if len(names) != len(values):
            raise RuntimeException(
                f"Expecting names and ort_values lists to have equal length, got {len(names)} and {len(values)}",
                code="O701", plain=True,
            )  # fmt: skip
        for name, value in zip(names, values, strict=True):
            self.add_initializer(name, value)

    def add_provider(self, provider_name: str, provider_options: dict[str, str]) -> None:
        """Prefer a provider over those that are added later."""
        if not isinstance(provider_name, str):
            raise _kind_error("a provider", str, provider_name)
        self._providers.append((provider_name, dict(provider_options)))

    def has_providers(self) -> bool:
        """Whether a provider was added."""
        return bool(self._providers)

    def register_custom_ops_library(self, path: str) -> None:
        """Refused: such a library is machine code for onnxruntime's interface."""
        raise Fail(
            f"Failed to load library {path} with error: strata loads no machine code from files; give the op as a "
            "Python function, strata.onnx.load(path, custom_ops={'Name': function})", code="L701",
        )  # fmt: skip

    def set_provider_selection_policy(self, policy: OrtExecutionProviderDevicePolicy) -> None:
        """Refused: providers are chosen by name."""
        raise NotOffered("provider selection policies: name the providers, providers=['CPUExecutionProvider']")


class RunOptions(_Settings):
    """Settings of a run."""

    _defaults = {  # noqa: RUF012
        "log_severity_level": -1,
        "log_verbosity_level": 0,
        "logid": "",
        "only_execute_path_to_fetches": False,
        "terminate": False,
    }
    __slots__ = ("_entries",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "_entries", {})

    def add_run_config_entry(self, config_key: str, config_value: str) -> None:
        """Keep a pair of texts."""
        for value in (config_key, config_value):
            if not isinstance(value, str):
                raise _kind_error("an entry", str, value)
        self._entries[config_key] = config_value

    def get_run_config_entry(self, config_key: str) -> str:
        """A text that was kept."""
        if config_key not in self._entries:
            raise RuntimeException(
                f"RunOptions does not have configuration with key: {config_key}", code="O701", plain=True
            )
        return str(self._entries[config_key])

    def add_active_adapter(self, adapter: Any) -> None:
        """Refused: adapters in onnxruntime's format are not read."""
        raise NotOffered("adapters of a run are not supported: merge the adapter into the model")
