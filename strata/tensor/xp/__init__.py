"""The Array API standard (2024.12) over tensors: `st.xp`, and what `Tensor.__array_namespace__()` gives.

Functions record lazily like all others. Those whose result has a shape that depends on values (`nonzero`, `unique_*`,
`repeat` by a tensor) compute first.
"""

from __future__ import annotations

from math import e, inf, nan, pi
from typing import Any

import strata.tensor as tensors
from strata.core import (
    bool_ as bool,
    c64 as complex64,
    c128 as complex128,
    f32 as float32,
    f64 as float64,
    i8 as int8,
    i16 as int16,
    i32 as int32,
    i64 as int64,
    u8 as uint8,
    u16 as uint16,
    u32 as uint32,
    u64 as uint64,
)
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
    finfo,
    iinfo,
    isdtype,
    result_type,
)
from strata.tensor.xp.elementwise import *
from strata.tensor.xp.elementwise import NAMES as _ELEMENTWISE
from strata.tensor.xp.linalg import matmul, matrix_transpose, tensordot, vecdot
from strata.tensor.xp.manipulation import (
    broadcast_arrays,
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

__array_api_version__ = "2024.12"
newaxis = None
_ops: Any = tensors
