"""The paged KV cache: a pool of pages, a page table for each sequence, and the arrays that hold them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from strata.errors import OptionError
from strata.models.cached import PAGE

if TYPE_CHECKING:
    from strata.models.generate import Decoder


MOST_PAGES = 1 << 24  # with their numbers in one list


class PagePool:
    """The pool of pages of a paged KV cache, lent lowest first: `tokens` tokens, `size` bytes each."""

    def __init__(self, pages: int, *, tokens: int = PAGE, size: int = 0) -> None:
        if not 1 <= pages <= MOST_PAGES or tokens < 1 or size < 0:
            raise OptionError(f"pages: {pages} pages of {tokens} tokens and {size} bytes make no pool", code="O600")
        self.pages, self.tokens, self.size = pages, tokens, size
        self._free = list(range(pages))  # a heap
        self._lent: set[int] = set()

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def take(self) -> int | None:
        """Borrow the lowest free page; None when there is none."""
        if not self._free:
            return None
        page = heapq.heappop(self._free)
        self._lent.add(page)
        return page

    def give_back(self, pages: Iterable[int]) -> None:
        """Return pages to the pool."""
        for page in pages:
            if page not in self._lent:
                raise OptionError(f"pages: {page} is given back and was not lent", code="O601")
            self._lent.remove(page)
            heapq.heappush(self._free, page)

    def offset(self, page: int) -> int:
        """The offset of a page in bytes."""
        if not 0 <= page < self.pages:
            raise OptionError(f"pages: {page} is none of {self.pages} pages", code="O601")
        return page * self.size


class PageTable:
    """The page table of one sequence: its pages in order, of which `length` tokens are in use."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.length = 0

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
        self.pool.give_back(self.pages)
        self.pages, self.length = [], 0


def page_bytes(model: Decoder) -> int:
    """Bytes of one page of the KV cache: keys and values of all layers."""
    c = model.config
    return PAGE * c.layers * 2 * c.kv_heads * c.head_dim * 4


class PagedCache:
    """The paged KV cache of many sequences of one model, and the step that reads and extends it."""

    def __init__(self, model: Decoder, pages: int) -> None:
        self.model = model
        self.pool = PagePool(pages, size=page_bytes(model))
        c = model.config
        shape = (pages, PAGE, c.kv_heads * c.head_dim)
        names = [f"{kind}{i}" for i in range(c.layers) for kind in ("keys", "values")]
        self._pools = {name: np.zeros(shape, np.float32) for name in names}

    def table(self) -> PageTable:
        """The page table of a new sequence."""
        return PageTable(self.pool)

    def step(self, tables: Sequence[PageTable], ids: np.ndarray) -> np.ndarray:
        """Logits f32[B, V] after new tokens i32[B, S], which enter the sequences of these tables."""
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
        graph = self.model.graph_for(every=False, layout="paged")
        logits, *new = graph.run({"input_ids": ids, "past": past, "table": pages, **self._pools})
        at = np.concatenate([t.rows(t.length, count) for t in tables])
        for cache, rows in zip(self._pools.values(), new, strict=True):
            cache.reshape(-1, cache.shape[2])[at] = rows.reshape(len(at), -1)
        for table in tables:
            table.length += count
        return logits
