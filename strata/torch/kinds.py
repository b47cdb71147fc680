"""Between torch's tensors and ours: element types, memory that both sides see, sizes that are symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch

from strata.core import (
    Dim,
    DType,
    SymExpr,
    TensorType,
    as_dtype,
    bf16,
    bool_,
    c64,
    c128,
    dim_max,
    dim_min,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    floordiv,
    i8,
    i16,
    i32,
    i64,
    mod,
    sym,
    u8,
    u16,
    u32,
    u64,
)
from strata.errors import StrataError
from strata.torch.table import Unsupported

DTYPES: dict[torch.dtype, DType] = {
    torch.bool: bool_, torch.uint8: u8, torch.int8: i8, torch.int16: i16, torch.int32: i32, torch.int64: i64,
    torch.uint16: u16, torch.uint32: u32, torch.uint64: u64, torch.float16: f16, torch.bfloat16: bf16,
    torch.float32: f32, torch.float64: f64, torch.complex64: c64, torch.complex128: c128,
    torch.float8_e4m3fn: f8e4m3, torch.float8_e5m2: f8e5m2,
}  # fmt: skip
TORCH_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}
# NumPy has no name of its own for these: torch lends and takes their bits under another one.
_BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_HUGE = 1 << 48  # bounds of sizes that are none: torch's infinities count as finite


def dtype_of(dtype: torch.dtype) -> DType:
    """Our name for one of torch's element types."""
    found = DTYPES.get(dtype)
    if found is None:
        raise Unsupported(f"element type {dtype}")
    return found


def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's name for one of our element types."""
    found = TORCH_DTYPES.get(dtype)
    if found is None:
        raise Unsupported(f"element type {dtype} in torch")
    return found


def to_array(t: torch.Tensor) -> np.ndarray:
    """The memory of a CPU tensor as an array: the same bytes, not a copy (conjugates that are pending are made)."""
    if type(t) not in _PLAIN:
        with torch._C.DisableTorchFunctionSubclass():
            t = t.as_subclass(torch.Tensor)
    bits = _BITS.get(t.dtype)
    if bits is None:
        return t.numpy(force=True)
    return t.detach().view(bits).numpy().view(DTYPES[t.dtype].np)


def to_tensor(a: np.ndarray) -> torch.Tensor:
    """The memory of an array as a tensor, which keeps it alive; one of no elements is torch's own, which it may
    resize."""
    theirs = TORCH_DTYPES[as_dtype(a.dtype)]
    if not a.size:
        return torch.empty(a.shape, dtype=theirs)
    bits = _BITS.get(theirs)
    if bits is None:
        return torch.from_numpy(a)
    return torch.from_numpy(a.view(np.int16 if bits is torch.int16 else np.uint8)).view(theirs)


# ------------------------------------------------------------------------------------------------------- sizes


class TorchSizes:
    """Torch's symbols as ours, each with the bounds that torch guards."""

    def __init__(self, ranges: Mapping[str, Any] | None = None) -> None:
        """`ranges` are bounds that a program was exported with: the tracer's own begin at 2."""
        self.known: dict[str, SymExpr] = {}
        self.given: set[str] = set()  # sizes of arguments that torch knows no bounds or example of
        self.ranges = ranges or {}

    def dim(self, x: Any) -> Dim:
        """An int, a SymInt or an expression of its symbols as a size."""
        if isinstance(x, torch.SymInt):
            return self._of(x.node.expr, x.node.shape_env)
        if isinstance(x, sympy.Basic):
            return self._of(x, None)
        return int(x)

    def give(self, x: Any) -> None:
        """Note an argument of the call: its sizes are known by then, whatever torch calls them."""
        for n in x.shape if isinstance(x, torch.Tensor) else (x,):
            if isinstance(n, torch.SymInt) and isinstance(n.node.expr, sympy.Symbol) and not is_ragged(n):
                self.given.add(str(n.node.expr))

    def shape(self, dims: Sequence[Any]) -> tuple[Dim, ...]:
        return tuple(self.dim(d) for d in dims)

    def type(self, t: torch.Tensor) -> TensorType:
        return TensorType(dtype_of(t.dtype), self.shape(t.shape))

    def _of(self, e: Any, env: Any) -> Dim:
        try:
            return self._expression(e, env)
        except StrataError as error:
            raise Unsupported(f"size {e}: {error}") from None

    def _expression(self, e: Any, env: Any) -> Dim:
        if isinstance(e, sympy.Integer) or (isinstance(e, sympy.Number) and e.is_integer):
            return int(e)
        if isinstance(e, sympy.Symbol):
            return self._symbol(e, env)
        parts = [self._of(a, env) for a in e.args]
        match type(e).__name__:
            case "Add":
                total: Dim = 0
                for p in parts:
                    total = total + p
                return total
            case "Mul":
                product: Dim = 1
                for p in parts:
                    product = product * p
                return product
            case "Pow" if isinstance(parts[1], int) and 0 <= parts[1] < 8:
                power: Dim = 1
                for _ in range(parts[1]):
                    power = power * parts[0]
                return power
            case "FloorDiv" | "CleanDiv":
                return floordiv(parts[0], parts[1])
            case "Mod" | "PythonMod":
                return mod(parts[0], parts[1])
            case "Max" | "Min" as kind:
                result = parts[0]
                for p in parts[1:]:
                    result = dim_max(result, p) if kind == "Max" else dim_min(result, p)
                return result
        raise Unsupported(f"size {e}")

    def _symbol(self, s: Any, env: Any) -> Dim:
        name = str(s)
        if name not in self.known:
            if (name[0] != "s" or not name[1:].isdigit()) and name not in self.given:
                raise Unsupported(f"size {name}, which depends on data")
            low, high = 0, None
            bounds = self.ranges.get(name) or (env.var_to_range.get(s) if env is not None else None)
            if bounds is not None:
                low = max(int(bounds.lower), -1) if bounds.lower > -_HUGE else -1
                high = int(bounds.upper) if bounds.upper < _HUGE else None
            if low < 0:
                raise Unsupported(f"size {name}, which may be negative")
            self.known[name] = sym(name, low, high)
        return self.known[name]


def is_ragged(n: torch.SymInt) -> bool:
    """Whether a size stands for several lengths, of a tensor of several: it has no value."""
    return bool(n.node.is_nested_int()) or isinstance(n.node.hint, torch.SymInt)


def memory_order(t: torch.Tensor) -> tuple[int, ...] | None:
    """The order of axes in which a tensor's elements lie one after the other; None where that is not so."""
    order = stride_order(t)
    expected = 1
    for i in reversed(order):
        size, stride = size_now(t.shape[i]), size_now(t.stride(i))
        if size != 1 and stride != expected:
            return None
        expected *= size
    return order


def stride_order(t: torch.Tensor) -> tuple[int, ...]:
    """The order of axes from the longest step in memory to the shortest; as they are, where that says the same."""
    strides = [size_now(s) for s in t.stride()]
    sizes = [size_now(n) for n in t.shape]
    order = sorted(range(t.dim()), key=lambda i: (-strides[i], i))
    longer = [i for i in order if sizes[i] > 1]
    is_plain = longer == sorted(longer) or 0 in sizes or 0 in strides
    return tuple(range(t.dim()) if is_plain else order)


def size_now(x: Any) -> int:
    """A size as it is now, without a guard on it."""
    if isinstance(x, torch.SymInt):
        hint = x.node.hint
        return int(hint) if hint is not None else -1
    return int(x)
