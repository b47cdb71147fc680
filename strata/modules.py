"""Lazy imports: a module is loaded when something of it is asked for."""

from importlib import import_module as imported

__all__ = ["imported"]
