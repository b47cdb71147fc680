"""jit: a function traced and compiled once for each signature, and run as one native program."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import update_wrapper
from threading import RLock
from typing import Any

import numpy as np

from strata.config import config
from strata.core import TreeDef, flatten, here, unflatten
from strata.errors import OptionError, TraceError
from strata.mir import Graph, Value, fresh_scope, placeholder, substitute_values
from strata.ops import outer_values
from strata.tensor.creation import asarray
from strata.tensor.data import Handle
from strata.tensor.outline import is_traced
from strata.tensor.realize import realize_values
from strata.tensor.tensor import Tensor
from strata.tensor.variant import Bucket, Explanation, Variant

ON_MISS = ("error", "bucket", "interpret")
DEFAULT_VARIANTS = 64  # of a function without max_variants; the one that was not used for longest is dropped


class Jitted:
    """A function that is traced and compiled for each new signature of its arguments.

    Tensors and arrays are inputs of the graph; everything else (numbers, strings, None, what `static_argnums` names) is
    part of the signature and is fixed in the graph.
    """

    __name__: str

    def __init__(
        self,
        fn: Callable[..., Any],
        static_argnums: Sequence[int] = (),
        max_variants: int | None = None,
        on_miss: str | None = None,
        donate_argnums: Sequence[int] = (),
    ) -> None:
        if not callable(fn):
            raise OptionError(f"jit: takes a function, got {type(fn).__name__}", code="T211", place=here())
        if on_miss not in (None, *ON_MISS):
            raise OptionError(
                f"jit: on_miss is one of {', '.join(ON_MISS)}, got {on_miss!r}", code="T217", place=here()
            )
        if max_variants is not None and max_variants < 1:
            raise OptionError(f"jit: max_variants is {max_variants}", code="T217", place=here())
        update_wrapper(self, fn, updated=())
        self.fn = fn
        self.static_argnums = tuple(static_argnums)
        self.donate_argnums = tuple(donate_argnums)
        self.max_variants = max_variants
        self.on_miss = on_miss
        self.variants: OrderedDict[Any, Variant] = OrderedDict()
        self.buckets: OrderedDict[Any, Bucket] = OrderedDict()
        self.misses: list[str] = []
        self._lock = RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure, dynamic = self._flatten(args, kwargs)
        values = [_value(leaves[i]) for i in dynamic]
        if any([is_traced(v) for v in values]):
            return self.fn(*args, **kwargs)  # inside another trace it is part of that graph
        key = self._key(leaves, structure, dynamic, values)
        with self._lock:
            variant = self.variants.get(key)
            if variant is not None:
                self.variants.move_to_end(key)
        if variant is None:
            found = self._miss(key, args, kwargs, leaves, structure, dynamic, values)
            if not isinstance(found, Variant):
                return found[0]
            variant = found
        handles = realize_values(values)
        return variant.run(handles, self._donated(args, handles) if self.donate_argnums else ())

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph for these arguments; nothing is computed."""
        leaves, structure, dynamic = self._flatten(args, kwargs)
        values = [_value(leaves[i]) for i in dynamic]
        traced = self._trace(leaves, structure, dynamic, values)
        if not isinstance(traced, Variant):
            raise TraceError(
                "graph: the function uses a tensor of a trace that is still going on", code="T219", place=here()
            )
        return traced.graph

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What was compiled, and why again; with arguments, the variant for them is made if there is none yet."""
        if args or kwargs:
            leaves, structure, dynamic = self._flatten(args, kwargs)
            values = [_value(leaves[i]) for i in dynamic]
            key = self._key(leaves, structure, dynamic, values)
            if key not in self.variants:
                self._miss(key, args, kwargs, leaves, structure, dynamic, values)
            chosen = [self.variants[key]] if key in self.variants else []
        else:
            chosen = list(self.variants.values())
        return Explanation(self.__name__, chosen, tuple(self.misses), self.max_variants)

    def clear(self) -> None:
        """Forget all variants."""
        with self._lock:
            self.variants.clear()
            self.buckets.clear()
            self.misses.clear()

    def _flatten(self, args: Any, kwargs: Any) -> tuple[list[Any], TreeDef, list[int]]:
        for i in (*self.static_argnums, *self.donate_argnums):
            if not -len(args) <= i < len(args):
                kind = "static" if i in self.static_argnums else "donated"
                raise OptionError(
                    f"jit: {kind} argument {i} does not exist, {len(args)} were given", code="T209", place=here()
                )
        if self.static_argnums:
            static = {i % len(args) for i in self.static_argnums}
            given = [_Static(a) if i in static else a for i, a in enumerate(args)]
            leaves, structure = flatten([given, kwargs], is_leaf=_is_static)
        else:
            leaves, structure = flatten([list(args), kwargs])
        return leaves, structure, [i for i, x in enumerate(leaves) if type(x) is Tensor or _is_dynamic(x)]

    def _donated(self, args: Any, handles: Sequence[Handle]) -> list[int]:
        """Which inputs of the graph the caller gives up."""
        chosen = {i % len(args) for i in self.donate_argnums}
        found: list[int] = []
        at = 0
        for i, arg in enumerate(args):
            count = sum(_is_dynamic(x) for x in flatten(arg)[0]) if i not in self.static_argnums else 0
            if i in chosen:
                found += range(at, at + count)
            at += count
        return found

    def _key(self, leaves: list[Any], structure: TreeDef, dynamic: list[int], values: list[Value]) -> Any:
        settings = config()
        where = (settings.device, settings.deterministic, settings.check_indices)
        fixed: tuple[Any, ...] = ()
        if len(dynamic) != len(leaves):
            inputs = set(dynamic)
            fixed = tuple((type(x), x) for i, x in enumerate(leaves) if i not in inputs)
        key = (structure, tuple(dynamic), tuple([v.type for v in values]), fixed, where)
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
        signature = ", ".join(str(v.type) for v in values)
        full = self.max_variants is not None and len(self.variants) >= self.max_variants
        if full and self.on_miss == "interpret":
            return (self.fn(*args, **kwargs),)
        if full and self.on_miss == "error":
            known = "; ".join(", ".join(map(str, k[2])) for k in self.variants)
            raise TraceError(
                f"jit: {self.__name__} has its {self.max_variants} variants and was called with another signature: "
                f"{signature}; it has {known}",
                code="T221", place=here(), fix="raise max_variants, or on_miss='interpret'",
            )  # fmt: skip
        variant = self._trace(leaves, structure, dynamic, values)
        if not isinstance(variant, Variant):
            return variant
        place = here()
        if len(self.misses) < DEFAULT_VARIANTS:
            self.misses.append(f"{signature}{f' at {place.short}' if place else ''}")
        if full and self.on_miss == "bucket":
            with self._lock:
                variant.share(self.buckets)
            return variant  # not kept: its program is
        with self._lock:
            self.variants[key] = variant
            while len(self.variants) > (self.max_variants or DEFAULT_VARIANTS):
                self.variants.popitem(last=False)
        return variant

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
        if not tensors:
            return (result,)
        graph = Graph(getattr(self.fn, "__name__", "jit").replace("<lambda>", "lambda"))
        table = {x: graph.input(n, x.type) for n, x in zip(names, inputs, strict=True)}
        captured = {}
        for i, (value, handle) in enumerate(zip(captures, realize_values(captures), strict=True)):
            table[value] = graph.param(f"k{i}", value.type)
            captured[f"k{i}"] = handle.array
        fixed = {i: x for i, x in enumerate(outs) if not _is_dynamic(x)}
        graph.outputs(*substitute_values(tensors, table))
        return Variant(graph, captured, names, shape, fixed)


class _Static:
    """An argument that is part of the signature, whatever it is."""

    __slots__ = ("value",)
    __tree_leaf__ = True

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and type(other.value) is type(self.value) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


def _is_static(x: Any) -> bool:
    return type(x) is _Static


def _value(x: Any) -> Value:
    return x.value if type(x) is Tensor else asarray(x).value


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
    donate_argnums: Sequence[int] = (),
    max_variants: int | None = None,
    on_miss: str | None = None,
) -> Any:
    """Trace and compile `fn` once for each signature (shapes, dtypes, structure, static values).

    With `max_variants`, `on_miss` says what a call beyond them does: "error" raises; "interpret" runs without a trace;
    "bucket" uses one program with symbolic sizes for all further shapes. By default the variant that was not used for
    longest makes room. Arguments in `donate_argnums` are given up: results take over their memory where they can, and
    a donated tensor cannot be used again.
    """

    def decorate(f: Callable[..., Any]) -> Jitted:
        return Jitted(f, static_argnums, max_variants, on_miss, donate_argnums)

    return decorate if fn is None else decorate(fn)
