"""The compile contract: how many variants of a graph may be compiled, and what a call does that fits none.

A graph with symbolic sizes is specialised for the sizes it is called with, at most `max_variants` times. With
`buckets`, a variant serves a range of sizes, without padding: its sizes stay symbolic inside the range. Beyond the
limit, or while a variant is being compiled, `on_miss` decides:

    error      refuse, with the sizes and the variants that exist
    bucket     run the one variant whose sizes are all symbolic; it fits every call, and is the last of `max_variants`
    interpret  answer at once from the interpreter, and compile in the background as long as the limit allows
    compile    compile now; beyond the limit the least recently used variant makes room
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from strata.arguments import public
from strata.config import config
from strata.core import ON_MISS, Symbol, SymExpr, Table, call_in_children, here, located, new_lock, range_of, rising
from strata.errors import OptionError, RunError, StrataError, SymbolError, UnknownNameError
from strata.mir import Graph, evaluate, infer_binding, leaf_name, near
from strata.runtime.compile.device import Device
from strata.runtime.compile.options import CompileOptions
from strata.runtime.execute.arrays import read_array
from strata.runtime.execute.compiled import CompiledGraph
from strata.runtime.execute.session import Session


@dataclass(slots=True)
class ContractCounters:
    """What became of the calls so far."""

    calls: int = 0
    hits: int = 0
    misses: int = 0
    compiled: int = 0
    interpreted: int = 0
    bucketed: int = 0
    refused: int = 0
    failed: int = 0  # compiles in the background that raised


@public
class VariantGraph:
    """A graph under a contract. Safe to call from many threads; nothing in it grows without a bound."""

    def __init__(
        self,
        graph: Graph,
        device: str | Device | None = None,
        *,
        max_variants: int = 8,
        buckets: Mapping[str, Sequence[int]] | None = None,
        on_miss: str = "compile",
        options: CompileOptions | None = None,
    ) -> None:
        """`buckets` gives the largest size of each range, by symbol: `{"seq": [16, 64, 256]}`."""
        if on_miss not in ON_MISS:
            raise OptionError(f"on_miss is one of {', '.join(ON_MISS)}, got {on_miss!r}", code="O410", place=here())
        self.graph, self.max_variants, self.on_miss = graph, max_variants, on_miss
        self.session = Session(device, options)
        self.counters = ContractCounters()
        self._buckets = {name: _checked(name, sizes, graph) for name, sizes in (buckets or {}).items()}
        self._variants: Table[Any, CompiledGraph] = Table("forms", max_variants)
        self._general: Table[Any, CompiledGraph] = Table("open form")
        self._pending: dict[Any, Future[None]] = {}
        self._params: dict[str, np.ndarray] = {}
        self._forms: WeakSet[CompiledGraph] = WeakSet()  # all that are in use, those that are about to be kept, too
        self._lock = new_lock()
        self._background: ThreadPoolExecutor | None = None
        call_in_children(self._forget)

    def _forget(self) -> None:
        """In a forked child no other thread is left that could finish."""
        self._pending.clear()
        self._background = None

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Set parameters, in all variants that exist and will."""
        arrays = {name: self._read(name, value) for name, value in values.items()}
        with self._lock:
            self._params |= arrays
            for form in self._forms:
                # one for another size of a parameter is not run before that has the old size again, and is set then
                _set(form, arrays)

    def _read(self, name: str, value: Any) -> np.ndarray:
        known = {leaf_name(x): x.type for x in self.graph.params}
        if name not in known:
            names = f"{', '.join(known) or 'none'}{near(name, known)}"
            raise UnknownNameError(
                f"{self.graph.name!r} has no parameter {name!r}; it has {names}", code="N115", place=here()
            )
        return read_array(name, known[name], value, "parameter")

    def set_param(self, name: str, value: Any) -> None:
        self.set_params({name: value})

    @located
    def run(self, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> tuple[np.ndarray, ...]:
        """Run on arrays by input name, on the variant that fits their sizes."""
        given = {**(feeds or {}), **named}
        binding = self._binding(given)
        key = self._key(binding)
        self.counters.calls += 1
        found = self._variants.get(key)
        if found is not None:
            self.counters.hits += 1
            return found.run(given)
        self.counters.misses += 1
        return self._miss(key, binding, given)

    __call__ = run

    @property
    def variants(self) -> list[str]:
        """The sizes of the compiled variants."""
        return [_show(dict(key[0])) for key in self._variants]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every compile in the background is done."""
        for future in list(self._pending.values()):
            future.result(timeout)

    # misses

    def _miss(self, key: Any, binding: Mapping[str, int], given: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        kept_free = 1 if self.on_miss == "bucket" else 0  # for the variant whose sizes are symbolic
        is_full = len(self._variants) >= self.max_variants - kept_free
        if self.on_miss == "interpret":
            if not is_full:
                self._compile_later(key, binding)
            self.counters.interpreted += 1
            try:
                return evaluate(self.graph, {**self._params, **given})
            except ValueError:
                self.graph.bind(binding)  # says which sizes differ, and where
                raise
        if is_full and self.on_miss == "error":
            self.counters.refused += 1
            raise RunError(
                f"{self.graph.name!r} has its {self.max_variants} variants and was called with {_show(binding)}; "
                f"there are {'; '.join(self.variants)}",
                code="X401", place=here(), fix="raise max_variants, or on_miss='bucket'",
            )  # fmt: skip
        if is_full and self.on_miss == "bucket":
            self.counters.bucketed += 1
            return self._general.get_or_make(config().code_settings, self._compile_general).run(given)
        return self._variants.get_or_make(key, lambda: self._compile(binding)).run(given)

    def _compile_later(self, key: Any, binding: Mapping[str, int]) -> None:
        with self._lock:
            if key in self._pending or len(self._pending) + len(self._variants) >= self.max_variants:
                return
            if self._background is None:
                self._background = ThreadPoolExecutor(1, "strata-compile")
            settings = copy_context()  # of the caller: the key names them
            self._pending[key] = self._background.submit(settings.run, self._finish, key, dict(binding))

    def _finish(self, key: Any, binding: Mapping[str, int]) -> None:
        try:
            self._variants.get_or_make(key, lambda: self._compile(binding))
        except StrataError:
            self.counters.failed += 1
        finally:
            with self._lock:
                self._pending.pop(key, None)

    def _compile(self, binding: Mapping[str, int]) -> CompiledGraph:
        """The variant for sizes: fixed, or with bounds where there are buckets."""
        sizes = {n: size for n, size in binding.items() if n not in self._buckets}
        graph = self.graph.bind(sizes) if sizes else self.graph
        ranges = {n: self._range(n, size) for n, size in binding.items() if n in self._buckets}
        return self._ready(with_bounds(graph, ranges) if ranges else graph)

    def _compile_general(self) -> CompiledGraph:
        return self._ready(self.graph)

    def _ready(self, graph: Graph) -> CompiledGraph:
        made = self.session.compile(graph)
        self.counters.compiled += 1
        with self._lock:
            _set(made, self._params)
            self._forms.add(made)
        return made

    # sizes

    def _binding(self, given: Mapping[str, Any]) -> dict[str, int]:
        shapes = {}
        for x in (*self.graph.inputs, *self.graph.params):
            value = given.get(leaf_name(x), self._params.get(leaf_name(x)))
            if value is not None and np.ndim(value) == x.type.ndim:
                shapes[x] = np.shape(value)
        return infer_binding(shapes)

    def _key(self, binding: Mapping[str, int]) -> tuple[Any, ...]:
        sizes = sorted((n, self._range(n, s)[1] if n in self._buckets else s) for n, s in binding.items())
        return tuple(sizes), config().code_settings

    def _range(self, name: str, size: int) -> tuple[int, int]:
        if size > self._buckets[name][-1]:
            self.counters.refused += 1
        return range_of(size, self._buckets[name], min(1, self.graph.symbols()[name].lo), f"{name} = ")


def specialize(graph: Graph, device: str | Device | None = None, **contract: Any) -> VariantGraph:
    """A graph under a compile contract: `specialize(g, "cpu", max_variants=4, on_miss="interpret")`."""
    return VariantGraph(graph, device, **contract)


def with_bounds(graph: Graph, ranges: Mapping[str, tuple[int, int]]) -> Graph:
    """The graph with other bounds of its symbols."""
    made = {name: Symbol(name, low, high) for name, (low, high) in ranges.items()}
    return graph.bind({name: SymExpr((((symbol,), 1),)) for name, symbol in made.items()})


def _checked(name: str, sizes: Sequence[int], graph: Graph) -> tuple[int, ...]:
    if name not in graph.symbols():
        raise OptionError(f"buckets: {graph.name!r} has no symbolic size {name!r}", code="O410", place=here())
    made = tuple(sizes)
    if not rising(made):
        raise OptionError(f"buckets of {name} are rising sizes, got {list(made)}", code="O410", place=here())
    return made


def _set(form: CompiledGraph, arrays: Mapping[str, np.ndarray]) -> None:
    """Set the parameters of a variant, of those of its sizes."""
    for name, kind in form.params.items():
        array = arrays.get(name)
        if array is not None and all(
            d == n for d, n in zip(kind.shape, array.shape, strict=True) if isinstance(d, int)
        ):
            with suppress(SymbolError):  # outside the bounds of the form's bucket
                form.set_param(name, array)


def _show(binding: Mapping[str, int]) -> str:
    return ", ".join(f"{n} = {s}" for n, s in sorted(binding.items())) or "fixed sizes"
