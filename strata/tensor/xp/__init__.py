"""The Array API standard (2025.12) over tensors: `st.xp`, and what `Tensor.__array_namespace__()` gives.

Functions record lazily like all others. Those whose result has a shape that depends on values (`nonzero`, `unique_*`,
`repeat` by a tensor) compute first.
"""

from __future__ import annotations

from math import e, inf, nan, pi

from strata import core
from strata.arguments import public_names
from strata.tensor.xp import fft, linalg
from strata.tensor.xp.creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    tril,
    triu,
    zeros,
    zeros_like,
)
from strata.tensor.xp.dtypes import (
    __array_namespace_info__,
    astype,
    can_cast,
    devices,
    finfo,
    iinfo,
    isdtype,
    result_type,
)
from strata.tensor.xp.elementwise import *  # noqa: F403 - its names are a table
from strata.tensor.xp.linalg import matmul, matrix_transpose, tensordot, vecdot
from strata.tensor.xp.manipulation import (
    broadcast_arrays,
    broadcast_shapes,
    broadcast_to,
    concat,
    expand_dims,
    flip,
    moveaxis,
    permute_dims,
    repeat,
    reshape,
    roll,
    squeeze,
    stack,
    take,
    take_along_axis,
    tile,
    unstack,
)
from strata.tensor.xp.reductions import (
    all,
    any,
    argmax,
    argmin,
    argsort,
    count_nonzero,
    cumulative_prod,
    cumulative_sum,
    diff,
    isin,
    max,
    mean,
    min,
    nonzero,
    prod,
    searchsorted,
    sort,
    std,
    sum,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
    var,
    where,
)

bool = core.bool_
int8, int16, int32, int64 = core.i8, core.i16, core.i32, core.i64
uint8, uint16, uint32, uint64 = core.u8, core.u16, core.u32, core.u64
float32, float64 = core.f32, core.f64
complex64, complex128 = core.c64, core.c128
__array_api_version__ = "2025.12"
newaxis = None

for _scope in (globals(), vars(fft), vars(linalg)):
    public_names(_scope, "strata.tensor.xp", of_values=True, late=True)
