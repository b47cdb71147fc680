"""Modules that are imported by the first call that needs them."""

import gc
from importlib import import_module
from types import ModuleType


def imported(name: str) -> ModuleType:
    """A module. What importing makes stays, so that looking for garbage meanwhile is time lost."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if was_on:
            gc.enable()
