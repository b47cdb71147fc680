"""Writers of ops as ONNX nodes, one family in each file; every file of this folder is found."""

from importlib import import_module
from pkgutil import iter_modules


def register() -> None:
    """Import every family, which enters its writers in the table."""
    for family in iter_modules(__path__):
        import_module(f"{__name__}.{family.name}")
