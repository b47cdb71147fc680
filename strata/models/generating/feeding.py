"""Decode with a paged KV cache on a device: tokens are sampled there, and fed to the next step from there.

The host sends token ids of prompts, positions and page tables, and gets the chosen tokens; logits stay on the device
unless somebody asks for rows of them. Nothing waits for a step but who reads what it chose. So the next step can be
asked for before that: rows whose token the host does not know yet take it from their *slot*, where the last step left
it.

Sizes are rounded up to classes, so that few programs are recorded. Rows that fill a class up are in a slot and a page
that nobody reads; tokens behind the end of a prompt go to that page, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from strata.arguments import untouched
from strata.backends import backend_for
from strata.models.cached import PAGE, ROW, Layout, carried_names
from strata.models.generating.choosing import DRAW, Chooser

if TYPE_CHECKING:
    from strata.models.paged import PagedCache, PageTable

FED: Final[dict[Layout, Layout]] = {"paged": "fed", "paged8": "fed8", "paged16": "fed16"}
UNKNOWN: Final = -1  # a token that is on the device only
LEAST_PAGES: Final = 64  # of a page table, or as many as the context has
LEAST_TOKENS: Final = 16  # of a padded prompt
ROW_CLASSES: Final = (
    1,
    8,
    32,
    64,
)  # more rows than the last are a multiple of it: a tile of a matmul has so many anyway
PROMPT_ROWS: Final = (1, 4, 16)  # prompts that are read together
MOST_PROMPT_TOKENS: Final = 4096  # of several prompts that are read together, with what they are padded by
RECORDED: Final = 2  # runs of a size after which it is recorded
RECORDED_TOKENS: Final = 1024  # of a prompt, at most, when an engine is made ready
ONE_TOKEN: Final = (("S", 1),)


@untouched
@dataclass(frozen=True, slots=True)
class TokenDraw:
    """How a token is drawn on the device: by a random number in 0..1 from the tokens that are likely enough."""

    temperature: float
    min_p: float
    number: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def filters(self) -> bool:
        """Whether more than its own logit decides if a token is kept."""
        return self.top_k > 0 or self.top_p < 1.0


@untouched
@dataclass(slots=True)
class FedRow:
    """A sequence in a step: its new tokens, and the slot that its next one goes to; None where none is wanted."""

    table: PageTable
    slot: int | None
    ids: Sequence[int]  # nothing: the one token that is in the slot
    draw: TokenDraw | None = None  # None: the likeliest one


@untouched
class Chosen:
    """What a step chose, which may not be there yet; its logits are, until the next step."""

    def __init__(self, steps: FedSteps, rows: int, wait: Callable[[], np.ndarray]) -> None:
        self._steps, self._rows, self._wait = steps, rows, wait
        self._found: np.ndarray | None = None

    def tokens(self) -> np.ndarray:
        """A token for each row, i32[B]; -1 where the largest logit is none. Waits for the step."""
        if self._found is None:
            self._found = self._wait()[: self._rows]
        return self._found

    def logits(self, rows: Sequence[int]) -> np.ndarray:
        """The logits of some rows, f32[n, V]; only before the next step is asked for."""
        return self._steps.logits_of(rows)


@untouched
class FedSteps:
    """The steps of one paged KV cache, for sequences in so many slots."""

    def __init__(self, cache: PagedCache, slots: int) -> None:
        self.cache, self.model, self.slots = cache, cache.model, slots
        self.layout = FED[cache.layout]
        home = backend_for(self.model.device).home
        assert home is not None
        self._home: Any = home
        self._spare = cache.pool.pages  # the page that nobody reads
        self._tokens: Any = home.zeros(np.dtype(np.int32), (slots + 1, 1, 1), "KV cache")
        self._most = table_class(-(-self.model.context // PAGE) + 1)  # pages of a table, with a spare one behind them
        self._least = min(LEAST_PAGES, self._most)
        self._tables = np.full((slots + 1, self._most), self._spare, np.int64)  # by slot, as they were sent last
        self._sent = [0] * (slots + 1)  # pages of each that are in there
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[str, Any] = {}  # arrays on the device that steps use again
        self._chooser = Chooser(self.model.device)
        self._logits: Any = None  # of the last step

    # slots

    def take_slot(self) -> int:
        """A slot for a sequence, until it is given back."""
        return self._free.pop()

    def give_slot(self, slot: int) -> None:
        self._free.append(slot)
        self._sent[slot] = 0

    # steps

    def warm_up(self, requests: int) -> None:
        """Compile and load what steps of up to so many requests need; where a device records what comes again, steps
        of the usual sizes are recorded: of rows that nobody reads."""
        for sizes in ((), ONE_TOKEN):
            self.model.graph_for(every=False, layout=self.layout, sizes=sizes)
        self._chooser.graph(draws=False)
        if not self._home.records:
            return
        for rows in sorted({row_class(n) for n in range(1, requests + 1)}):
            for _ in range(RECORDED):
                self._decode_rows((), rows)
        for tokens in sorted({prompt_class(n) for n in range(1, min(RECORDED_TOKENS, self.model.context) + 1)}):
            for _ in range(RECORDED):
                self.prefill([FedRow(self.cache.table(), None, [0] * min(tokens, self.model.context))])

    def decode(self, rows: Sequence[FedRow]) -> Chosen:
        """One token of each sequence; a sequence is in a slot of its own."""
        return self._decode_rows(rows, row_class(len(rows)))

    def _decode_rows(self, rows: Sequence[FedRow], count: int) -> Chosen:
        slots = np.full(count, self.slots, np.int64)
        numbers = np.zeros((count, len(ROW)), np.int64)
        ids = np.zeros((count, 1), np.int32)
        longest = 1
        for at, row in enumerate(rows):
            table, slot = row.table, row.slot
            assert slot is not None
            slots[at] = slot
            numbers[at, 1] = length = table.length
            ids[at, 0] = row.ids[0] if row.ids else UNKNOWN
            longest = max(longest, length // PAGE + 1)
            if len(table.pages) != self._sent[slot]:
                self._send(slot, table)
            table.length = length + 1
        numbers[:, 0] = slots
        return self._step(rows, ids, numbers, self._tables[slots, : max(self._least, table_class(longest))], ONE_TOKEN)

    def prefill(self, rows: Sequence[FedRow]) -> Chosen:
        """Tokens of prompts; those that are shorter than the longest are padded."""
        count = prompt_class(max(len(row.ids) for row in rows))
        batch = next(n for n in PROMPT_ROWS if len(rows) <= n)
        numbers = np.zeros((batch, len(ROW)), np.int64)
        numbers[:, 0] = self.slots
        ids = np.zeros((batch, count), np.int32)
        pages = np.full((batch, self._most), self._spare, np.int64)  # tokens behind a table go to its last page
        for at, row in enumerate(rows):
            table, new = row.table, row.ids
            numbers[at] = (self.slots if row.slot is None else row.slot, table.length, len(new) - 1)
            ids[at, : len(new)] = new
            pages[at, : len(table.pages)] = table.pages
            table.length += len(new)
        return self._step(rows, ids, numbers, pages, ())

    def _send(self, slot: int, table: PageTable) -> None:
        """Let the table of a slot be what it is by now."""
        count, sent = len(table.pages), self._sent[slot]
        if not sent or sent > count:
            sent = 0
            self._tables[slot] = self._spare
        self._tables[slot, sent:count] = table.pages[sent:]
        self._sent[slot] = count

    def _step(
        self, rows: Sequence[FedRow], ids: np.ndarray, numbers: np.ndarray, pages: np.ndarray, sizes: Any
    ) -> Chosen:
        graph = self.model.graph_for(every=False, layout=self.layout, sizes=sizes)
        pools = self.cache.pools
        sent = self._up("rows", numbers)
        feeds = {
            "input_ids": self._up("input_ids", ids), "rows": sent, "tokens": self._tokens,
            "table": self._up("table", pages), **pools,
        }  # fmt: skip
        logits = self._logits = self._room("logits", np.float32, (len(ids), self.model.config.vocab))
        results = [pools[name] for name in carried_names(self.model.config.slots, self.layout)]
        graph.run_into(feeds, [logits, *results])
        return Chosen(self, len(rows), self._choose(rows, logits, sent))

    def _choose(self, rows: Sequence[FedRow], logits: Any, sent: Any) -> Callable[[], np.ndarray]:
        draws = any(row.draw is not None for row in rows)
        count = logits.shape[0]
        feeds = {"logits": logits, "rows": sent, "tokens": self._tokens}
        if draws:
            how = np.zeros((count, len(DRAW)))
            how[:, DRAW.index("top_p")] = 1.0
            for at, row in enumerate(rows):
                if row.draw is not None:
                    how[at] = [getattr(row.draw, name) for name in DRAW]
            feeds["draws"] = self._up("draws", how)
        chosen = self._room("chosen", np.int32, (count,))
        filters = any(row.draw is not None and row.draw.filters for row in rows)
        self._chooser.graph(draws=draws, filters=filters).run_into(feeds, [chosen, self._tokens])
        found: Callable[[], np.ndarray] = self._home.later(chosen)
        return found

    def logits_of(self, rows: Sequence[int]) -> np.ndarray:
        """Rows of the last step's logits."""
        count = row_class(len(rows))
        which = np.zeros(count, np.int64)
        which[: len(rows)] = rows
        (found,) = self._chooser.rows.run({"logits": self._logits, "which": self._home.upload(which)})
        return np.asarray(found)[: len(rows)]

    # memory

    def _room(self, name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
        """An array on the device, in memory that the last step used under this name."""
        size = int(np.prod(shape))
        held = self._held.get(name)
        if held is None or held.size < size:
            held = self._held[name] = self._home.empty(np.dtype(dtype), (size,), "serving")
        return held.front(shape)

    def _up(self, name: str, array: np.ndarray) -> Any:
        made = self._room(name, array.dtype, array.shape)
        self._home.write(made, array)
        return made


def row_class(count: int) -> int:
    """As many rows or some more, which cost little."""
    most = ROW_CLASSES[-1]
    return next((n for n in ROW_CLASSES if count <= n), -(-count // most) * most)


@untouched
def prompt_rows(count: int, tokens: int) -> int:
    """Of so many prompts of about so many tokens, how many are read together next."""
    fits = [n for n in PROMPT_ROWS if n * prompt_class(tokens) <= MOST_PROMPT_TOKENS and 2 * count > n] or [1]
    return min(count, fits[-1])


def table_class(pages: int) -> int:
    """As many pages or up to twice as many."""
    return 1 << (pages - 1).bit_length()


@untouched
def prompt_class(tokens: int) -> int:
    """As many tokens or up to half as many more: powers of two, and halfway between."""
    whole = max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())
    return whole * 3 // 4 if tokens <= whole * 3 // 4 and whole > 2 * LEAST_TOKENS else whole
