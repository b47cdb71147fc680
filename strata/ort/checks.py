"""Whether a value fits an input of a model: kind, element type, rank and sizes, told in onnxruntime's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.io import onnx
from strata.ort.exceptions import InvalidArgument, RuntimeException
from strata.ort.values import type_of

Sizes = list[int | str | None]
_KINDS = {"seq": 3, "map": 1}  # onnxruntime's numbers of kinds of values


def require_fit(name: str, value: Any, declared: str, shape: Sequence[int | str | None]) -> None:
    """Refuse a value that is not what the model declares, `declared` being a type such as `tensor(float)`."""
    kind = declared.partition("(")[0]
    if isinstance(value, dict) and type_of(value) != declared:
        raise InvalidArgument(
            f"Unexpected input data type. Actual: (({type_of(value)})) , expected: (({declared}))", code="D701"
        )
    if kind in _KINDS:
        if isinstance(value, np.ndarray):
            raise InvalidArgument(
                f"input with name: '{name}' expected to be of type: {_KINDS[kind]} but received a tensor", code="D701"
            )
        return
    if isinstance(value, list) and kind == "tensor":
        value = np.asarray(value)  # numbers, which become elements of the declared type
    elif isinstance(value, np.ndarray):
        _require_type(value, declared[len("optional(") : -1] if kind == "optional" else declared)
    else:
        return
    if shape:
        _require_shape(name, value.shape, shape)


def _require_type(array: np.ndarray, declared: str) -> None:
    dtype, actual = array.dtype, type_of(array)
    if dtype.kind not in "OUSV" and dtype.isnative and dtype not in onnx.dtypes.NUMBER:
        raise RuntimeException(f"Numpy_type {dtype.num} can't be converted to MLDataType.", code="D701", plain=True)
    if actual != declared and declared not in ("tensor(undefined)", ""):
        raise InvalidArgument(f"Unexpected input data type. Actual: ({actual}) , expected: ({declared})", code="D701")


def _require_shape(name: str, given: tuple[int, ...], declared: Sequence[int | str | None]) -> None:
    if len(declared) != len(given):
        raise InvalidArgument(
            f"Invalid rank for input: {name} Got: {len(given)} Expected: {len(declared)} Please fix either the "
            "inputs/outputs or the model.", code="S701",
        )  # fmt: skip
    wrong = [
        f" index: {i} Got: {got} Expected: {d}"
        for i, (got, d) in enumerate(zip(given, declared, strict=True))
        if isinstance(d, int) and d >= 0 and got != d
    ]
    if wrong:
        lines = "\n".join(wrong)
        raise InvalidArgument(
            f"Got invalid dimensions for input: {name} for the following indices\n{lines}\n"
            " Please fix either the inputs/outputs or the model.", code="S701",
        )  # fmt: skip
