"""Text generation: prefill of the prompt, then decode a token at a time, with the KV cache written in place."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strata.arguments import own_checks
from strata.errors import OptionError, UnknownNameError
from strata.models.adapters import AdapterSet, load_adapter, turned_rows
from strata.models.base import Model, compile_built
from strata.models.cached import PAGE, Layout
from strata.models.paged import PagedCache
from strata.models.sampling import Sampler
from strata.models.speculative import drafted_tokens
from strata.models.speech import said
from strata.models.tokenizer import Tokenizer
from strata.runtime import CompiledGraph

CONTEXT = 8192  # tokens that are planned for where a model could take more
FIRST_CAPACITY = 256  # rows of a new cache; it doubles when it is full
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass
class DecodeState:
    """What a decoder remembers of one sequence: its KV cache, of which `length` rows are in use."""

    caches: list[np.ndarray]
    length: int = 0
    feeds: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        return self.caches[0].shape[1]


class Decoder(Model):
    """A text generator. `graph_for(every)` builds its graph; `generate` runs it."""

    def __init__(
        self, config: Any, build: Callable[..., Any], tokenizer: Callable[[], Tokenizer], *, device: str = "cpu",
        context: int | None = None,
    ) -> None:  # fmt: skip
        self.config, self.device = config, device
        self.context = min(context or CONTEXT, config.positions)
        self._build = build
        self._make_tokenizer = tokenizer
        self._tokenizer: Tokenizer | None = None
        self._graphs: dict[tuple[bool, Layout], CompiledGraph] = {}
        self._adapters: AdapterSet | None = None
        self.is_quantized = False  # some weights are blocks, whose matmuls with few rows and with many differ in bits

    outputs = ("logits",)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    @property
    def graph(self) -> CompiledGraph:  # type: ignore[override]
        return self.graph_for(every=False)

    @property
    def inputs(self) -> dict[str, str]:
        return {"input_ids": "i32[B, S]"}

    def graph_for(self, *, every: bool, layout: Layout = "plain") -> CompiledGraph:
        """The compiled graph: of the last token's logits, or of every token's; with caches of this layout."""
        key = every, layout
        if key not in self._graphs:
            kinds = {} if layout == "plain" else {"layout": layout}
            builder = self._build(self.context, every=every, **kinds)
            if self._adapters is not None:
                if builder.changes:
                    raise OptionError("adapters: the model has one that is kept apart already", code="O611")
                builder.changes = self._adapters.blank
            builder.build()
            if self._adapters is not None:
                self._adapters.check(builder.weights, builder.bound)
                builder.bound |= self._adapters.values()
            self._graphs[key] = compile_built(builder, self.device)
        return self._graphs[key]

    def adapted(self, adapters: Mapping[str, str | os.PathLike[str]]) -> Decoder:
        """This model with LoRA adapters, folders by name, of which `use_adapter` chooses one at a time."""
        found = {name: load_adapter(folder) for name, folder in adapters.items()}
        if getattr(self.config, "interleaved", False):
            heads = {"q_proj": self.config.heads, "k_proj": self.config.kv_heads}
            found = {name: turned_rows(adapter, heads) for name, adapter in found.items()}
        made = Decoder(self.config, self._build, lambda: self.tokenizer, device=self.device, context=self.context)
        made._adapters = AdapterSet(found)
        made.is_quantized = self.is_quantized
        return made

    def use_adapter(self, name: str | None) -> None:
        """Answer as this adapter from now on; None is the model itself."""
        known = self._adapters
        if known is None or (name is not None and name not in known.names):
            names = ", ".join(known.names) if known is not None else "none"
            raise UnknownNameError(f"there is no adapter {name!r}; there are {names}", code="N600")
        if name != known.active:
            known.active = name
            values = known.values()
            for graph in self._graphs.values():
                graph.set_params(values)

    # ------------------------------------------------------------------------------------------------------ one step

    def start(self, batch: int = 1, capacity: int = FIRST_CAPACITY) -> DecodeState:
        """An empty state."""
        shape = (batch, min(capacity, self.context), self.config.kv_heads * self.config.head_dim)
        return DecodeState([np.zeros(shape, np.float32) for _ in range(2 * self.config.layers)])

    def step(self, state: DecodeState, ids: np.ndarray, *, every: bool = False) -> np.ndarray:
        """Logits after new tokens i32[B, S], which enter the state: f32[B, V], or with `every` f32[B, S, V]."""
        batch, count = ids.shape
        self._check_room(state.length + count)
        self._reserve(state, state.length + count)
        if not state.feeds:
            names = [f"{kind}{i}" for i in range(self.config.layers) for kind in ("keys", "values")]
            state.feeds = dict(zip(names, state.caches, strict=True))
        shape = (batch, count, self.config.vocab) if every else (batch, self.config.vocab)
        logits = np.empty(shape, np.float32)
        feeds = {"input_ids": ids, "past": np.array([state.length], np.int64), **state.feeds}
        self.graph_for(every=every).run_into(feeds, [logits, *state.caches])
        state.length += count
        return logits

    def _check_room(self, tokens: int) -> None:
        if tokens > self.context:
            raise OptionError(
                f"generate: {tokens} tokens are more than the context of {self.context}", code="O264",
                fix="load(path, context=…)",
            )  # fmt: skip

    def _reserve(self, state: DecodeState, rows: int) -> None:
        if rows <= state.capacity:
            return
        size = state.capacity
        while size < rows:
            size *= 2
        size = min(size, self.context)
        for i, old in enumerate(state.caches):
            state.caches[i] = np.zeros((old.shape[0], size, old.shape[2]), np.float32)
            state.caches[i][:, : state.length] = old[:, : state.length]
        state.feeds = {}

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Logits of every position: `run(input_ids=…)["logits"]` is f32[B, S, V]."""
        if set(arrays) != {"input_ids"}:
            raise OptionError(f"run: takes input_ids, got {', '.join(sorted(arrays)) or 'nothing'}", code="O265")
        ids = np.ascontiguousarray(arrays["input_ids"], np.int32)
        return {"logits": self.step(self.start(len(ids), ids.shape[1]), ids, every=True)}

    # ---------------------------------------------------------------------------------------------------- generation

    @own_checks()
    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Ids of a text, of chat messages by the model's template, or as they are."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return self.tokenizer.encode(self.tokenizer.chat(prompt), add_special=False)  # type: ignore[arg-type]
        try:
            return [operator.index(i) for i in prompt]  # type: ignore[arg-type]
        except TypeError:
            kind = type(prompt).__name__
            raise OptionError(f"generate: a prompt is a text, messages or token ids, got {kind}", code="O606") from None

    def tokens(
        self,
        ids: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        ends: Sequence[int] = (),
        state: DecodeState | None = None,
    ) -> Iterator[int]:
        """New tokens, one by one, up to one of `ends`, which is not given."""
        if not ids:
            raise OptionError("generate: the prompt is empty", code="O266")
        state = state or self.start(capacity=max(FIRST_CAPACITY, _whole(len(ids) + min(max_tokens, 64))))
        numbers, before = sampler.stream(), list(ids)
        logits = self.step(state, np.asarray([ids], np.int32))[0]
        for i in range(max_tokens):
            token = sampler.choose(logits, before, numbers)
            if token in ends:
                return
            yield token
            before.append(token)
            if i + 1 == max_tokens or state.length >= self.context:
                return
            logits = self.step(state, np.array([[token]], np.int32))[0]

    def token_rows(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampler: Sampler, ends: Sequence[int] = ()
    ) -> Iterator[list[int | None]]:
        """New tokens of many prompts of any lengths, a step at a time; None for a prompt that has ended.

        Each prompt goes through the graph alone, unpadded; then all that have not ended take steps together.
        """
        if not all(prompts):
            raise OptionError("generate: a prompt is empty", code="O266")
        for ids in prompts:
            self._check_room(len(ids))
        if not prompts or max_tokens < 1:
            return
        rows = [min(len(ids) + max_tokens, self.context) for ids in prompts]
        cache = PagedCache(self, sum(-(-n // PAGE) for n in rows))
        tables = [cache.table() for _ in prompts]
        for table, n in zip(tables, rows, strict=True):
            table.reserve(n)
        logits = [cache.step([t], np.asarray([ids], np.int32))[0] for t, ids in zip(tables, prompts, strict=True)]
        live = list(range(len(prompts)))
        numbers, before = [sampler.stream() for _ in prompts], [list(ids) for ids in prompts]
        for count in range(1, max_tokens + 1):
            found: list[int | None] = [None] * len(prompts)
            for i, x in zip(live, logits, strict=True):
                token = sampler.choose(x, before[i], numbers[i])
                if token not in ends:
                    found[i] = token
                    before[i].append(token)
            if all(token is None for token in found):
                return
            yield found
            live = [i for i in live if found[i] is not None and tables[i].length < self.context]
            if count == max_tokens or not live:
                return
            last = np.array([[before[i][-1]] for i in live], np.int32)
            logits = list(cache.step([tables[i] for i in live], last))

    def generate_many(
        self, prompts: Sequence[Prompt], *, max_tokens: int = 128, temperature: float = 0.0, top_k: int = 0,
        top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> list[str]:  # fmt: skip
        """Generate from prompts of any lengths in one batch; each text is what `generate` gives for it alone."""
        sampler = Sampler(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            seed=seed,
        )  # fmt: skip
        tokens: list[list[int]] = [[] for _ in prompts]
        for row in self.token_rows([self.prompt_ids(p) for p in prompts], max_tokens, sampler, self.tokenizer.eos):
            for kept, token in zip(tokens, row, strict=True):
                if token is not None:
                    kept.append(token)
        return ["".join(said(ids, self.tokenizer, stop)) for ids in tokens]

    def generate(
        self, prompt: Prompt, *, max_tokens: int = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int | None = None, stop: str | Sequence[str] = (),
        stream: bool = False, draft: Decoder | None = None, draft_tokens: int | None = None,
    ) -> Any:  # fmt: skip
        """Generate text from a prompt (a text, chat messages or ids); with `stream`, an iterator of its pieces.

        `draft` is a smaller model with the same tokenizer, for speculative decoding: it drafts `draft_tokens` at a
        time, by default as many as are verified in one step. This model accepts them or not: the text comes faster and
        is this model's own, the same at a temperature of 0, and of the same distribution above.
        """
        sampler = Sampler(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        ends = self.tokenizer.eos
        ids = self.prompt_ids(prompt)
        if draft is None:
            chosen = self.tokens(ids, max_tokens, sampler, ends)
        else:
            chosen = drafted_tokens(self, draft, ids, max_tokens, sampler, count=draft_tokens, ends=ends)
        pieces = said(chosen, self.tokenizer, stop)
        return pieces if stream else "".join(pieces)


def _whole(rows: int) -> int:
    """A power of two, so that near lengths share a plan."""
    return 1 << max(rows - 1, 1).bit_length()
