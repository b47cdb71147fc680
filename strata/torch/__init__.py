"""PyTorch programs: the backend of `torch.compile`, import of exported programs, modules of torch around ours.

Inside this room `torch` is PyTorch's own package.
"""

from strata.arguments import public_names
from strata.torch.backend import strata as backend
from strata.torch.load import load
from strata.torch.meanwhile import wait
from strata.torch.reports import report
from strata.torch.wrap import from_torch, to_torch, wrap


def register(*, any_size: bool = False) -> None:
    """Make `torch.compile(..., backend="strata")` known where the package is not installed with its entry points.

    Torch traces anew for a size of 1. With `any_size`, sizes of 1 are like all others in this process: one trace, and
    one compile, serves every batch from 1 on.
    """
    from torch._dynamo.backends import registry

    if "strata" not in registry._COMPILER_FNS:
        registry.register_backend(backend, name="strata")
    if any_size:
        import torch.fx.experimental._config as shapes

        shapes.backed_size_oblivious = True


public_names(globals())

__all__ = ["backend", "from_torch", "load", "register", "report", "to_torch", "wait", "wrap"]
