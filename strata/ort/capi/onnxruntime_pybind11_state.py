"""Exceptions and classes of onnxruntime under the name of its extension module."""

from strata.ort.binding import SessionIOBinding
from strata.ort.enums import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    OrtAllocatorType,
    OrtCompileApiFlags,
    OrtDeviceMemoryType,
    OrtExecutionProviderDevicePolicy,
    OrtHardwareDeviceType,
    OrtMemoryInfoDeviceType,
    OrtMemType,
    OrtSparseFormat,
)
from strata.ort.exceptions import (
    DeviceReset,
    EngineError,
    EPFail,
    Fail,
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    ModelLoadCanceled,
    ModelLoaded,
    ModelRequiresCompilation,
    NoModel,
    NoSuchFile,
    NotFound,
    NotOffered,
    RuntimeException,
)
from strata.ort.options import RunOptions, SessionOptions
from strata.ort.process import (
    disable_telemetry_events,
    enable_telemetry_events,
    get_all_providers,
    get_available_providers,
    get_build_info,
    get_device,
    get_version_string,
    has_collective_ops,
    set_default_logger_severity,
    set_default_logger_verbosity,
    set_global_thread_pool_sizes,
)
from strata.ort.session import InferenceSession, ModelMetadata, NodeArg
from strata.ort.values import OrtDevice, OrtMemoryInfo, OrtValue, OrtValueVector

NotImplemented = NotOffered

__all__ = [
    "DeviceReset", "EPFail", "EngineError", "ExecutionMode", "ExecutionOrder", "Fail", "GraphOptimizationLevel",
    "InferenceSession", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "ModelLoadCanceled", "ModelLoaded",
    "ModelMetadata", "ModelRequiresCompilation", "NoModel", "NoSuchFile", "NodeArg", "NotFound", "NotImplemented",
    "OrtAllocatorType", "OrtCompileApiFlags", "OrtDevice", "OrtDeviceMemoryType",
    "OrtExecutionProviderDevicePolicy", "OrtHardwareDeviceType", "OrtMemType", "OrtMemoryInfo",
    "OrtMemoryInfoDeviceType", "OrtSparseFormat", "OrtValue", "OrtValueVector", "RunOptions", "RuntimeException",
    "SessionIOBinding", "SessionOptions", "disable_telemetry_events", "enable_telemetry_events",
    "get_all_providers", "get_available_providers", "get_build_info", "get_device", "get_version_string",
    "has_collective_ops", "set_default_logger_severity", "set_default_logger_verbosity",
    "set_global_thread_pool_sizes",
]  # fmt: skip
