"""ONNX Runtime's Python interface: `import strata.ort as ort`, or `install()` for programs that import onnxruntime.

The names, defaults and messages are onnxruntime's. What strata does not have raises; nothing pretends.
"""

from importlib import import_module
from typing import Any

from strata.arguments import hot, public, public_names
from strata.ort.installing import install, switch_folder, uninstall

__version__ = "1.31.1"  # of the interface that is offered
_EXPORTS = {
    "strata.ort.session": ("InferenceSession", "ModelMetadata", "NodeArg"),
    "strata.ort.binding": ("IOBinding", "SessionIOBinding"),
    "strata.ort.options": ("SessionOptions", "RunOptions"),
    "strata.ort.values": ("OrtValue", "OrtDevice", "OrtMemoryInfo"),
    "strata.ort.enums": (
        "ExecutionMode", "ExecutionOrder", "GraphOptimizationLevel", "OrtAllocatorType", "OrtCompileApiFlags",
        "OrtDeviceMemoryType", "OrtDeviceVendorId", "OrtExecutionProviderDevicePolicy", "OrtHardwareDeviceType",
        "OrtMemType", "OrtMemoryInfoDeviceType", "OrtSparseFormat",
    ),
    "strata.ort.process": (
        "get_all_providers", "get_available_providers", "get_build_info", "get_device", "get_version_string",
        "has_collective_ops", "preload_dlls", "print_debug_info", "set_default_logger_severity",
        "set_default_logger_verbosity", "set_global_thread_pool_sizes", "disable_telemetry_events",
        "enable_telemetry_events",
    ),
}  # fmt: skip
_TABLE = {name: module for module, names in _EXPORTS.items() for name in names}
_ABSENT = {
    "quantization": "quantise with strata, or with onnxruntime itself",
    "tools": "they are onnxruntime's own",
    "transformers": "strata fuses by itself",
    "training": "strata.onnx.load(path).trainable() gives parameters and a loss",
    "set_seed": "runs draw the same numbers every time; give nodes a seed",
    "SparseTensor": "give dense arrays",
    "LoraAdapter": "merge the adapter into the model",
    "AdapterFormat": "merge the adapter into the model",
    "ModelCompiler": "strata compile writes bundles",
}

__all__ = ["__version__", "capi", "install", "switch_folder", "uninstall", *_TABLE]  # noqa: PLE0604 - the keys of the table are strings


def __getattr__(name: str) -> Any:
    if name == "capi":
        return import_module("strata.ort.capi")
    if name not in _TABLE:
        why = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"module 'onnxruntime' (strata.ort) has no attribute {name!r}{why}")
    value = globals()[name] = public(hot(getattr(import_module(_TABLE[name]), name)))
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


public_names(globals())
