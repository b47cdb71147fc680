"""The engine of encoder-decoders: a source encoded once, then tokens a step at a time, greedy, drawn or by beams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strata.errors import OptionError
from strata.models.base import Model, compile_built
from strata.models.generate import FIRST_CAPACITY
from strata.models.sampling import Sampler
from strata.models.seq2seq.beams import MOST_TEXTS, beam_search, trimmed
from strata.models.seq2seq.graphs import CrossSizes
from strata.models.seq2seq.rules import TokenRules
from strata.models.tokenizer import TextModel, Tokenizer
from strata.models.weights import WeightBuilder
from strata.runtime import CompiledGraph

TOKENS = 128  # that are made where neither the call nor the folder says how many
Encoder = Callable[[], WeightBuilder]
Decoder = Callable[..., WeightBuilder]


@dataclass
class CrossState:
    """What a decoder remembers: its KV cache, of which `length` rows are in use, and the source's keys and values."""

    caches: list[np.ndarray]
    source: dict[str, np.ndarray]
    length: int = 0
    feeds: dict[str, Any] = field(default_factory=dict)


class EncoderDecoder(TextModel, Model):
    """A model that reads a source and makes tokens. `encoder` and `decoder(every=…)` build its two graphs.

    The encoder's results are its states, then keys and values of the source for every layer of the decoder.
    """

    outputs = ("logits", "encoder_last_hidden_state")

    def __init__(
        self, sizes: CrossSizes, encoder: Encoder, decoder: Decoder, rules: TokenRules,
        tokenizer: Callable[[], Tokenizer], *, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.sizes, self.rules, self.device = sizes, rules, device
        self._build_encoder, self._build_decoder = encoder, decoder
        self._make_tokenizer = tokenizer
        self._graphs: dict[str, CompiledGraph] = {}
        self._built: dict[str, WeightBuilder] = {}  # graphs that were built to check the weights

    @property
    def graph(self) -> CompiledGraph:  # type: ignore[override]
        return self.decoder_graph(every=False)

    @property
    def encoder_graph(self) -> CompiledGraph:
        if "encoder" not in self._graphs:
            built = self._built.pop("encoder", None) or self._build_encoder()
            self._graphs["encoder"] = compile_built(built, self.device)
        return self._graphs["encoder"]

    def decoder_graph(self, *, every: bool) -> CompiledGraph:
        """The compiled decoder: of the last token's logits, or of every token's."""
        key = "every" if every else "last"
        if key not in self._graphs:
            built = self._built.pop(key, None) or self._build_decoder(every=every)
            self._graphs[key] = compile_built(built, self.device)
        return self._graphs[key]

    def check(self) -> None:
        """Refuse weights that are not those of the configuration."""
        self._built = {"encoder": self._build_encoder(), "last": self._build_decoder(every=False)}
        for builder in self._built.values():
            builder.check()

    # ---------------------------------------------------------------------------------------------------------- steps

    def start(self, source: dict[str, np.ndarray], capacity: int = FIRST_CAPACITY) -> CrossState:
        """An empty state over an encoded source."""
        batch = len(next(iter(source.values())))
        shape = (batch, min(capacity, self.sizes.positions), self.sizes.cache.width)
        return CrossState([np.zeros(shape, np.float32) for _ in range(2 * self.sizes.cache.layers)], source)

    def encode(self, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The encoder's states, and the source as the decoder reads it."""
        states, *memory = self.encoder_graph.run(feeds)
        names = [f"cross_{kind}{i}" for i in range(self.sizes.cache.layers) for kind in ("keys", "values")]
        source = dict(zip(names, memory, strict=True))
        if self.sizes.has_mask:
            source["memory_mask"] = feeds["attention_mask"]
        return states, source

    def step(self, state: CrossState, ids: np.ndarray, *, every: bool = False) -> np.ndarray:
        """Logits after new tokens i32[B, S], which enter the state: f32[B, V], or with `every` f32[B, S, V]."""
        batch, count = ids.shape
        rows = state.length + count
        if rows > self.sizes.positions:
            raise OptionError(
                f"generate: {rows} tokens are more than the {self.sizes.positions} that the decoder has positions for",
                code="O264",
            )
        if rows > state.caches[0].shape[1]:
            self._grow(state, rows)
        if not state.feeds:
            names = [f"{kind}{i}" for i in range(self.sizes.cache.layers) for kind in ("keys", "values")]
            state.feeds = {**dict(zip(names, state.caches, strict=True)), **state.source}
        logits = np.empty((batch, count, self.sizes.vocab) if every else (batch, self.sizes.vocab), np.float32)
        feeds = {"input_ids": ids, "past": np.array([state.length], np.int64), **state.feeds}
        self.decoder_graph(every=every).run_into(feeds, [logits, *state.caches])
        state.length = rows
        return logits

    def _grow(self, state: CrossState, rows: int) -> None:
        size = min(max(2 * state.caches[0].shape[1], rows), self.sizes.positions)
        for i, old in enumerate(state.caches):
            grown = np.zeros((old.shape[0], size, old.shape[2]), np.float32)
            grown[:, : state.length] = old[:, : state.length]
            state.caches[i] = grown
        state.feeds = {}

    def reorder(self, state: CrossState, rows: np.ndarray) -> None:
        """Go on with these rows of the KV cache, in this order; the source of each beam stays its own."""
        used = state.length
        for cache in state.caches:
            cache[:, :used] = cache[rows, :used]

    def _decoded(self, states: np.ndarray, source: dict[str, np.ndarray], ids: Any) -> dict[str, np.ndarray]:
        made = np.ascontiguousarray(ids, np.int32)
        logits = self.step(self.start(source, made.shape[1]), made, every=True)
        return {"logits": logits, "encoder_last_hidden_state": states}

    # ----------------------------------------------------------------------------------------------------- generation

    def tokens(
        self, source: dict[str, np.ndarray], max_tokens: int, sampler: Sampler, rules: TokenRules
    ) -> Iterator[list[int | None]]:
        """New tokens of every row, a step at a time; None for a row that has ended."""
        count = len(next(iter(source.values())))
        most = min(max_tokens, self.sizes.positions - len(rules.start))
        state = self.start(source, min(len(rules.start) + most, FIRST_CAPACITY))
        numbers = [sampler.stream() for _ in range(count)]
        made: list[list[int]] = [[] for _ in range(count)]
        live = [True] * count
        logits = self.step(state, np.tile(np.asarray(rules.start, np.int32), (count, 1)))
        for i in range(most):
            found: list[int | None] = [None] * count
            last = np.zeros((count, 1), np.int32)
            for n in (n for n in range(count) if live[n]):
                allowed = rules.allowed(logits[n], rules.start, made[n], most)
                token = sampler.choose(allowed, [*rules.start, *made[n]], numbers[n], start=len(rules.start))
                live[n] = token not in rules.ends
                if live[n]:
                    found[n], last[n] = token, token
                    made[n].append(token)
            if not any(live):
                return
            yield found
            if i + 1 < most:
                logits = self.step(state, last)

    def beam_tokens(
        self, source: dict[str, np.ndarray], max_tokens: int, rules: TokenRules, beams: int
    ) -> list[list[int]]:
        """The best tokens of every row that a beam search finds, without their end."""
        count = len(next(iter(source.values())))
        most = min(max_tokens, self.sizes.positions - len(rules.start))
        wide = {name: np.repeat(array, beams, axis=0) for name, array in source.items()}
        state = self.start(wide, min(len(rules.start) + most, FIRST_CAPACITY))
        logits = self.step(state, np.tile(np.asarray(rules.start, np.int32), (count * beams, 1)))

        def step(rows: np.ndarray, last: np.ndarray) -> np.ndarray:
            self.reorder(state, rows)
            return self.step(state, last)

        found = beam_search(logits, step, rules, count, most, beams)
        return [trimmed(texts[0], rules.ends) for texts in found]

    def _made(
        self, source: dict[str, np.ndarray], max_tokens: int | None, beams: int | None, sampler: Sampler,
        rules: TokenRules,
    ) -> list[list[int]]:  # fmt: skip
        most = (rules.max_tokens or TOKENS) if max_tokens is None else max_tokens
        count = rules.beams if beams is None else beams
        if most < 1 or count < 1:
            raise OptionError(f"generate: max_tokens = {most} and beams = {count} are not positive", code="O236")
        if count > MOST_TEXTS:
            raise OptionError(f"generate: beams={count}, {MOST_TEXTS} is the most", code="O236")
        if count > 1:
            if sampler.temperature > 0:
                raise OptionError("generate: a beam search draws no tokens; give a temperature or beams", code="O236")
            return self.beam_tokens(source, most, rules.with_penalties(sampler.penalised), count)
        made: list[list[int]] = [[] for _ in next(iter(source.values()))]
        for row in self.tokens(source, most, sampler, rules):
            for kept, token in zip(made, row, strict=True):
                if token is not None:
                    kept.append(token)
        return made
