"""The table of all ops, from the registry: docs/ops.md is its text."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

from strata.mir import REGISTRY, Op, arity
from strata.testing.check import claimed_dtypes

HEADER = """# Ops

Every op of the tensor graph, made from the registry by `make golden`; a test fails when this page is out of date, or
when an op lacks a rule that it needs.

- **inputs** are values, **fields** are static parameters, **dtypes** are those of the first input.
- **jvp**, **vjp**, **vmap**: `yes` is a rule of the op itself, `parts` follows from the ops it is composed of, `zero`
  says that the op has no derivative.
- **kernel**: `loop` is a rule that writes its kernel, `parts` is made of the kernels of its parts, `step` is a step
  of its own.

| op | meaning | inputs | fields | dtypes | jvp | vjp | vmap | kernel |
|---|---|---|---|---|---|---|---|---|
"""
_CLASSES = {"any", "numeric", "real", "float", "inexact", "int", "integral", "bool", "complex", "ordered"}


def op_table() -> str:
    """The page as Markdown."""
    rows = [_row(cls) for cls in REGISTRY.classes()]
    return HEADER + "\n".join(rows) + f"\n\n{len(rows)} ops.\n"


def _row(cls: type[Op]) -> str:
    meaning = (cls.__doc__ or "").strip().split("\n")[0].replace("|", "\\|")
    static = ", ".join(f"`{f.name}`" for f in fields(cls))
    derivatives = [_rule(cls, r) if cls.differentiable else "zero" for r in ("jvp", "vjp")]
    cells = [
        f"`{cls.name}`",
        meaning,
        _inputs(cls),
        static,
        _dtypes(cls),
        *derivatives,
        _rule(cls, "vmap"),
        _kernel(cls),
    ]
    return "| " + " | ".join(cells) + " |"


def _inputs(cls: type[Op]) -> str:
    low, high = arity(cls)
    names = [
        p.name for p in list(inspect.signature(cls.infer).parameters.values())[1:] if p.kind is not p.VAR_POSITIONAL
    ]
    if len(names) != high:
        return str(low) if low == high else f"{low}+"
    return ", ".join(names)


def _dtypes(cls: type[Op]) -> str:
    if isinstance(cls.dtypes, str):
        assert cls.dtypes in _CLASSES
        return cls.dtypes
    return ", ".join(t.name for t in claimed_dtypes(cls))


def _rule(cls: type[Op], rule: str) -> str:
    if getattr(cls, rule) is getattr(Op, rule):
        return "parts" if cls.decompose is not Op.decompose else "–"
    return "yes"


def _kernel(cls: type[Op]) -> str:
    if cls.lower is not Op.lower and cls.has_rule("lower"):
        return "loop"
    return "parts" if cls.decompose is not Op.decompose else "step"


def page() -> Path:
    """Where the page lies in a checkout."""
    return Path(__file__).parents[2] / "docs" / "ops.md"
