"""ensure_ids: ids as they are, where what a device found out about their bounds says that all are in range."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.core import Dim, TensorType, i32, i64
from strata.errors import IndexRangeError
from strata.mir import Op, Sample, Value, draw, op
from strata.ops.base.movement import broadcast_to
from strata.ops.indexing.indexing import id_error
from strata.ops.reduce.reduce import max_

FOUND = 4  # numbers that tell of an id out of range: 1, its place, the id, the size that it exceeds; 0 where all are in


@op("ensure_ids")
class EnsureIds(Op):
    """Ids as they are, after an IndexRangeError for the one that `found` tells of: [1, place, id, size], or zeros."""

    wrap: bool
    what: str
    kind: str

    differentiable = False
    dtypes = (i64,)

    def infer(self, ids: TensorType, found: TensorType) -> TensorType:
        self.require(found == i64[FOUND], f"what was found is i64[{FOUND}], got {found}", code="S202")
        return ids

    def numpy(self, ids: np.ndarray, found: np.ndarray) -> np.ndarray:
        if found[0]:
            raise self.failure(found)
        return ids.copy()

    def failure(self, found: np.ndarray) -> IndexRangeError:
        """The error for what was found."""
        _, place, number, size = map(int, found)
        return id_error(self.what, self.kind, place, number, -size if self.wrap else 0, size)

    def vmap(self, ids: Value, found: Value, *, batched: tuple[bool, ...], size: Dim) -> Any:
        made = self(ids, max_(found, 0) if batched[1] else found)
        return made if batched[0] else broadcast_to(made, (size, *made.shape))

    @classmethod
    def samples(cls) -> list[Sample]:
        fields = {"wrap": False, "what": "gather", "kind": "id", "grad": False}
        fine = np.zeros(FOUND, np.int64)
        return [Sample(draw(i64[4], 0, 5), fine, **fields), Sample(draw(i32[2, 3], 0, 5), fine, **fields)]
