"""Kernel IR: scalar expressions over index spaces, with a builder, a verifier, text and a NumPy interpreter."""

from strata.kernel.build import Index, KernelBuilder, View
from strata.kernel.interp import interpret
from strata.kernel.ir import (
    REDUCTIONS,
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    Load,
    Reduce,
    Scalar,
    Scan,
    Size,
    Store,
    apply,
    postorder,
)
from strata.kernel.scalars import SCALARS, ScalarFunction
from strata.kernel.schedule import Schedule, parse_schedule
from strata.kernel.text import parse_kernel, show_kernel
from strata.kernel.verify import verify_kernel
