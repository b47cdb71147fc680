"""Status words: how native code reports errors, read after a run.

The first word is a code below, 0 while all is well. Then: the failing matrix in its stack (a flat index), the number
that the routine gave, the number of stack axes and their sizes; for an id out of range: its place, the id, and the
range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from strata.errors import RunError, StrataError

WORDS: Final = 16
MAX_AXES: Final = WORDS - 4

_MESSAGES: Final = {
    1: ("X200", "{op}: {which} is singular, pivot {pivot} is 0"),
    2: ("X201", "{op}: {which} is not positive definite, its leading {order}×{order} minor is not positive"),
    3: ("X202", "{op}: the iteration for {which} does not converge"),
}
_OPS: Final = (
    "solve", "triangular_solve", "cholesky", "svd", "eigh", "det", "gather", "gather_elements", "gather_nd",
    "scatter_elements", "scatter_nd", "scatter_add", "grouped_matmul", "grouped_outer", "dequant_grouped_matmul",
    "softmax_cross_entropy_with_logits", "nll_loss", "custom_kernel", "paged_attention", "paged_update",
)  # fmt: skip
SINGULAR, NOT_POSITIVE, DIVERGED = 1, 2, 3
_IDS: Final = {4: "id", 5: "expert", 6: "label", 7: "empty", 8: "page", 9: "tokens"}
OUT_OF_RANGE: Final = {kind: code for code, kind in _IDS.items()}


def code_of(op: str, kind: int) -> int:
    """The first status word of an op that fails in one of the ways above."""
    return kind + 16 * _OPS.index(op)


def check(table: Any, regions: int) -> None:
    """Raise the error that the words after a region table report."""
    if table[regions]:
        raise failure(table[regions : regions + WORDS])


def failure(words: Sequence[int]) -> StrataError:
    """The error that status words stand for."""
    code, flat, number, axes = words[:4]
    if code % 16 in _IDS:
        from strata.ops import id_error

        return id_error(_OPS[code // 16], _IDS[code % 16], flat, number, *words[3:5])
    sizes = words[4 : 4 + axes]
    at: list[int] = []
    for size in reversed(sizes):
        at.insert(0, flat % size)
        flat //= size
    which = f"matrix {at} of the stack" if at else "the matrix"
    name, text = _MESSAGES[code % 16]
    return RunError(text.format(op=_OPS[code // 16], which=which, pivot=number - 1, order=number), code=name)
