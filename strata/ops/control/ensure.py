"""ensure: values as they are, after an error unless a condition holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.core import Dim, TensorType, bool_, f64
from strata.errors import RunError
from strata.mir import Op, Sample, Value, op
from strata.ops.base.movement import broadcast_to
from strata.ops.reduce.reduce import all_


@op("ensure")
class Ensure(Op):
    """x, where `ok` is true; else a RunError with this message and code."""

    message: str
    code: str

    dtypes = "any"

    def infer(self, x: TensorType, ok: TensorType) -> TensorType:
        self.require(ok == bool_[()], f"the condition is one bool, got {ok}", code="S346")
        return x

    def numpy(self, x: np.ndarray, ok: np.ndarray) -> np.ndarray:
        if not ok:
            raise self.failure()
        return x

    def failure(self) -> RunError:
        return RunError(self.message, code=self.code)

    def jvp(self, x: Value, ok: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return dx[0]

    def vjp(self, x: Value, ok: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return ct, None

    def vmap(self, x: Value, ok: Value, *, batched: tuple[bool, ...], size: Dim) -> Any:
        made = self(x, all_(ok) if batched[1] else ok)
        return made if batched[0] else broadcast_to(made, (size, *made.shape))

    @classmethod
    def samples(cls) -> list[Sample]:
        fields = {"message": "it does not hold", "code": "X200"}
        return [Sample(f64[2, 3], np.bool_(True), **fields), Sample(f64[()], np.bool_(True), **fields)]
