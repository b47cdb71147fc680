"""Rules for ATen, a family a file: importing it fills the table."""

from strata.torch.aten import encoder, further, index, layers, linalg, pointwise, reduce, shape

__all__ = ["encoder", "further", "index", "layers", "linalg", "pointwise", "reduce", "shape"]
