"""Plain data that every layer uses: element types, sizes, tensor types, targets, source places."""

from strata.arguments import hot, public
from strata.core.buckets import ON_MISS, range_of, rising
from strata.core.budgets import Deadline, Meter, over_budget, require, show_bytes
from strata.core.dims import (
    Atom,
    Dim,
    SizeCall,
    Symbol,
    SymExpr,
    bounds,
    common_divisor,
    dim_max,
    dim_min,
    dim_prod,
    dim_spread,
    divide_exactly,
    floordiv,
    known_le,
    known_positive,
    mod,
    solve_for,
    static_prod,
    substitute,
    sym,
    symbols,
)
from strata.core.dlpack import device_capsule, drop_refused_capsules, foreign_memory, from_dlpack
from strata.core.dtypes import (
    ALL_DTYPES,
    DType,
    DTypeLike,
    as_dtype,
    bf16,
    bool_,
    c64,
    c128,
    check_unmasked,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i4,
    i8,
    i16,
    i32,
    i64,
    promote,
    promote_all,
    u4,
    u8,
    u16,
    u32,
    u64,
)
from strata.core.files import append_private, check_plain, open_file, open_handle, read_bytes, read_text
from strata.core.forks import SharedThreads, call_in_children, new_lock, new_rlock
from strata.core.notebook import folded
from strata.core.pages import HUGE_PAGE, forget_pages, give_back, new_pages, no_memory
from strata.core.processors import available_threads, cgroup_quota
from strata.core.progress import progress
from strata.core.size_rows import SizeReader, SizeWriter
from strata.core.size_text import parse_dim
from strata.core.source import located
from strata.core.tables import TABLES, Counters, Table, TableKind
from strata.core.target import Target
from strata.core.tree import LEAF, TreeDef, builder, endless, exact, flatten, signature, taker, tree_map, unflatten
from strata.core.types import (
    Shape,
    TensorType,
    broadcast_dims,
    broadcast_shapes,
    check_shape,
    normalize_axes,
    normalize_axis,
    num_elements,
    show_shape,
)
from strata.places import Place, here

for _class in (Target, TensorType, DType):
    public(_class)
sym, promote = public(sym), public(hot(promote))
