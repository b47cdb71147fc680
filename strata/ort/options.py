"""SessionOptions and RunOptions: the settings of onnxruntime, with its names, defaults and checks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.errors import ArgumentError
from strata.ort.enums import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    OrtExecutionProviderDevicePolicy,
)
from strata.ort.exceptions import Fail, NotOffered, RuntimeException
from strata.ort.providers import ALL_PROVIDERS
from strata.places import here

LONGEST_KEY = 1024  # of an entry, in onnxruntime


def _kind_error(name: str, kind: type, value: Any) -> ArgumentError:
    return ArgumentError(
        f"{name} is {kind.__name__}, got {type(value).__name__} {value!r}: incompatible function arguments",
        code="O702",
        place=here(),
    )


def _add_entry(entries: dict[str, str], key: str, value: str) -> None:
    for text in (key, value):
        if not isinstance(text, str):
            raise _kind_error("an entry", str, text)
    if not 0 < len(key) <= LONGEST_KEY:
        raise RuntimeException(
            f"Config key is empty or longer than maximum length {LONGEST_KEY}", code="O701", plain=True
        )
    entries[key] = value


@dataclass
class GlobalThreads:
    """Threads of sessions that share them; 0 is what the process has."""

    threads: int = 0


shared = GlobalThreads()


class _Settings:
    """Fields with a default and a kind, which are properties of the class; others cannot be set."""

    _defaults: dict[str, Any] = {}  # noqa: RUF012 - never written to
    __slots__ = ("_values",)

    def __init_subclass__(cls) -> None:
        for name, default in cls.__dict__.get("_defaults", {}).items():
            setattr(cls, name, _field(name, type(default)))

    def __init__(self) -> None:
        self._values = dict(self._defaults)

    if TYPE_CHECKING:  # the fields

        def __getattr__(self, name: str) -> Any: ...


def _field(name: str, kind: type) -> property:
    def read(self: _Settings) -> Any:
        return self._values[name]

    def write(self: _Settings, value: Any) -> None:
        if kind is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if kind is bool and (value is None or value in (0, 1)):
            value = bool(value)
        if not isinstance(value, kind) and not (kind is int and hasattr(value, "__index__")):
            raise _kind_error(name, kind, value)
        self._values[name] = int(value) if kind is int else value

    return property(read, write)


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
    __slots__ = ("_entries", "_free_sizes", "_initializers", "_labelled_sizes", "_providers")

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, str] = {}
        self._free_sizes: dict[str, int] = {}
        self._labelled_sizes: dict[str, int] = {}
        self._initializers: dict[str, Any] = {}
        self._providers: list[tuple[str, dict[str, str]]] = []

    def __copy__(self) -> SessionOptions:
        made = SessionOptions()
        for name in ("_values", "_entries", "_free_sizes", "_labelled_sizes", "_initializers"):
            getattr(made, name).update(getattr(self, name))
        made._providers.extend(self._providers)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionOptions:
        return self.__copy__()

    def add_session_config_entry(self, config_key: str, config_value: str) -> None:
        """Keep a pair of texts."""
        _add_entry(self._entries, config_key, config_value)

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
        """Fix the sizes that the model labels so, such as `DATA_BATCH`."""
        if not isinstance(dim_denotation, str):
            raise _kind_error("the label of a size", str, dim_denotation)
        if not hasattr(dim_value, "__index__"):
            raise _kind_error("a size", int, dim_value)
        self._labelled_sizes[dim_denotation] = int(dim_value)

    def add_initializer(self, name: str, ort_value: Any) -> None:
        """Use this value in place of the model's initializer."""
        from strata.ort.values import OrtValue  # which needs these settings

        if not isinstance(ort_value, OrtValue):
            raise _kind_error("an initializer", OrtValue, ort_value)
        if name in self._initializers:
            raise RuntimeException(f"An OrtValue for this name has already been added: {name}", code="O701", plain=True)
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
        if provider_name not in ALL_PROVIDERS:
            raise RuntimeException(f"Unknown Provider Type: {provider_name}", code="O701", plain=True)
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
        self._entries: dict[str, str] = {}

    def add_run_config_entry(self, config_key: str, config_value: str) -> None:
        """Keep a pair of texts."""
        _add_entry(self._entries, config_key, config_value)

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
