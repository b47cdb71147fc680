"""What every kernel must satisfy; a kernel that does not is a mistake of the code that built it."""

from __future__ import annotations

from strata.core import DType, bool_, i64
from strata.errors import VerifyError
from strata.kernel.ir import REDUCTIONS, Expr, Kernel, Load, Reduce, Scalar, Scan, describe, postorder
from strata.kernel.scalars import SCALARS

_SCANS = ("sum", "prod", "max", "min")


def verify_kernel(kernel: Kernel) -> None:
    """Raises VerifyError at the first broken rule."""
    names = [b.name for b in kernel.buffers]
    for name in names:
        if names.count(name) > 1:
            raise _broken(kernel, f"two buffers are called {name}")
    for store in kernel.stores:
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
                raise _broken(kernel, f"{name} of {len(args)} arguments is not a scalar function")
            same = args[1:] if name == "select" else args
            if any(a.dtype is not same[0].dtype for a in same):
                raise _broken(kernel, f"{describe(node)} mixes types {[str(a.dtype) for a in args]}")
            if name == "select":
                _expect(kernel, args[0], bool_, "the condition of select")
        case Reduce(kind, axes, _):
            if kind not in REDUCTIONS or not axes:
                raise _broken(kernel, f"{describe(node)} is not a reduction")
        case Scan(kind, _, _, position, _):
            if kind not in _SCANS:
                raise _broken(kernel, f"{describe(node)}: {kind} cannot be scanned")
            _expect(kernel, position, i64, "the position of a scan")


def _expect(kernel: Kernel, node: Expr, dtype: DType, what: str) -> None:
    if node.dtype is not dtype:
        raise _broken(kernel, f"{what} is {describe(node)} of type {node.dtype}, not {dtype}")


def _broken(kernel: Kernel, reason: str) -> VerifyError:
    return VerifyError(f"kernel {kernel.name}: {reason}", code="V110")
