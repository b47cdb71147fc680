"""Which ops shaders can compute: those whose kernels use no type that WGSL lacks."""

from __future__ import annotations

from functools import lru_cache

from strata.backends.wgsl.values import HELD, has_function
from strata.core import TensorType
from strata.errors import StrataError
from strata.kernel import Expr, KernelBuilder, Reduce, Scalar, Scan, postorder
from strata.lir import has_kernel
from strata.mir import Op, as_tuple
from strata.ops import CheckedIds


@lru_cache(maxsize=4096)
def can_lower(op: Op, types: tuple[TensorType, ...]) -> bool:
    """Whether an op on inputs of these types becomes part of a shader; without types, whether it may."""
    if not has_kernel(op) or isinstance(op, CheckedIds):  # a shader cannot say which id is wrong
        return False
    if not types:
        return True
    if any(t.dtype.name not in HELD for t in types):
        return False
    try:
        outs = as_tuple(op.infer(*types))
        own = op.own_kernel(*types)
        if own is not None:
            roots, outputs = list(own.roots), [b.dtype for b in own.outputs]
        else:
            k = KernelBuilder("probe")
            inputs = [k.input(f"in{i}", t) for i, t in enumerate(types)]
            roots = [e for t in outs for e in as_tuple(op.lower(k, k.axes(t.shape), *inputs))]
            outputs = [t.dtype for t in outs]
    except StrataError:
        return False
    return all(d.name in HELD for d in outputs) and all(_is_held(e) for e in postorder(roots))


def _is_held(node: Expr) -> bool:
    if node.dtype.name not in HELD:
        return False
    match node:
        case Scalar(name, args):
            return has_function(name, args[-1].dtype)
        case Reduce(_, _, body) | Scan(_, _, body):
            return body.dtype.name in HELD
    return True
