"""jit: a function traced and compiled once for each signature, and run as one native program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import update_wrapper
from itertools import accumulate, pairwise
from types import MethodType
from typing import Any

import numpy as np

from strata.arguments import untouched
from strata.backends import HOMES, REPLACED, DeviceArray, DeviceHome, DeviceName, registration
from strata.config import Config, config
from strata.core import (
    ON_MISS,
    Table,
    TensorType,
    exact,
    flatten,
    here,
    new_rlock,
    range_of,
    rising,
    signature,
    tree_map,
    unflatten,
)
from strata.errors import OptionError, TraceError
from strata.kinds import with_article
from strata.mir import Graph, Value, fresh_scope, placeholder, substitute_values
from strata.ops import outer_values
from strata.runtime import CompiledGraph, Profile
from strata.tensor.call_fast_path import FIXED, Repeat, UnlikeError
from strata.tensor.creation import asarray
from strata.tensor.data import Handle, LooseHandle
from strata.tensor.placement import HOST, default_home, device_of, handle_device, home_of, tracing, two_devices
from strata.tensor.realize import realize_values
from strata.tensor.shape_generic import General
from strata.tensor.structure_key import is_traced
from strata.tensor.tensor import Tensor, realize_tensors
from strata.tensor.variant import JitExplanation, Variant

REPEATS = 3  # calls that a call is compared with before its signature is looked up
FEW_VARIANTS = 32  # of a function without max_variants, up to which the order of their use does not matter
MOST_MISSES = 64  # that an explanation tells
MOST_REPEATS = 8  # calls of one variant that are kept for it, over time


class Jitted:
    """A function that is traced and compiled for each new signature of its arguments.

    Tensors and arrays are inputs of the graph; everything else (numbers, strings, None, what `static_argnums` names) is
    part of the signature and is fixed in the graph.
    """

    __name__: str
    __qualname__: str  # of the function, once there is one

    def __init__(
        self,
        fn: Callable[..., Any],
        static_argnums: Sequence[int] = (),
        max_variants: int | None = None,
        on_miss: str | None = None,
        donate_argnums: Sequence[int] = (),
        buckets: Mapping[int, Mapping[int, Any]] | None = None,
    ) -> None:
        if not callable(fn):
            raise OptionError(f"jit: takes a function, got {type(fn).__name__}", code="T211", place=here())
        if on_miss not in (None, *ON_MISS):
            raise OptionError(
                f"jit: on_miss is one of {', '.join(ON_MISS)}, got {on_miss!r}", code="T217", place=here()
            )
        if max_variants is not None and (not isinstance(max_variants, int) or max_variants < 1):
            raise OptionError(f"jit: max_variants is {max_variants!r}", code="T217", place=here())
        update_wrapper(self, fn, updated=())
        self.fn = fn
        self.static_argnums = tuple(static_argnums)
        self.donate_argnums = tuple(donate_argnums)
        self.max_variants = max_variants
        self.on_miss = on_miss
        self.ranges = {(arg, axis): _rising(arg, axis, sizes)
                       for arg, axes in (buckets or {}).items() for axis, sizes in axes.items()}  # fmt: skip
        self.variants: Table[Any, Variant] = Table("jit", None if self.ranges else max_variants)
        self.buckets: Table[Any, CompiledGraph] = Table("jit shared", max_variants)
        self.misses: list[str] = []
        self._sharing: Table[Any, Variant | None] = Table("jit further")  # on a shared program, or plain
        self._repeats: tuple[Repeat, ...] = ()  # the calls that others are compared with first
        self._lock = new_rlock()

    @untouched
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        settings = config() if self._repeats else None
        for repeat in self._repeats:
            if repeat.settings is not settings or repeat.replaced != len(REPLACED):
                continue
            if repeat.enter is not None:
                result = repeat.enter(args, kwargs)
                if result is not None:
                    return result
            inputs = repeat.inputs(args, kwargs)
            if inputs is not None:
                return repeat.variant.run_ready(*inputs)
        call = self._call(args, kwargs)
        pending = None in call.handles
        if pending and any(is_traced(v) for v in call.values):
            return self._plainly(call)  # inside another trace it is part of that graph
        try:
            variant = self._known(call.key)
        except TypeError:
            raise self._unhashable(call) from None
        if variant is None:
            found = self._miss(call)
            if not isinstance(found, Variant):
                return found[0]
            variant = found
        elif len(self.variants) > (1 if self.max_variants is not None else FEW_VARIANTS):
            self.variants.get(call.key)  # a use, which a call that is only compared would not be
        elif not pending and variant.repeats < MOST_REPEATS and variant.takes_arrays:
            self._expect(call, variant)
        return variant.run(realize_tensors(call.tensors) if pending else call.handles)  # type: ignore[arg-type]

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """As an attribute of a class it is a method, like any function."""
        return self if owner is None else MethodType(self, owner)

    def __reduce__(self) -> str:
        """In pickles and copies it is what it is called, like any function."""
        return self.__qualname__

    def _expect(self, call: _Call, variant: Variant) -> None:
        """Calls like this one are to be recognised without a signature."""
        variant.repeats += 1
        structure = flatten((call.given, call.kwargs))[1]
        try:
            made = Repeat(call.args, call.kwargs, structure, call.key[1], config(), variant)
        except UnlikeError:
            variant.repeats = MOST_REPEATS
            return
        with self._lock:
            if any(v is variant for v in self.variants.values()):
                self._repeats = (made, *self._repeats[: REPEATS - 1])

    def _known(self, key: Any) -> Variant | None:
        return self.variants.peek(key) or self._sharing.peek(key)

    def _plainly(self, call: _Call) -> Any:
        """The function called without its own trace: with tensors, as in a trace."""
        args, kwargs = self._arguments(call, call.tensors)
        result = self.fn(*args, **kwargs)
        return tree_map(lambda x: asarray(x) if _is_dynamic(x) else x, result)

    def _interpreted(self, call: _Call) -> Any:
        """The same at once: like a program's, results are in their own memory, whatever happens to the arguments."""
        given = {x.value for x in call.tensors}
        arrays = {id(held.array) for x in call.tensors if (held := x._held) is not None}

        def own(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            held = x._held
            is_given = x.value in given or (held is not None and id(held.array) in arrays)
            return copy(x) if is_given else x

        result = tree_map(own, self._plainly(call))
        realize_tensors([x for x in flatten(result)[0] if isinstance(x, Tensor) and not is_traced(x.value)])
        return result

    def _arguments(self, call: _Call, tensors: Sequence[Tensor]) -> Any:
        """The arguments with these tensors in place of those that were given, as `(args, kwargs)`."""
        leaves, structure = flatten((call.given, call.kwargs))
        given = [x.value if isinstance(x, _Static) else x for x in leaves]
        for place, tensor in zip(call.dynamic, tensors, strict=True):
            given[place] = tensor
        return unflatten(structure, given)

    def _call(self, args: Any, kwargs: Any) -> _Call:
        """The arguments flattened."""
        for i in (*self.static_argnums, *self.donate_argnums):
            if not -len(args) <= i < len(args):
                kind = "static" if i in self.static_argnums else "donated"
                raise OptionError(
                    f"jit: {kind} argument {i} does not exist, {len(args)} were given", code="T209", place=here()
                )
        given = args
        if self.static_argnums:
            static = {i % len(args) for i in self.static_argnums}
            given = tuple([_Static(a) if i in static else a for i, a in enumerate(args)])
        leaves, shape = signature(given)
        if kwargs:
            named, names = signature(kwargs)
            leaves, shape = leaves + named, (shape, names)
        dynamic = [i for i, x in enumerate(leaves) if type(x) is Tensor or _is_dynamic(x)]
        inputs = leaves if len(dynamic) == len(leaves) else [leaves[i] for i in dynamic]
        tensors = [x if type(x) is Tensor else _tensor(x) for x in inputs]
        handles = [x._held for x in tensors]
        settings = config()
        fixed: tuple[Any, ...] = ()
        if len(dynamic) != len(leaves):
            among = set(dynamic)
            fixed = tuple(
                (i, exact(x.value if type(x) is _Static else x)) for i, x in enumerate(leaves) if i not in among
            )
        home, device = (None, "cpu") if not HOMES and settings.device == "cpu" else _where(tensors, settings)
        where = (device, registration(device), settings.code_settings, home)
        types = tuple([x.type if h is None else h.type for x, h in zip(tensors, handles, strict=True)])
        return _Call(args, kwargs, given, leaves, dynamic, tensors, handles, (shape, types, fixed, where), home, device)

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph for these arguments; nothing is computed."""
        traced = self._trace(self._call(args, kwargs))
        if not isinstance(traced, Variant):
            raise TraceError(
                "graph: the function uses a tensor of a trace that is still going on", code="T219", place=here()
            )
        return traced.graph

    def explain(self, *args: Any, **kwargs: Any) -> JitExplanation:
        """What was compiled, and why again; with arguments, the variant for them is made if there is none yet."""
        if args or kwargs:
            call = self._call(args, kwargs)
            found = self._known(call.key) or self._miss(call)
            chosen = [found] if isinstance(found, Variant) else []
        else:
            chosen = list(self.variants.values())
        return JitExplanation(self.__name__, chosen, tuple(self.misses), self.max_variants)

    def profile(self, *args: Any, repeats: int = 10, **kwargs: Any) -> Profile:
        """The time of each step of the program for these arguments, which stay as they are."""
        call = self._call(args, kwargs)
        variant = self._known(call.key) or self._miss(call)
        if not isinstance(variant, Variant):
            return Profile(self.__name__, ())
        feeds = {n: h.hosted for n, h in zip(variant.names, realize_values(call.values), strict=True)}
        return variant.compile().profile(variant.renamed(feeds), repeats=repeats)

    def clear(self) -> None:
        """Forget all variants."""
        with self._lock:
            self._repeats = ()
            self.variants.clear()
            self._sharing.clear()
            self.buckets.clear()
            self.misses.clear()

    def _donated(self, call: _Call) -> tuple[int, ...]:
        """Which inputs of the graph the caller gives up."""
        if not self.donate_argnums:
            return ()
        spans = _spans(call)
        return tuple(at for i in sorted({i % len(spans) for i in self.donate_argnums}) for at in spans[i])

    def _unhashable(self, call: _Call) -> TraceError:
        fixed = [x.value if isinstance(x, _Static) else x for x in call.leaves if not _is_dynamic(x)]
        bad = next((x for x in fixed if not _hashable(x)), None)
        return TraceError(
            f"jit: {with_article(type(bad))} argument is neither a tensor nor hashable, which a signature needs",
            code="T220", place=here(),
        )  # fmt: skip

    def _ranges_of(self, call: _Call) -> dict[int, tuple[int, int]]:
        """Sizes of this call that have buckets, and the range that each is in."""
        found: dict[int, tuple[int, int]] = {}
        for i, span in enumerate(_spans(call)):
            for value in call.values[span.start : span.stop]:
                for (number, axis), sizes in self.ranges.items():
                    if number == i and axis < value.ndim and isinstance(value.shape[axis], int):
                        size = int(value.shape[axis])
                        low, high = range_of(size, sizes, 1, f"jit: {self.__name__}: argument {i}, axis {axis}: ")
                        known = found.get(size, (low, high))
                        found[size] = max(low, known[0]), min(high, known[1])
        return found

    def _miss_in_buckets(self, call: _Call) -> Variant | tuple[Any] | None:
        """A variant on a program for a range of sizes; None where the program needs to know them."""
        ranges = self._ranges_of(call)
        variant = self._trace(call)
        if not isinstance(variant, Variant):
            return variant
        general = variant.form(ranges)
        if general is None:
            return None
        with self._lock:
            if (general.key, call.where) not in self.buckets and self._is_full(len(self.buckets)):
                if self.on_miss == "interpret":
                    self._sharing.put(call.key, None)
                    return (self._interpreted(call),)
                if self.on_miss == "error":
                    raise self._beyond(call)
                if self.on_miss == "bucket":
                    general = self._open_form(call, variant)
            try:
                found = self._share(call, variant, general)
            except TraceError:
                if self.on_miss == "bucket":
                    raise
                return None
            if found is variant:
                self.variants.put(call.key, variant)
        return found

    def _is_full(self, count: int) -> bool:
        """Whether no more variants than these may be compiled; one is kept free for the open form."""
        return self.max_variants is not None and count >= self.max_variants - (self.on_miss == "bucket")

    def _has_room(self) -> bool:
        """Whether one more program may be made, shared or not."""
        own = sum(v.shared is None for v in self.variants.values())
        return self.max_variants is None or own + len(self.buckets) < self.max_variants

    def _share(self, call: _Call, variant: Variant, general: General | None) -> Variant | tuple[Any]:
        """The variant on a shared program. What would need one program too many is run op by op."""
        if general is not None and (general.key, call.where) not in self.buckets:
            if self.on_miss == "bucket" and not self._has_room():
                self._sharing.put(call.key, None)
                return (self._interpreted(call),)
            self._note(call)
        variant.share(self.buckets, general, call.where)
        return variant

    def _open_form(self, call: _Call, variant: Variant) -> General | None:
        """The program for further shapes: open where calls have differed so far; if that fails, everywhere."""
        first = None
        for form in variant.open_forms(self._varying(call)):
            if (form.key, call.where) in self.buckets:
                return form
            first = first or form
        return first

    def _varying(self, call: _Call) -> set[int]:
        """Sizes of a call in which it differs from the variants."""
        shape, kinds = call.key[:2]
        found: set[int] = set()
        for known in self.variants:
            if known[0] == shape:
                pairs = [(a.shape, b.shape) for a, b in zip(kinds, known[1], strict=True) if a.ndim == b.ndim]
                found |= {d for a, b in pairs for d, e in zip(a, b, strict=True) if d != e and isinstance(d, int)}
        return found

    def _note(self, call: _Call) -> None:
        place = here()
        if len(self.misses) < MOST_MISSES:
            signature = ", ".join(str(v.type) for v in call.values)
            self.misses.append(f"{signature}{f' at {place.short}' if place else ''}")

    def _beyond(self, call: _Call) -> TraceError:
        signature = ", ".join(str(v.type) for v in call.values)
        known = "; ".join(", ".join(map(str, k[1])) for k in self.variants)
        return TraceError(
            f"jit: {self.__name__} has its {self.max_variants} variants and was called with another signature: "
            f"{signature}; it has {known}",
            code="T221", place=here(), fix="raise max_variants, or on_miss='interpret'",
        )  # fmt: skip

    def _miss(self, call: _Call) -> Variant | tuple[Any]:
        self._repeats = ()  # a variant may have to go
        types: dict[TensorType, TensorType] = {}  # equal types become one object: the next call is then found sooner
        shape, kinds, *rest = call.key
        call.key = (shape, tuple([types.setdefault(t, t) for t in kinds]), *rest)
        if call.key in self._sharing:
            return (self._interpreted(call),)
        if self.ranges:
            found = self._miss_in_buckets(call)
            if found is not None:
                return found
        return self._miss_alone(call)

    def _miss_alone(self, call: _Call) -> Variant | tuple[Any]:
        full = self._is_full(len(self.variants))
        if full and self.on_miss == "interpret":
            return (self._interpreted(call),)
        if full and self.on_miss == "error":
            raise self._beyond(call)
        variant = self._trace(call)
        if not isinstance(variant, Variant):
            return variant
        if full and self.on_miss == "bucket":
            with self._lock:
                open_form = self._open_form(call, variant)
                if open_form is not None or not self._has_room():
                    found = self._share(call, variant, open_form)
                    if found is variant:
                        self._sharing.put(call.key, variant)
                    return found
        self._note(call)
        found = self.variants.get_or_make(call.key, lambda: variant)  # another thread may have traced it, too
        if self.max_variants is not None:
            self.variants.shrink(self.max_variants)
        return found

    def _trace(self, call: _Call) -> Variant | tuple[Any]:
        values = call.values
        scope = fresh_scope()
        names = tuple(f"x{i}" for i in range(len(values)))
        inputs = [placeholder(n, v.type, scope) for n, v in zip(names, values, strict=True)]
        args, kwargs = self._arguments(call, [Tensor(x) for x in inputs])
        with tracing():
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
        captured: dict[str, Any] = {}
        home, device = call.home, call.device
        for i, (value, handle) in enumerate(zip(captures, realize_values(captures), strict=True)):
            table[value] = graph.param(f"k{i}", value.type)
            kept = captured[f"k{i}"] = handle.for_keeping()
            if isinstance(kept, DeviceArray):
                if home is not None and kept.home is not home:
                    raise two_devices(f"jit: {self.__name__}", home.name, kept.home.name)
                home, device = kept.home, str(kept.home.name)
        fixed = {i: x for i, x in enumerate(outs) if not _is_dynamic(x)}
        graph.outputs(*substitute_values(tensors, table))
        types = {t: t for t in call.key[1]}
        kinds = tuple(types.get(x.type, x.type) for x in graph.results)
        return Variant(graph, captured, names, shape, fixed, kinds, self._donated(call), device, home)


@dataclass(slots=True)
class _Call:
    """The arguments of one call: as given, static ones marked, and flattened."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: tuple[Any, ...]
    leaves: list[Any]
    dynamic: list[int]  # leaves that are inputs of the graph
    tensors: list[Tensor]  # those leaves
    handles: list[Handle | None]  # where they are, None for what has no memory yet
    key: Any
    home: DeviceHome | None  # the memory that they are in; None: the host's
    device: str

    @property
    def values(self) -> list[Value]:
        return [x.value for x in self.tensors]

    @property
    def where(self) -> Any:
        """The part of the key that says for which device and settings a program is made."""
        return self.key[-1]


class _Static:
    """An argument that is part of the signature, whatever it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _spans(call: _Call) -> list[range]:
    """Which inputs of the graph are in each positional argument."""
    ends = list(accumulate((sum(map(_is_dynamic, flatten(arg)[0])) for arg in call.given), initial=0))
    return [range(begin, end) for begin, end in pairwise(ends)]


def _tensor(x: Any) -> Tensor:
    if type(x) is np.ndarray and x.dtype.kind in "fiubc" and x.dtype.isnative:
        return Tensor.of(LooseHandle(x))  # what asarray would come to, on a device that the others decide
    return asarray(x)


def _where(tensors: Sequence[Tensor], settings: Config) -> tuple[DeviceHome | None, str]:
    """The memory that results of a call stay in, and the device that it runs on: that of its tensors, or the default.

    Tensors of the host are computed on the default device, and so are their results of the host.
    """
    found: DeviceName | None = None
    for x in tensors:
        held = x._held
        place = device_of(x.value) if held is None else handle_device(held)
        if place is not None:
            if found is not None and place != found:
                raise two_devices("jit", found, place)
            found = place
    if found is None:
        return default_home(), settings.device
    return (None, settings.device) if found == HOST else (home_of(found), str(found))


def _is_dynamic(x: Any) -> bool:
    if isinstance(x, (Tensor, Value, np.ndarray, np.generic)):
        return True
    return not isinstance(x, (type, *FIXED)) and (hasattr(x, "__dlpack__") or hasattr(x, "__array__"))


def _rising(arg: int, axis: int, sizes: Sequence[int]) -> tuple[int, ...]:
    made = tuple(sizes)
    if arg < 0 or axis < 0 or not rising(made):
        raise OptionError(
            f"jit: buckets are {{argument: {{axis: rising sizes}}}}, got {{{arg}: {{{axis}: {list(made)}}}}}",
            code="T217", place=here(),
        )  # fmt: skip
    return made


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
    buckets: Mapping[int, Mapping[int, Any]] | None = None,
) -> Any:
    """Trace and compile `fn` once for each signature (shapes, dtypes, structure, static values).
    What `fn` reads besides its arguments is read while it is traced: later changes of it have no effect.

    With `max_variants`, `on_miss` says what a call beyond them does: "error" raises; "interpret" runs without a trace;
    "bucket" makes the last of them a program with symbolic sizes, for all further shapes; "compile", the default, lets
    the least recently used variant make room. Arguments in `donate_argnums` are given up: results take over
    their memory where they can, and a donated tensor cannot be used again.

    `buckets` gives the largest size of each range of an axis, by argument: with `{0: {1: [16, 64, 256]}}`, calls share
    a program where axis 1 of the first argument is in the same range. Nothing is padded. `max_variants` then counts
    programs; a size of one, a size that is also a number of the program, and programs that need to know the size have
    one of their own.
    """

    def decorate(f: Callable[..., Any]) -> Jitted:
        return Jitted(f, static_argnums, max_variants, on_miss, donate_argnums, buckets)

    return decorate if fn is None else decorate(fn)
