"""The kernel verifier; a kernel that fails it is a bug of the code that built it."""

from __future__ import annotations

from strata.core import DType, Shape, bool_, f32, f64, i64, known_le, static_prod
from strata.errors import VerifyError
from strata.kernel.ir import (
    REDUCTIONS,
    Expr,
    Kernel,
    Load,
    Reduce,
    Scalar,
    Scan,
    all_axes,
    describe,
    postorder,
)
from strata.kernel.scalars import SCALARS, ScalarFunction
from strata.kinds import counted

MOST_BYTES = 1 << 47  # of a buffer: what an address can tell apart
_SCANS = ("sum", "prod", "max", "min")


def verify_kernel(kernel: Kernel) -> None:
    """Raises VerifyError at the first broken rule."""
    names = [b.name for b in kernel.buffers]
    for name in names:
        if names.count(name) > 1:
            raise _broken(kernel, f"two buffers are called {name}")
    for buffer in kernel.buffers:
        _verify_extents(kernel, buffer.shape, str(buffer))
        points = static_prod(buffer.shape)
        if points is not None and points * buffer.dtype.itemsize > MOST_BYTES:
            raise _broken(kernel, f"{buffer} has more than {MOST_BYTES} bytes")
    for axis in dict.fromkeys((*(a for s in kernel.stores for a in s.axes), *all_axes(kernel.roots))):
        _verify_extents(kernel, (axis.extent,), f"axis {axis.name}")
    for store in kernel.stores:
        if len(set(store.axes)) < len(store.axes):
            raise _broken(kernel, f"a store to {store.buffer.name} goes over one axis twice")
        if store.buffer not in kernel.outputs:
            raise _broken(kernel, f"a store goes to {store.buffer.name}, which is not an output")
        if len(store.index) != len(store.buffer.shape):
            raise _broken(kernel, f"a store to {store.buffer} has {len(store.index)} indices")
        if store.value.dtype is not store.buffer.dtype:
            raise _broken(kernel, f"a store to {store.buffer} is given {store.value.dtype}")
        for root in (*store.index, store.value):
            loose = root.free - frozenset(store.axes)
            if loose:
                unbound = ", ".join(sorted(a.name for a in loose))
                raise _broken(kernel, f"a store to {store.buffer.name} uses axes it does not loop over: {unbound}")
        for index in store.index:
            _expect(kernel, index, i64, "a store index")
    for node in postorder(kernel.roots):
        _verify_node(kernel, node)


def _verify_node(kernel: Kernel, node: Expr) -> None:
    match node:
        case Load(buffer, index, where):
            if buffer not in kernel.inputs:
                raise _broken(kernel, f"{describe(node)} reads {buffer}, which is not an input")
            if len(index) != len(buffer.shape):
                raise _broken(kernel, f"{describe(node)} has {len(index)} indices for {buffer}")
            for part in index:
                _expect(kernel, part, i64, "an index")
            if where is not None:
                _expect(kernel, where, bool_, "a condition")
        case Scalar(name, args):
            function = SCALARS.get(name)
            if function is None or len(args) != function.arity:
                raise _broken(kernel, f"{name} of {counted(len(args), 'argument')} is not a scalar function")
            same = args[1:] if name == "select" else args
            if any(a.dtype is not same[0].dtype for a in same):
                raise _broken(kernel, f"{describe(node)} mixes types {[str(a.dtype) for a in args]}")
            if name == "select":
                _expect(kernel, args[0], bool_, "the condition of select")
            _verify_type(kernel, node, function, same[0].dtype)
        case Reduce(kind, axes, body):
            if kind not in REDUCTIONS or not axes or len(set(axes)) < len(axes):
                raise _broken(kernel, f"{describe(node)} is not a reduction")
            _verify_fold(kernel, kind, node, body.dtype)
        case Scan(kind, _, body, position, _):
            if kind not in _SCANS:
                raise _broken(kernel, f"{describe(node)}: {kind} cannot be scanned")
            _verify_fold(kernel, kind, node, body.dtype)
            _expect(kernel, position, i64, "the position of a scan")


def _verify_type(kernel: Kernel, node: Scalar, function: ScalarFunction, dtype: DType) -> None:
    if not function.takes(dtype):
        raise _broken(kernel, f"{node.name} does not take {dtype}: {describe(node)}")
    if node.name == "complex" and dtype not in (f32, f64):
        raise _broken(kernel, f"complex numbers are made of f32 or f64, not {dtype}")
    if node.name == "bitcast" and not (function.takes(node.dtype) and node.dtype.itemsize == dtype.itemsize):
        raise _broken(kernel, f"the bits of {dtype} are not those of {node.dtype}")


def _verify_fold(kernel: Kernel, kind: str, node: Expr, dtype: DType) -> None:
    """Truth values are joined by all and any, numbers by the others; complex ones have no order."""
    takes = {
        "all": dtype.is_bool, "any": dtype.is_bool,
        "sum": not dtype.is_bool, "prod": not dtype.is_bool,
        "argmax": not dtype.is_complex, "argmin": not dtype.is_complex,
    }.get(kind, not dtype.is_bool and not dtype.is_complex)  # fmt: skip
    if not takes or (dtype.is_int and dtype.bits < 8):
        raise _broken(kernel, f"{kind} does not take {dtype}: {describe(node)}")


def _verify_extents(kernel: Kernel, extents: Shape, what: str) -> None:
    for extent in extents:
        if not known_le(0, extent):
            raise _broken(kernel, f"{what}: the extent {extent} may be negative")
        if isinstance(extent, int) and extent > MOST_BYTES:
            raise _broken(kernel, f"{what}: the extent {extent} is more than memory holds")


def _expect(kernel: Kernel, node: Expr, dtype: DType, what: str) -> None:
    if node.dtype is not dtype:
        raise _broken(kernel, f"{what} is {describe(node)} of type {node.dtype}, not {dtype}")


def _broken(kernel: Kernel, reason: str) -> VerifyError:
    return VerifyError(f"kernel {kernel.name}: {reason}", code="V110")
