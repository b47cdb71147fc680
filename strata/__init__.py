"""strata: an ML compiler and runtime whose every stage can be printed, read, edited and tested.

Names are loaded when they are first used, so that `import strata` costs next to nothing.
"""

from typing import Any

from strata.modules import imported

__version__ = "0.2.0"

_EXPORTS = {
    "strata.core": (
        "DType", "TensorType", "Target", "sym", "promote",
        "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2", "i4", "i8", "i16", "i32", "i64", "u4", "u8", "u16", "u32",
        "u64", "c64", "c128", "bool_",
    ),
    "strata.config": ("Config",),
    "strata.mir": ("Graph", "Value", "evaluate"),
    "strata.texts": ("parse",),
    "strata.tensor": (
        "Tensor", "asarray", "zeros", "ones", "full", "full_like", "empty", "empty_like", "arange", "linspace", "eye",
        "tri", "realize", "grad", "value_and_grad", "vjp", "jvp", "hvp", "vmap", "jacfwd", "jacrev", "checkpoint",
        "scan", "cond", "while_loop", "custom_op", "custom_vjp", "custom_jvp", "jit", "random",
        "prepare", "prepare_with", "realize_with", "open_array", "Plan", "Variable",
    ),
    "strata.runtime": (
        "CompileOptions", "CompilePipeline", "CompileResult", "CompiledGraph", "Session", "Device", "devices",
        "memory", "pick_device", "dispatch_report", "assert_fused", "trace", "watch_finite", "load_compiled",
        "specialize",
        "CompileCache", "BucketedCompileCache", "DynamicDimCompileCache", "ModelCompilePipeline", "ModelVariant",
        "ModelComponent", "CompilationMode", "Phase", "AotCache", "VariantGraph", "CompileProfile",
        "MemoryPlanOptions",
    ),
    "strata.backends": ("register_backend",),
    "strata.models": ("load",),
    "strata.quantizing": ("quantize",),
    "strata.viewer": ("view",),
    "strata.torch": ("to_torch", "from_torch"),
}  # fmt: skip
_RENAMED = {
    "onnx": ("strata.io", "onnx"),
    "stablehlo": ("strata.io", "stablehlo"),
    "optim": ("strata.nn", "optim"),
    "xp": ("strata.tensor", "xp"),
    "float16": ("strata.core", "f16"),
    "float32": ("strata.core", "f32"),
    "float64": ("strata.core", "f64"),
    "bfloat16": ("strata.core", "bf16"),
    "float8_e4m3fn": ("strata.core", "f8e4m3"),
    "float8_e5m2": ("strata.core", "f8e5m2"),
    "int4": ("strata.core", "i4"),
    "int8": ("strata.core", "i8"),
    "int16": ("strata.core", "i16"),
    "int32": ("strata.core", "i32"),
    "int64": ("strata.core", "i64"),
    "uint4": ("strata.core", "u4"),
    "uint8": ("strata.core", "u8"),
    "uint16": ("strata.core", "u16"),
    "uint32": ("strata.core", "u32"),
    "uint64": ("strata.core", "u64"),
    "complex64": ("strata.core", "c64"),
    "complex128": ("strata.core", "c128"),
}
# `tensor` can be called, too.
_MODULES = (
    "cache", "config", "distributed", "errors", "finetuning", "hir", "io", "models", "nn", "ops", "ort", "passes",
    "quantizing", "runtime", "sentence_transformers", "serving", "tensor", "testing", "torch", "transforms",
)  # fmt: skip
_TABLE = {name: (module, name) for module, names in _EXPORTS.items() for name in names} | _RENAMED

# Names that go: what to use instead, and the release that is without them. They work until then, and warn.
_DEPRECATED: dict[str, tuple[str, str]] = {}

__all__ = ["__version__", *_MODULES, *_TABLE]  # noqa: PLE0604 - the keys of the table are strings


def __getattr__(name: str) -> Any:
    if name in _DEPRECATED:
        import warnings

        instead, version = _DEPRECATED[name]
        told = f"strata.{name} goes in {version}: use strata.{instead}"
        warnings.warn(told, DeprecationWarning, stacklevel=2)
        return getattr(imported("strata"), instead)
    if name in _TABLE:
        module, attribute = _TABLE[name]
        value = getattr(imported(module), attribute)
    elif name in _MODULES:
        return imported(f"strata.{name}")
    elif name.startswith("_"):
        raise AttributeError(name)
    else:
        value = _operation(name)
    globals()[name] = value
    return value


def _operation(name: str) -> Any:
    """A front-end function on tensors."""
    tensors = imported("strata.tensor")
    try:
        return getattr(tensors, name)
    except AttributeError as error:
        raise AttributeError(str(error).replace("strata.tensor has no function", "strata has no name")) from None


def __dir__() -> list[str]:
    imported("strata.tensor")  # and with it the functions of ops
    return sorted({*__all__, *imported("strata.mir").METHODS})
