"""Caches of compiled graphs by the caller's key: one per key, or one per bucket of keys with padded inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from strata.arguments import public
from strata.core import Counters, Table, here
from strata.errors import OptionError, ShapeError
from strata.kinds import shown
from strata.runtime.compile.device import Device
from strata.runtime.compile.options import CompileOptions
from strata.runtime.execute.compiled import CompiledGraph
from strata.runtime.execute.padding import Padding, row_mask
from strata.runtime.execute.session import Session

Build = Callable[[], Any]
Padded = tuple[int, tuple[np.ndarray, ...]]


@public
class CompileCache:
    """Compiled graphs by key, at most `capacity` of them. Equal keys with other options are other entries."""

    def __init__(
        self,
        device: str | Device | None = None,
        capacity: int = 8,
        policy: str = "lru",
        options: CompileOptions | None = None,
    ) -> None:
        self.session = Session(device, options)
        self._entries: Table[Any, CompiledGraph] = Table("compiled", capacity, policy)

    def get_or_compile(self, key: Hashable, build: Build, options: CompileOptions | None = None) -> CompiledGraph:
        """The graph of a key; `build()` gives the program and runs on a miss only. Its parameters stay with it."""
        if not callable(build):
            raise OptionError(f"get_or_compile: build is a function, got {build!r}", code="O412", place=here())
        chosen = self.session.chosen(options)
        name = key, self.session.entry_key(chosen)
        return self._entries.get_or_make(name, lambda: self.session.compile(build(), chosen))

    get_or_compile_with_options = get_or_compile

    def contains(self, key: Hashable, options: CompileOptions | None = None) -> bool:
        """Whether a key is there; does not count as a use."""
        return (key, self.session.entry_key(self.session.chosen(options))) in self._entries

    __contains__ = contains

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_empty(self) -> bool:
        return len(self) == 0

    @property
    def capacity(self) -> int | None:
        return self._entries.capacity

    @property
    def counters(self) -> Counters:
        """Hits, misses and evictions so far."""
        return self._entries.counters


@public
class BucketedCompileCache:
    """One compiled graph per range of keys, made for the largest key of the range when the range is first used."""

    def __init__(
        self,
        device: str | Device | None,
        ranges: Sequence[range | tuple[int, int]],
        options: CompileOptions | None = None,
    ) -> None:
        self.session = Session(device, options)
        self._ranges = _checked_ranges(ranges)
        self._entries: Table[Any, CompiledGraph] = Table("buckets")
        self._paddings: Table[Any, Padding] = Table("paddings")

    @classmethod
    def power_of_two_ladder(
        cls, device: str | Device | None, min: int, max: int, options: CompileOptions | None = None
    ) -> BucketedCompileCache:
        """Buckets that end at powers of two, from the first that holds `min` to the first that holds `max`."""
        if min < 1 or max < min:
            raise OptionError(
                f"a ladder goes from at least 1 up to at least its start, got {min} to {max}", code="O407", place=here()
            )
        extent = 1 << (min - 1).bit_length()
        ranges = [range(1, extent + 1)]
        while extent < max:
            ranges.append(range(extent + 1, 2 * extent + 1))
            extent *= 2
        return cls(device, ranges, options)

    def bucket_for(self, key: int) -> int | None:
        """The number of the bucket that holds a key."""
        return next((i for i, r in enumerate(self._ranges) if r.start <= key < r.stop), None)

    def get_or_compile(
        self, key: int, build: Callable[[int], Any], options: CompileOptions | None = None
    ) -> tuple[int, CompiledGraph] | None:
        """(largest key of the bucket, its graph), or None outside all; `build(largest)` runs once a bucket."""
        return self.ensure_graph_with_params(key, lambda upper: (build(upper), {}), options)

    get_or_compile_with_options = get_or_compile_hir = get_or_compile_hir_with_options = get_or_compile

    def ensure_graph_with_params(
        self, key: int, build: Callable[[int], tuple[Any, Mapping[str, Any]]], options: CompileOptions | None = None
    ) -> tuple[int, CompiledGraph] | None:
        """The same, with a `build` that gives the program and its parameters."""
        at = self.bucket_for(key)
        if at is None:
            return None
        upper = self._ranges[at].stop - 1
        chosen = self.session.chosen(options)

        def make() -> CompiledGraph:
            made = build(upper)
            if not isinstance(made, tuple) or len(made) != 2:
                raise OptionError(
                    f"build gives a program and its parameters, got {shown(made)}", code="O412", place=here()
                )
            program, params = made
            compiled = self.session.compile(program, chosen)
            compiled.set_params(params)
            return compiled

        return upper, self._entries.get_or_make((at, self.session.entry_key(chosen)), make)

    ensure_hir_with_params = ensure_graph_with_params

    def run_padded(
        self,
        key: int,
        actual_rows: int,
        build: Callable[[int], Any],
        inputs: Mapping[str, Any] | Sequence[tuple[str, Any, int | None]],
        output_inners: Sequence[int] | None = None,
        *,
        mask: str | None = None,
    ) -> Padded | None:
        """Run a bucket's graph on fewer rows than it was made for: (largest key, outputs), or None outside all buckets.

        Inputs are padded with zeros along their first axis and outputs cut back to `actual_rows`; an output whose entry
        of `output_inners` is 0 is returned whole. Where an input or output has one axis of `upper` times `inner`
        elements, rows lie in it one after the other. An input given as (name, data, None) is not padded. A graph that
        mixes rows would see the padding, and is refused, unless `mask` names an input of it that tells rows from
        padding: it is filled with 1 and 0 (True and False), or, if it is a float, with the 0 and -1e9 that are added to
        scores.
        """
        found = self.get_or_compile(key, build)
        if found is None:
            return None
        upper, compiled = found
        given = [(n, d, 1) for n, d in inputs.items()] if isinstance(inputs, Mapping) else list(inputs)
        rows_of = {name: inner or 1 for name, _, inner in given if inner is not None}
        padding = self._padding(key, compiled, rows_of, upper)
        if mask is None:
            _require_rows(compiled, padding)
        feeds = {name: _padded_input(name, data, inner, upper, actual_rows, compiled) for name, data, inner in given}
        if mask is not None:
            feeds[mask] = row_mask(compiled, mask, actual_rows, upper)
        outputs = compiled.run(feeds)
        is_asked = output_inners is not None
        inners = output_inners if output_inners is not None else [1] * len(outputs)
        cut = [
            padding.cut(i, out, actual_rows, inners[i], asked=is_asked) if i < len(inners) and inners[i] else out
            for i, out in enumerate(outputs)
        ]
        return upper, tuple(cut)

    run_padded_mixed = run_padded

    def _padding(self, key: int, compiled: CompiledGraph, padded: Mapping[str, int], upper: int) -> Padding:
        """What padding some of the inputs does to a bucket's graph; found out once for each choice of them."""
        at = self.bucket_for(key)
        assert at is not None
        name = at, self.session.entry_key(self.session.options), tuple(sorted(padded.items()))
        return self._paddings.get_or_make(name, lambda: Padding(compiled, padded, upper))

    def buckets(self) -> list[range]:
        return list(self._ranges)

    def compiled_count(self) -> int:
        return len(self._entries)

    def total_buckets(self) -> int:
        return len(self._ranges)

    @property
    def counters(self) -> Counters:
        return self._entries.counters


