"""Backends: a folder each. The registry imports one only when a device asks for it."""

from strata.arguments import public
from strata.backends.base import (
    Backend,
    Capabilities,
    CodeArchive,
    CostModel,
    Executable,
    FastCall,
    MissingCodeError,
    ThreadSpread,
)
from strata.backends.registry import backend_for, known_backends, register_backend
from strata.backends.texts import stablehlo_text

register_backend = public(register_backend)
