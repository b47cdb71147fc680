"""Vectors in fewer bits: int8 by the range of each feature, binary by sign, eight features a byte."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.errors import OptionError
from strata.places import here

PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")


def quantize_embeddings(embeddings: Any, precision: str, ranges: Any = None, calibration_embeddings: Any = None) -> Any:
    """Vectors as int8, uint8, binary or ubinary; ranges [2, features] are the calibration's, or their own.

    A list of matrices gives a list, with one range for all.
    """
    if isinstance(embeddings, list) and embeddings and np.ndim(embeddings[0]) == 2:
        known = np.concatenate(embeddings) if calibration_embeddings is None else calibration_embeddings
        return [quantize_embeddings(matrix, precision, ranges, known) for matrix in embeddings]
    x = np.asarray(embeddings)
    if precision not in PRECISIONS:
        raise OptionError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}", code="O720", place=here())
    if x.dtype in (np.int8, np.uint8):
        raise OptionError("embeddings to quantize are floats, got int8", code="O720", place=here())
    if precision == "float32":
        return x.astype(np.float32)
    if precision.endswith("binary"):
        packed = np.packbits(x > 0, axis=-1)
        return packed if precision == "ubinary" else (packed - 128).astype(np.int8)
    rows = x if x.ndim > 1 else x[None]
    if ranges is None:
        known = rows if calibration_embeddings is None else np.asarray(calibration_embeddings)
        if calibration_embeddings is None and len(rows) == 1:
            raise OptionError(
                f"{precision} takes the range of each feature from several vectors, got one", code="O720",
                place=here(), fix="ranges=… or calibration_embeddings=… to quantize_embeddings",
            )  # fmt: skip
        ranges = np.stack([known.min(0), known.max(0)]) if len(known) else np.zeros((2, rows.shape[-1]))
    low, high = np.asarray(ranges, np.float32)
    step = (high - low) / 255
    codes = np.clip(np.floor((x - low) / np.where(step == 0, 1, step)), 0, 255)
    return codes.astype(np.uint8) if precision == "uint8" else (codes - 128).astype(np.int8)