def _require_rows(compiled: CompiledGraph, padding: Padding) -> None:
    if padding.obstacles:
        raise OptionError(
            f"run_padded: padding would change the results of {compiled.name!r}: {'; '.join(padding.obstacles[:3])}",
            code="O408", place=here(), fix="mask=, the name of an input that tells rows from padding",
        )  # fmt: skip


def _checked_ranges(ranges: Sequence[range | tuple[int, int]]) -> list[range]:
    try:
        made = [r if isinstance(r, range) else range(*r) for r in ranges]
    except TypeError:
        raise OptionError(f"buckets are ranges of keys, got {ranges!r}", code="O407", place=here()) from None
    if not made:
        raise OptionError("a bucketed cache needs at least one bucket", code="O407", place=here())
    for i, r in enumerate(made):
        if r.step != 1:
            raise OptionError(f"bucket {i} leaves out keys: {r}", code="O407", place=here())
        if r.stop <= r.start:
            raise OptionError(f"bucket {i} is empty: {r.start}..{r.stop}", code="O407", place=here())
        if i and r.start < made[i - 1].stop:
            before = made[i - 1]
            raise OptionError(
                f"buckets overlap or are not in order: {before.start}..{before.stop} and {r.start}..{r.stop}",
                code="O407",
                place=here(),
            )
    return made


def _padded_input(
    name: str, data: Any, inner: int | None, upper: int, actual: int, compiled: CompiledGraph
) -> np.ndarray:
    array = np.asarray(data)
    if inner is None:
        return array
    if inner < 0:
        raise ShapeError(f"run_padded: input {name!r} has no rows of {inner}", code="S402", place=here())
    kind = compiled.inputs.get(name)
    if kind is not None and array.ndim <= 2 and inner > 1 and kind.shape == (upper * inner,):
        if array.size != actual * inner:
            raise ShapeError(
                f"run_padded: input {name!r} has {array.size} elements, {actual} rows of {inner} were announced",
                code="S402", place=here(),
            )  # fmt: skip
        return pad_rows(array.reshape(-1).astype(kind.dtype.np, copy=False), inner, upper)
    if kind is not None and array.ndim == 1 and kind.ndim != 1:  # rows given one after the other
        array = array.reshape(-1, inner)
    if array.ndim == 0 or array.shape[0] != actual:
        rows = array.shape[0] if array.ndim else 0
        raise ShapeError(
            f"run_padded: input {name!r} has {rows} rows, {actual} were announced", code="S402", place=here()
        )
    if kind is not None and kind.dtype.np != array.dtype and isinstance(data, (list, tuple)):
        array = array.astype(kind.dtype.np)
    padded = pad_rows(array, None, upper)
    if kind is None or not kind.is_static or kind.shape[:1] != (upper,) or padded.size != kind.size:
        return padded
    return padded.reshape(kind.static_shape)


def pad_rows(data: Any, inner: int | None, upper: int) -> np.ndarray:
    """Rows followed by rows of zeros, `upper` in all. With `inner`, data is flat and a row has that many elements."""
    array = np.asarray(data)
    rows = _row_count(array, inner)
    if rows > upper:
        raise ShapeError(f"pad_rows: {rows} rows exceed upper {upper}", code="S402", place=here())
    extra = (upper - rows) * (inner or 1)
    return np.concatenate([array, np.zeros((extra, *array.shape[1:]), array.dtype)]) if extra else array


def slice_rows(data: Any, inner: int | None, actual: int) -> np.ndarray:
    """The first rows. With `inner`, data is flat and a row has that many elements."""
    array = np.asarray(data)
    rows = _row_count(array, inner)
    if not 0 <= actual <= rows:
        raise ShapeError(f"slice_rows: {actual} rows are asked for, there are {rows}", code="S402", place=here())
    return array[: actual * (inner or 1)]


def _row_count(array: np.ndarray, inner: int | None) -> int:
    if inner is None:
        return int(array.shape[0])
    if inner < 1 or array.ndim != 1 or array.shape[0] % inner:
        raise ShapeError(f"{array.size} elements are not rows of {inner}", code="S402", place=here())
    return int(array.shape[0]) // inner
