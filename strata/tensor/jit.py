"""jit: a function traced once for each signature, and run as one graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from threading import RLock
from typing import Any

import numpy as np

from strata.core import TreeDef, flatten, here, unflatten
from strata.errors import OptionError, TraceError
from strata.mir import Graph, Value, fresh_scope, placeholder, substitute_values
from strata.ops import outer_values
from strata.tensor.creation import asarray
from strata.tensor.data import data_value
from strata.tensor.realize import is_traced, realize_values, run
from strata.tensor.tensor import Tensor

ON_MISS = ("error", "bucket", "interpret")
DEFAULT_VARIANTS = 64  # of a function without max_variants; the one that was not used for longest is dropped


@dataclass(frozen=True, slots=True)
class Variant:
    """One traced signature: a graph, the arrays that the function closed over, and how to give results back."""

    graph: Graph
    captured: dict[str, np.ndarray]
    names: tuple[str, ...]
    structure: TreeDef
    fixed: dict[int, Any]  # results that are not tensors, by place among the leaves

    def run(self, arrays: Sequence[np.ndarray]) -> Any:
        outs = iter(run(self.graph, dict(zip(self.names, arrays, strict=True)) | self.captured))
        count = len(self.graph.results) + len(self.fixed)
        leaves = [self.fixed[i] if i in self.fixed else Tensor(data_value(next(outs))) for i in range(count)]
        return unflatten(self.structure, leaves)


class Jitted:
    """A function that is traced for each new signature of its arguments.

    Tensors and arrays are inputs of the graph; everything else (numbers, strings, None, what `static_argnums` names) is
    part of the signature and is fixed in the graph.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        static_argnums: Sequence[int] = (),
        max_variants: int | None = None,
        on_miss: str | None = None,
    ) -> None:
        if not callable(fn):
            raise OptionError(f"jit: takes a function, got {type(fn).__name__}", code="T211", place=here())
        if on_miss not in (None, *ON_MISS):
            raise OptionError(
                f"jit: on_miss is one of {', '.join(ON_MISS)}, got {on_miss!r}", code="T217", place=here()
            )
        if on_miss == "bucket":
            raise OptionError("jit: on_miss='bucket' needs a compiled session", code="T218", place=here())
        if max_variants is not None and max_variants < 1:
            raise OptionError(f"jit: max_variants is {max_variants}", code="T217", place=here())
        update_wrapper(self, fn, updated=())
        self.fn = fn
        self.static_argnums = tuple(static_argnums)
        self.max_variants = max_variants
        self.on_miss = on_miss
        self.variants: OrderedDict[Any, Variant] = OrderedDict()
        self._lock = RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure, dynamic = self._flatten(args, kwargs)
        values = [asarray(leaves[i]).value for i in dynamic]
        if any(is_traced(v) for v in values):
            return self.fn(*args, **kwargs)  # inside another trace it is part of that graph
        key = self._key(leaves, structure, dynamic, values, args)
        with self._lock:
            variant = self.variants.get(key)
            if variant is not None:
                self.variants.move_to_end(key)
        if variant is None:
            found = self._miss(key, args, kwargs, leaves, structure, dynamic, values)
            if not isinstance(found, Variant):
                return found[0]
            variant = found
        return variant.run([h.array for h in realize_values(values)])

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph for these arguments; nothing is computed."""
        leaves, structure, dynamic = self._flatten(args, kwargs)
        values = [asarray(leaves[i]).value for i in dynamic]
        traced = self._trace(leaves, structure, dynamic, values)
        if not isinstance(traced, Variant):
            raise TraceError(
                "graph: the function uses a tensor of a trace that is still going on", code="T219", place=here()
            )
        return traced.graph

    def _flatten(self, args: Any, kwargs: Any) -> tuple[list[Any], TreeDef, list[int]]:
        for i in self.static_argnums:
            if not -len(args) <= i < len(args):
                raise OptionError(
                    f"jit: static argument {i} does not exist, {len(args)} were given", code="T209", place=here()
                )
        static = {i % len(args) for i in self.static_argnums} if args else set()
        given = [_Static(a) if i in static else a for i, a in enumerate(args)]
        leaves, structure = flatten([given, kwargs], is_leaf=lambda x: isinstance(x, _Static))
        return leaves, structure, [i for i, x in enumerate(leaves) if _is_dynamic(x)]

    def _key(self, leaves: list[Any], structure: TreeDef, dynamic: list[int], values: list[Value], args: Any) -> Any:
        inputs = set(dynamic)
        fixed = tuple((type(x), x) for i, x in enumerate(leaves) if i not in inputs)
        key = (structure, tuple(dynamic), tuple(v.type for v in values), fixed)
        try:
            hash(key)
        except TypeError:
            bad = next((x for _, x in fixed if not _hashable(x)), None)
            bad = bad.value if isinstance(bad, _Static) else bad
            raise TraceError(
                f"jit: a {type(bad).__name__} argument is neither a tensor nor hashable, which a signature needs",
                code="T220", place=here(),
            ) from None  # fmt: skip
        return key

    def _miss(
        self,
        key: Any,
        args: Any,
        kwargs: Any,
        leaves: list[Any],
        structure: TreeDef,
        dynamic: list[int],
        values: list[Value],
    ) -> Variant | tuple[Any]:
        full = self.max_variants is not None and len(self.variants) >= self.max_variants
        if full and self.on_miss == "interpret":
            return (self.fn(*args, **kwargs),)
        if full and self.on_miss == "error":
            known = "; ".join(", ".join(map(str, k[2])) for k in self.variants)
            raise TraceError(
                f"jit: {self.__name__} has its {self.max_variants} variants and was called with another signature: "
                f"{', '.join(str(v.type) for v in values)}; it has {known}",
                code="T221", place=here(), fix="raise max_variants, or on_miss='interpret'",
            )  # fmt: skip
        variant = self._trace(leaves, structure, dynamic, values)
        if not isinstance(variant, Variant):
            return variant
        with self._lock:
            self.variants[key] = variant
            while len(self.variants) > (self.max_variants or DEFAULT_VARIANTS):
                self.variants.popitem(last=False)
        return variant

    __name__: str

    def _trace(
        self, leaves: list[Any], structure: TreeDef, dynamic: list[int], values: list[Value]
    ) -> Variant | tuple[Any]:
        scope = fresh_scope()
        names = tuple(f"x{i}" for i in range(len(values)))
        inputs = [placeholder(n, v.type, scope) for n, v in zip(names, values, strict=True)]
        given = [x.value if isinstance(x, _Static) else x for x in leaves]
        for place, value in zip(dynamic, inputs, strict=True):
            given[place] = Tensor(value)
        args, kwargs = unflatten(structure, given)
        result = self.fn(*args, **kwargs)
        outs, shape = flatten(result)
        tensors = [asarray(x).value for x in outs if _is_dynamic(x)]
        captures = outer_values(tensors, inputs, 0, hoist=True)
        if any(is_traced(c) for c in captures):
            known = dict(zip(inputs, values, strict=True))
            bound = iter(substitute_values(tensors, known))
            return (unflatten(shape, [Tensor(next(bound)) if _is_dynamic(x) else x for x in outs]),)
        graph = Graph(getattr(self.fn, "__name__", "jit").replace("<lambda>", "lambda"))
        table = {x: graph.input(n, x.type) for n, x in zip(names, inputs, strict=True)}
        captured = {}
        for i, (value, handle) in enumerate(zip(captures, realize_values(captures), strict=True)):
            table[value] = graph.input(f"k{i}", value.type)
            captured[f"k{i}"] = handle.array
        fixed = {i: x for i, x in enumerate(outs) if not _is_dynamic(x)}
        if not tensors:
            return (result,)
        graph.outputs(*substitute_values(tensors, table))
        return Variant(graph, captured, names, shape, fixed)


@dataclass(frozen=True)
class _Static:
    """An argument that is part of the signature, whatever it is."""

    value: Any
    __tree_leaf__ = True


def _is_dynamic(x: Any) -> bool:
    return isinstance(x, (Tensor, Value, np.ndarray, np.generic)) or (
        hasattr(x, "__dlpack__") and not isinstance(x, (bool, int, float, complex, str))
    )


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    static_argnums: Sequence[int] = (),
    max_variants: int | None = None,
    on_miss: str | None = None,
) -> Any:
    """Trace `fn` once for each signature (shapes, dtypes, structure, static values) and run it as one graph.

    With `max_variants`, `on_miss` says what a call beyond them does: "error" raises, "interpret" runs without a trace;
    by default the variant that was not used for longest makes room.
    """

    def decorate(f: Callable[..., Any]) -> Jitted:
        return Jitted(f, static_argnums, max_variants, on_miss)

    return decorate if fn is None else decorate(fn)
