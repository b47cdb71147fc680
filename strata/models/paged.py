"""The paged KV cache: a pool of pages, a page table for each sequence, and the arrays that hold them."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from strata.backends import backend_for
from strata.core import Table
from strata.errors import OptionError
from strata.models.cached import PAGE, Layout, carried_names, pooled

if TYPE_CHECKING:
    from strata.models.generate import Decoder
    from strata.models.generating.prompts import SeenImages


MOST_PAGES = 1 << 24  # with their numbers in one list
LAYOUTS: Final[dict[int, Layout]] = {32: "paged", 16: "paged16", 8: "paged8"}  # by the bits of a number


class PagePool:
    """The pool of pages of a paged KV cache, lent lowest first: `tokens` tokens, `size` bytes each.

    A page that is kept under a key (`keep`) holds what others may need, too: `share` lends it once more. When nobody
    uses it any longer it waits for the next one, until its room is needed; the page unused for longest goes first.
    """

    def __init__(self, pages: int, *, tokens: int = PAGE, size: int = 0) -> None:
        if not 1 <= pages <= MOST_PAGES or tokens < 1 or size < 0:
            raise OptionError(f"pages: {pages} pages of {tokens} tokens and {size} bytes make no pool", code="O600")
        self.pages, self.tokens, self.size = pages, tokens, size
        self._free = list(range(pages))  # a heap
        self._uses: dict[int, int] = {}  # of the pages that are lent
        self._idle: Table[int, bytes] = Table("idle pages")  # kept, and used by nobody; with their keys
        self._keys: dict[int, bytes] = {}
        self._kept: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """The number of pages that can be lent, with those that are only kept."""
        return len(self._free) + len(self._idle)

    @property
    def kept(self) -> int:
        """The number of pages whose contents can be shared."""
        return len(self._kept)

    def take(self) -> int | None:
        """Borrow the lowest free page, or the one that is kept and unused for longest; None when there is none."""
        if self._free:
            page = heapq.heappop(self._free)
        elif (idle := self._idle.pop_next()) is not None:
            page = idle
            del self._kept[self._keys.pop(page)]
        else:
            return None
        self._uses[page] = 1
        return page

    def keep(self, page: int, key: bytes) -> None:
        """Let others share a lent page under a key, which says what is in it; the first page of a key stays."""
        if page in self._uses and page not in self._keys and key not in self._kept:
            self._keys[page], self._kept[key] = key, page

    def share(self, key: bytes) -> int | None:
        """Borrow the page that is kept under a key; None where there is none."""
        page = self._kept.get(key)
        if page is not None:
            self._idle.pop(page)
            self._uses[page] = self._uses.get(page, 0) + 1
        return page

    def give_back(self, pages: Iterable[int]) -> None:
        """Return pages to the pool."""
        for page in pages:
            if page not in self._uses:
                raise OptionError(f"pages: {page} is given back and was not lent", code="O601")
            self._uses[page] -= 1
            if self._uses[page]:
                continue
            del self._uses[page]
            if page in self._keys:
                self._idle.put(page, self._keys[page])
            else:
                heapq.heappush(self._free, page)

    def offset(self, page: int) -> int:
        """The offset of a page in bytes."""
        if not 0 <= page < self.pages:
            raise OptionError(f"pages: {page} is not one of {self.pages} pages", code="O601")
        return page * self.size


class PageTable:
    """The page table of one sequence: its pages in order, of which `length` tokens are in use."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.length = 0
        self.state: dict[str, np.ndarray] = {}  # of layers without a KV cache, [1, ...]
        self.seen: SeenImages | None = None  # what tokens of the prompt show

    @property
    def capacity(self) -> int:
        return len(self.pages) * self.pool.tokens

    def reserve(self, tokens: int) -> bool:
        """Reserve pages for so many tokens in all; False, and nothing taken, where too few are free."""
        missing = -(-(tokens - self.capacity) // self.pool.tokens)
        if missing > self.pool.free:
            return False
        for _ in range(missing):
            page = self.pool.take()
            assert page is not None
            self.pages.append(page)
        return True

    def adopt(self, key: bytes) -> bool:
        """Read the next page of the sequence from one that is kept under a key; False where there is none."""
        page = self.pool.share(key)
        if page is None:
            return False
        at = self.length // self.pool.tokens
        if at < len(self.pages):
            self.pool.give_back([self.pages[at]])
            self.pages[at] = page
        else:
            self.pages.append(page)
        self.length += self.pool.tokens
        return True

    def page_of(self, token: int) -> int:
        """The page that holds a token."""
        if not 0 <= token < self.capacity:
            raise OptionError(f"pages: token {token} is outside of a table for {self.capacity}", code="O601")
        return self.pages[token // self.pool.tokens]

    def rows(self, start: int, count: int) -> np.ndarray:
        """The rows of tokens in the arrays of pages, i64[count]."""
        at = np.arange(start, start + count)
        return np.asarray(self.pages, np.int64)[at // self.pool.tokens] * self.pool.tokens + at % self.pool.tokens

    def release(self) -> None:
        """Return all pages to the pool."""
        self.pool.give_back(reversed(self.pages))  # of those that are kept, the last one goes first
        self.pages, self.length, self.state = [], 0, {}


def page_bytes(model: Decoder, bits: int | None = None) -> int:
    """Bytes of one page of the KV cache: keys and values of all layers, in f32, in bf16 or in 8 bits."""
    bits = model.kv_bits if bits is None else bits
    return PAGE * sum(prod(shape) * kind.itemsize for shape, kind in pooled(model.config.slots, _layout(bits)).values())


def _layout(bits: int) -> Layout:
    if bits not in LAYOUTS:
        raise OptionError(f"pages: a KV cache has 8, 16 or 32 bits, got {bits!r}", code="O600")
    return LAYOUTS[bits]


class PagedCache:
    """The paged KV cache of many sequences of one model, and the step that reads and extends it.

    Its pages are in the memory of the model's device, where that has its own; in f32, in bf16 (`bits=16`), or in 8 bits
    (`bits=8`) with a scale for each token and head. Where `is_fed`, there are also steps that feed themselves
    (`models.generating.feeding`).
    """

    def __init__(self, model: Decoder, pages: int, *, bits: int | None = None) -> None:
        bits = model.kv_bits if bits is None else bits
        self.model, self.layout = model, _layout(bits)
        self.pool = PagePool(pages, size=page_bytes(model, bits))
        slots = model.config.slots
        home = backend_for(model.device).home
        self.is_fed = home is not None and not (model.has_state or model.sees or model.experts is not None)
        spare = 1 if self.is_fed else 0  # a page that nobody reads
        self.pools: dict[str, Any] = {}
        for name, (shape, kind) in pooled(slots, self.layout).items():
            whole = (pages + spare, PAGE, *shape)
            self.pools[name] = (
                np.zeros(whole, kind.np) if home is None else home.zeros(np.dtype(kind.np), whole, "KV cache")
            )
        self._blank = {s.name: np.zeros((1, *s.shape), np.float32) for s in slots if s.is_fixed}

    def table(self) -> PageTable:
        """The page table of a new sequence."""
        return PageTable(self.pool)

    def step(self, tables: Sequence[PageTable], ids: np.ndarray, *, every: bool = False) -> np.ndarray:
        """Logits f32[B, V], or with `every` f32[B, S, V], after new tokens i32[B, S], which enter the sequences."""
        count = ids.shape[1]
        short = next((t for t in tables if t.length + count > t.capacity), None)
        if short is not None:
            raise OptionError(
                f"pages: {short.length} tokens and {count} more do not fit a table for {short.capacity}", code="O602",
                fix="table.reserve(tokens)",
            )  # fmt: skip
        past = np.array([t.length for t in tables], np.int64)
        longest = -(-int(past.max() + count) // PAGE)
        pages = np.zeros((len(tables), longest), np.int64)  # page 0 stands where a table is shorter, and is not read
        for row, table in zip(pages, tables, strict=True):
            used = min(len(table.pages), longest)
            row[:used] = table.pages[:used]
        graph = self.model.graph_for(every=every, layout=self.layout)
        vocab = self.model.config.vocab
        logits = np.empty((*ids.shape, vocab) if every else (len(ids), vocab), np.float32)
        states = {name: np.concatenate([t.state.get(name, x) for t in tables]) for name, x in self._blank.items()}
        later = {name: np.empty_like(x) for name, x in states.items()}
        carried = {**self.pools, **later}
        results = [carried[name] for name in carried_names(self.model.config.slots, self.layout)]
        feeds = {"input_ids": ids, "past": past, "table": pages, **self.pools, **states}
        feeds |= self.model.seen_feeds([t.seen for t in tables], [t.length for t in tables], count)
        graph.run_into(feeds, [logits, *results])
        for name, rows in later.items():
            for i, table in enumerate(tables):
                table.state[name] = rows[i : i + 1]
        for table in tables:
            table.length += count
        return logits


def page_keys(ids: Sequence[int], adapter: str | None = None, seen: SeenImages | None = None) -> list[bytes]:
    """A key for each whole page of a prompt: the same for the same tokens, and images, behind the same beginning."""
    found: list[bytes] = []
    key = (adapter or "").encode()
    numbers = np.asarray(ids, np.int32)
    for at in range(0, len(ids) - PAGE + 1, PAGE):
        shown = b"" if seen is None else seen.digest(at, at + PAGE)
        key = hashlib.blake2b(key + numbers[at : at + PAGE].tobytes() + shown, digest_size=32).digest()
        found.append(key)
    return found
