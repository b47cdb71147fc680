"""Rules for ATen, a family a file: importing it fills the table."""

from strata.torch.aten import (
    attention,
    control,
    encoder,
    further,
    index,
    layers,
    linalg,
    losses,
    pointwise,
    reduce,
    shape,
)

__all__ = [
    "attention",
    "control",
    "encoder",
    "further",
    "index",
    "layers",
    "linalg",
    "losses",
    "pointwise",
    "reduce",
    "shape",
]
