"""Caches in the process: one bounded table with one make-once, and the list of all tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from strata.core.forks import call_in_children, new_lock
from strata.errors import OptionError
from strata.places import here

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
POLICIES = ("lru", "fifo")


@dataclass(frozen=True, slots=True)
class TableKind:
    """What a table is for: who has one, what it holds, what an entry is found by, and how many entries it keeps."""

    owner: str
    holds: str
    key: str
    capacity: int | None = None  # None: as many as there are keys, or as the owner is told
    policy: str = "lru"

    def __str__(self) -> str:
        bound = "unbounded" if self.capacity is None else f"{self.capacity} {self.policy}"
        return f"{self.owner}: {self.holds} by {self.key}; {bound}"


TABLES = {
    # compiled graphs, for users and for functions of theirs
    "compiled": TableKind("CompileCache", "compiled graphs", "the caller's key, options, device, settings", 8),
    "buckets": TableKind("BucketedCompileCache", "compiled graphs", "range of keys, options, device, settings"),
    "paddings": TableKind("BucketedCompileCache", "effects of padding", "range of keys, options, padded inputs", 64),
    "templates": TableKind("DynamicDimCompileCache", "plans with open sizes", "model, options, device, settings", 16),
    "specialised": TableKind("DynamicDimCompileCache", "compiled graphs", "model, the caller's key, options", 8),
    "forms": TableKind("specialize", "compiled graphs", "sizes or their buckets, settings", 8),
    "open form": TableKind("specialize", "the graph with all sizes open", "settings", 1),
    "jit": TableKind("jit", "traced variants", "structure, types and fixed values of arguments, device, settings", 64),
    "jit shared": TableKind("jit", "programs with open sizes", "general form", 64, "fifo"),
    "jit further": TableKind("jit", "variants beyond max_variants", "as jit", 64, "fifo"),
    # lazy expressions and models
    "lazy": TableKind("process", "lazy programs", "structure, types, device, settings", 4096),
    "lazy families": TableKind("process", "lazy programs with open sizes", "general form, device, settings", 1024),
    "onnx plans": TableKind("OnnxModel", "plans", "shapes of inputs, elements that decide shapes", 256, "fifo"),
    "onnx calls": TableKind("OnnxModel", "compiled graphs", "shapes of arrays, settings", 256, "fifo"),
    "onnx prefixes": TableKind("OnnxModel", "traces up to where elements decide", "as onnx plans", 64),
    "onnx segments": TableKind("OnnxModel", "compiled graphs", "text of the segment", 64),
    "onnx prices": TableKind("OnnxModel", "seconds spent on a segment", "text of the segment", 1024),
    "onnx training": TableKind("TrainableModel", "graphs", "types of inputs", 16),
    "image sizes": TableKind("ImageModel", "compiled graphs", "height and width of images", 8),
    "image tokens": TableKind("ImageDecoder", "vectors of images", "the pixels of an image", 8),
    "sound lengths": TableKind("CtcSpeech", "compiled graphs", "samples of a sound", 8),
    "chat templates": TableKind("process", "compiled chat templates", "text of the template", 16),
    "matchers": TableKind("Tokenizer", "matchers at their start", "size of the vocabulary, text of a grammar", 64),
    # programs and their code
    "sizes": TableKind("CompiledGraph", "symbolic sizes and shapes of results", "shapes of inputs", 1024, "fifo"),
    "code": TableKind("process, cpu", "machine code of kernels", "kernel, target, settings", 2048),
    "batch": TableKind("compile, cpu", "object code", "text"),
    "argument blocks": TableKind("program, cpu", "arguments of kernels", "symbolic sizes", 256, "fifo"),
    "open steps": TableKind("step, cpu", "programs of an op", "sizes that decide its code", 32),
    "xla programs": TableKind("program, xla", "loaded modules", "symbolic sizes", 32),
    "device kernels": TableKind("device, cuda and wgpu", "kernels", "text", 4096, "fifo"),
    "device recipes": TableKind("program, cuda and wgpu", "launches and their memory", "symbolic sizes", 64),
    "open device steps": TableKind("step, cuda", "kernels of an op", "sizes that decide them", 32),
    "body layouts": TableKind("body, cuda", "launches of loops and branches", "symbolic sizes", 16),
    "uniforms": TableKind("kernel, wgpu", "buffers of sizes", "sizes", 64, "fifo"),
    "op traits": TableKind("process", "what fusion asks of an op", "op, types of inputs", 4096, "fifo"),
    # serving
    "idle pages": TableKind("PagePool", "pages of prompts that nobody reads now", "number of the page"),
    "responses": TableKind("Service", "responses that others may go on from", "id of the response", 1000),
    "grammars": TableKind("GrammarTrials", "what is wrong with grammars", "text of the grammar", 4096),
}


@dataclass(slots=True)
class Counters:
    """What a cache did so far."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class Table(Generic[K, V]):
    """At most `capacity` entries; then the longest unused one goes (lru), or the first made (fifo).

    Each entry is made once, however many threads ask for it.
    """

    def __init__(self, kind: str, capacity: int | None = None, policy: str | None = None) -> None:
        usual = TABLES[kind]
        self.capacity = usual.capacity if capacity is None else capacity
        self.policy = policy or usual.policy
        if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
            raise OptionError(
                f"the capacity of a cache is a whole number of at least 1, got {capacity!r}", code="O406", place=here()
            )
        if self.policy not in POLICIES:
            raise OptionError(
                f"the policy of a cache is one of {', '.join(POLICIES)}, got {policy!r}", code="O406", place=here()
            )
        self.counters = Counters()
        self._made: OrderedDict[K, V] = OrderedDict()
        self._making: dict[K, Future[V]] = {}
        self._lock = new_lock()
        self.peek: Callable[[K], V | None] = self._made.get  # the entry, or None; does not count as a use
        call_in_children(self._forget)

    def _forget(self) -> None:
        """In a forked child no other thread is left that could finish."""
        self._making.clear()

    def get(self, key: K) -> V | None:
        """The entry, or None; counts as a use of it."""
        with self._lock:
            return self._used(key) if key in self._made else None

    def _used(self, key: K) -> V:
        if self.policy == "lru":
            self._made.move_to_end(key)
        return self._made[key]

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The entry, made by the first caller that asks for it; a failure reaches all who waited, and is not kept."""
        with self._lock:
            if key in self._made:
                self.counters.hits += 1
                return self._used(key)
        return self.get_or_make_all([key], lambda _: [make()])[0]

    def get_or_make_all(self, keys: Sequence[K], make: Callable[[list[K]], Sequence[V]]) -> list[V]:
        """The entries of keys; those that are missing are made together.

        Whoever waited for one of several that failed, or that was interrupted, tries for himself.
        """
        found: dict[K, V] = {}
        waiting: dict[K, Future[V]] = {}
        mine: dict[K, Future[V]] = {}
        with self._lock:
            for key in dict.fromkeys(keys):
                if key in self._made:
                    self.counters.hits += 1
                    found[key] = self._used(key)
                elif key in self._making:
                    waiting[key] = self._making[key]
                else:
                    self.counters.misses += 1
                    mine[key] = self._making[key] = Future()
        if mine:
            found |= self._make(mine, make)
        for key, future in waiting.items():
            try:
                found[key] = future.result()
            except CancelledError:
                found[key] = self.get_or_make_all([key], make)[0]
        return [found[key] for key in keys]

    def _make(self, mine: dict[K, Future[V]], make: Callable[[list[K]], Sequence[V]]) -> dict[K, V]:
        try:
            made = dict(zip(mine, make(list(mine)), strict=True))
            for key, value in made.items():
                self.put(key, value)
        except BaseException as error:
            self._end(mine)
            for future in mine.values():
                if len(mine) == 1 and isinstance(error, Exception):
                    future.set_exception(error)
                else:
                    future.cancel()
            raise
        self._end(mine)
        for key, future in mine.items():
            future.set_result(made[key])
        return made

    def _end(self, mine: dict[K, Future[V]]) -> None:
        with self._lock:
            for key in mine:
                self._making.pop(key, None)

    def put(self, key: K, value: V) -> None:
        """Keep an entry, which counts as a use of it."""
        with self._lock:
            self._made[key] = value
            self._used(key)
            self._shrink(self.capacity)

    def shrink(self, most: int) -> None:
        """Drop entries until at most this many are left."""
        with self._lock:
            self._shrink(most)

    def _shrink(self, most: int | None) -> None:
        while most is not None and len(self._made) > most:
            self._made.popitem(last=False)
            self.counters.evictions += 1

    def pop(self, key: K) -> V | None:
        """Take an entry out; None where there is none."""
        with self._lock:
            return self._made.pop(key, None)

    def pop_next(self) -> K | None:
        """Drop the next to go, and say which it was; None where there is none."""
        with self._lock:
            for key in self._made:
                del self._made[key]
                self.counters.evictions += 1
                return key
            return None

    def clear(self) -> None:
        with self._lock:
            self._made.clear()

    def keys(self) -> list[K]:
        """The next to go first."""
        with self._lock:
            return list(self._made)

    def values(self) -> list[V]:
        """The next to go first."""
        with self._lock:
            return list(self._made.values())

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._made

    def __len__(self) -> int:
        return len(self._made)
