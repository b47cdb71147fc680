"""`load`: a StableHLO module as a graph. Functions are written out where they are called.

Sizes that the text leaves open become symbols. What computes with sizes (`get_dimension_size` and arithmetic on it) is
followed beside the values, so that shapes that are given as data are known as expressions of symbols.
"""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strata.backends import module_text
from strata.core import (
    Dim,
    TensorType,
    dim_max,
    dim_min,
    floordiv,
    here,
    located,
    mod,
    read_bytes,
    substitute,
    sym,
)
from strata.errors import LowerError, OptionError, StrataError, file_error
from strata.io.stablehlo import elementwise, moving, reducing  # noqa: F401 - they fill RULES
from strata.io.stablehlo.rules import RULES, Item, SizesAreOne
from strata.io.stablehlo.syntax import HloFunction, HloOp, HloRegion, HloType, parse_module
from strata.mir import Graph

MOST_CALLS = 200  # functions inside each other
BYTECODE = b"ML\xefR"


@located
def load(source: Any, *, name: str = "main") -> Graph:
    """A graph from a StableHLO module: its text, a path to it, MLIR bytecode, or what `jax.export` gives.

    Inputs are called arg0, arg1, …; their open sizes are symbols, named as JAX named them where it says so. Bytecode
    is decoded by `jaxlib`, which must be installed; text needs nothing. `name` is the function to read.
    """
    shapes: list[tuple[Any, ...]] | None = None
    if hasattr(source, "mlir_module") and hasattr(source, "in_avals"):  # jax.export.Exported
        kept = getattr(source, "module_kept_var_idx", range(len(source.in_avals)))
        shapes = [tuple(source.in_avals[i].shape) for i in kept]
        text = source.mlir_module()
    else:
        text = _text(source)
    functions = parse_module(text)
    if name not in functions:
        raise OptionError(f"load: there is no function {name!r}; known: {', '.join(functions)}", code="O509")
    equal: dict[str, Dim] = {}
    while True:
        try:
            return HloReading(functions, equal).graph(functions[name], shapes)
        except SizesAreOne as found:  # two open sizes that the module says are one
            equal = {k: substitute(v, {found.name: found.size}) for k, v in equal.items()} | {found.name: found.size}


def _text(source: Any) -> str:
    if isinstance(source, (bytes, bytearray)):
        raw = bytes(source)
    elif isinstance(source, os.PathLike) or (isinstance(source, str) and "\n" not in source and "{" not in source):
        try:
            raw = read_bytes(source)
        except OSError as error:
            raise file_error(source, error, code="F121", what="cannot be read", who="load", place=here()) from None
    elif isinstance(source, str):
        return source
    else:
        raise OptionError(
            f"load: {type(source).__name__} is not text, a path, bytecode or a function exported by JAX", code="O509"
        )
    if raw.startswith(BYTECODE):
        return module_text(raw)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise OptionError("load: the bytes are neither MLIR bytecode nor text", code="O509") from None


