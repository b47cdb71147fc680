"""Readers of ONNX ops, a family a file. Importing this package registers them all."""

from importlib import import_module

FAMILIES = (
    "attention", "casting", "control", "conv", "elementwise", "index", "learning", "loss", "microsoft", "nn",
    "normalize", "quant", "random", "reduce", "rnn", "sequence", "shape", "signal", "text", "training", "vision",
)  # fmt: skip

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
