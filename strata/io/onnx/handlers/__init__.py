"""Handlers of ONNX operators, one family in each file; every file of this folder is found."""

from importlib import import_module

FAMILIES = (
    "attention", "casting", "control", "conv", "elementwise", "index", "learning", "loss", "microsoft", "nn",
    "normalize", "quant", "random", "reduce", "rnn", "sequence", "shape", "signal", "text", "training", "vision",
)  # fmt: skip


def register() -> None:
    """Import every family, which enters its readers in the registry."""
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