class HloReading:
    """One reading: functions, and the values of the region at hand."""

    def __init__(self, functions: Mapping[str, HloFunction], equal: Mapping[str, Dim]) -> None:
        self.functions, self.equal = functions, equal
        self.names: list[dict[str, Item]] = []
        self.depth = 0

    def graph(self, function: HloFunction, shapes: Sequence[tuple[Any, ...]] | None) -> Graph:
        made = Graph(function.name)
        inputs = []
        for at, (_, kind) in enumerate(function.region.arguments):
            if kind is None:
                raise LowerError(f"argument {at} of @{function.name} is not a tensor", code="L510")
            shape = self._argument_shape(at, kind, None if shapes is None else shapes[at])
            inputs.append(Item(made.input(f"arg{at}", TensorType(kind.dtype, shape))))
        results = self.call(function, inputs)
        made.outputs(*(x.value for x in results))
        return made

    def _argument_shape(self, at: int, kind: HloType, said: tuple[Any, ...] | None) -> tuple[Dim, ...]:
        found: list[Dim] = []
        for axis, size in enumerate(kind.shape):
            if size is not None:
                found.append(size)
            elif said is not None:
                found.append(_read_size(str(said[axis])))
            else:
                found.append(sym(f"arg{at}_{axis}"))
        return tuple(substitute(d, self.equal) for d in found)

    # running

    def call(self, function: HloFunction, arguments: Sequence[Item]) -> list[Item]:
        if self.depth >= MOST_CALLS:
            raise LowerError(f"@{function.name}: more than {MOST_CALLS} functions inside each other", code="L510")
        self.depth += 1
        outer, self.names = self.names, []  # a function sees its arguments only
        try:
            return self.region(function.region, arguments)
        finally:
            self.names = outer
            self.depth -= 1

    def region(self, region: HloRegion, arguments: Sequence[Item]) -> list[Item]:
        """The results of a region."""
        scope = {name: item for (name, _), item in zip(region.arguments, arguments, strict=True)}
        self.names.append(scope)
        try:
            for op in region.body:
                given = [self.find(x, op) for x in op.operands]
                if op.name.rpartition(".")[2] == "return":
                    return given
                made = self.apply(op, given)
                scope.update(zip(op.results, made, strict=False))
            return []
        finally:
            self.names.pop()

    def find(self, name: str, op: HloOp) -> Item:
        for scope in reversed(self.names):
            if name in scope:
                return scope[name]
            if f"{name}#0" in scope:  # the only result of an operation with several
                return scope[f"{name}#0"]
        raise LowerError(f"StableHLO, line {op.line}: {name} is not defined before it is used", code="L510")

    def apply(self, op: HloOp, given: list[Item]) -> list[Item]:
        name = op.name.removeprefix("stablehlo.").removeprefix("func.")
        found = RULES.get(name)
        if found is None:
            raise LowerError(f"StableHLO, line {op.line}: {op.name} is not supported", code="L511")
        try:
            made = found(self, op, given)
        except StrataError as error:
            if not error.summary.startswith("StableHLO, line"):
                error.summary = f"StableHLO, line {op.line}: {op.name}: {error.summary}"
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:  # the text does not fit
            problem = f"{type(error).__name__}: {error}"
            raise LowerError(f"StableHLO, line {op.line}: {op.name} cannot be read ({problem})", code="L510") from None
        listed = made if isinstance(made, list) else [made]
        return [x if isinstance(x, Item) else Item(x) for x in listed]

    def apply_region(self, region: HloRegion, arguments: Sequence[Any]) -> list[Any]:
        """The values that a region gives for values: a body of scalars works on whole arrays as well."""
        return [x.value for x in self.region(region, [x if isinstance(x, Item) else Item(x) for x in arguments])]


def _read_size(text: str) -> Dim:
    """A size as JAX writes it: `2*b + 1`, `floordiv(b, 2)`, `max(a, b)`."""
    calls: dict[str, Callable[..., Any]] = {"floordiv": floordiv, "mod": mod, "max": dim_max, "min": dim_min}

    def walk(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name):
                return sym(name)
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return -walk(x)
            case ast.BinOp(left=a, op=ast.Add(), right=b):
                return walk(a) + walk(b)
            case ast.BinOp(left=a, op=ast.Sub(), right=b):
                return walk(a) - walk(b)
            case ast.BinOp(left=a, op=ast.Mult(), right=b):
                return walk(a) * walk(b)
            case ast.BinOp(left=a, op=ast.Pow(), right=ast.Constant(value=int() as power)):
                return math.prod([walk(a)] * power)
            case ast.Call(func=ast.Name(id=name), args=args) if name in calls:
                return calls[name](*map(walk, args))
        raise LowerError(f"the size {text!r} cannot be read", code="L512")

    found: Dim = walk(ast.parse(text, mode="eval").body)
    return found
