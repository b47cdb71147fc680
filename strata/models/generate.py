"""Text generation: prefill of the prompt, then decode a token at a time, with the KV cache written in place."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from strata.arguments import own_checks
from strata.backends import backend_for
from strata.errors import OptionError, UnknownNameError
from strata.mir import near
from strata.models.adapters import AdapterSet, load_adapter, permuted_rows
from strata.models.base import Model, compile_bound, compile_built
from strata.models.cached import PAGE, Layout, Slot
from strata.models.chat import answer
from strata.models.detokenize import streamed_text
from strata.models.generating.ahead import tokens_ahead
from strata.models.generating.choosing import Chooser
from strata.models.generating.continuations import best_beams, samples
from strata.models.generating.contrastive import contrastive_tokens
from strata.models.generating.experts import ExpertStores
from strata.models.generating.prompt_cache import load_prompt, save_prompt
from strata.models.generating.prompts import PromptTokens, SeenImages, images_of
from strata.models.generating.stages import StagedGraph
from strata.models.grammar import Grammar
from strata.models.loading import planned
from strata.models.paged import PagedCache
from strata.models.sampling import Sampler
from strata.models.speculative import drafted_tokens
from strata.models.tokenizer import TextModel, Tokenizer
from strata.models.weights import Weights
from strata.runtime import CompiledGraph

CONTEXT = 8192  # tokens that are planned for where a model could take more
FIRST_CAPACITY = 256  # rows of a new cache; it doubles when it is full
Runnable = CompiledGraph | StagedGraph
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | PromptTokens


@dataclass
class DecodeState:
    """What a decoder remembers of one sequence: its KV cache, of which `length` rows are in use, and states of layers
    without one."""

    caches: list[Any]  # arrays of NumPy, or in the memory of the model's device
    length: int = 0
    feeds: dict[str, Any] = field(default_factory=dict)
    slots: Sequence[Slot] = ()  # what the caches are; of a KV cache alone where nothing is said
    seen: SeenImages | None = None  # what tokens of the prompt show

    @property
    def capacity(self) -> int | None:
        """Rows of the KV cache; None where there is none."""
        return next(
            (c.shape[1] for i, c in enumerate(self.caches) if not (self.slots and self.slots[i].is_fixed)), None
        )


@runtime_checkable
class DecoderSizes(Protocol):
    """The configuration of a decoder, as far as generation needs it."""

    @property
    def positions(self) -> int:
        """Tokens that the model was made for."""

    @property
    def vocab(self) -> int: ...

    @property
    def slots(self) -> Sequence[Slot]:
        """What is kept of a sequence: rows of a KV cache, or states."""


class Decoder(TextModel, Model):
    """A text generator. `graph_for(every)` builds its graph; `generate` runs it."""

    def __init__(
        self, config: DecoderSizes, build: Callable[..., Any], tokenizer: Callable[[], Tokenizer], *,
        device: str = "cpu", context: int | None = None, experts: ExpertStores | None = None,
    ) -> None:  # fmt: skip
        self.config: Any = config
        self.device, self.experts = device, experts
        most = getattr(config, "stretched", config.positions)
        self.context = min(planned(context) or min(CONTEXT, config.positions), max(most, config.positions))
        self._build = build
        self._make_tokenizer = tokenizer
        self._graphs: dict[tuple[bool, bool, Layout, tuple[tuple[str, int], ...]], Runnable] = {}
        self._hidden = 0  # features of what the head is given, where a graph gives that, too
        self._adapters: AdapterSet | None = None
        self._chooser: Chooser | None = None
        self.weight_type = "f32"  # of most of the weights
        self.is_quantized = False  # some weights are blocks, whose matmuls with few rows and with many differ in bits

    outputs = ("logits",)
    sees = False  # whether prompts may have images

    @property
    def graph(self) -> Runnable:  # type: ignore[override]
        return self.graph_for(every=False)

    @property
    def inputs(self) -> dict[str, str]:
        return {"input_ids": "i32[B, S]"}

    def graph_for(
        self, *, every: bool, layout: Layout = "plain", sizes: tuple[tuple[str, int], ...] = (), hidden: bool = False
    ) -> Runnable:
        """The compiled graph: of the last token's logits, or of every token's; with caches of this layout.

        `sizes` are symbols with their numbers: a GPU has other kernels for one row than for many. With `hidden`, the
        last result is what the head is given. Where experts are read when they are needed, it is a graph in stages.
        """
        key = every, hidden, layout, sizes
        if key not in self._graphs:
            kinds = {} if layout == "plain" else {"layout": layout}
            builder = self._build(self.context, every=every, **kinds)
            if self._adapters is not None:
                if builder.changes:
                    raise OptionError("adapters: the model has one that is kept apart already", code="O611")
                builder.changes = self._adapters.blank
            builder.watched = {} if hidden else None
            builder.build()
            if hidden:
                last = next(reversed(builder.watched.values()))  # the head is the last matmul
                self._hidden = int(last.shape[-1])
                builder.graph = builder.graph.returning(*builder.graph.results, last)
            if self._adapters is not None:
                self._adapters.check(builder.weights, builder.bound)
                builder.bound |= self._adapters.values()
            if sizes:
                builder.graph = builder.graph.bind(dict(sizes))
            if self.experts is None:
                self._graphs[key] = compile_built(builder, self.device)
            else:
                builder.check()
                compiled = partial(compile_bound, bound=builder.bound, device=self.device)
                self._graphs[key] = StagedGraph(builder.graph, builder.cuts, compiled, self.experts.run)
        return self._graphs[key]

    def adapted(self, adapters: Mapping[str, str | os.PathLike[str]]) -> Decoder:
        """This model with LoRA adapters, folders by name, of which `use_adapter` chooses one at a time."""
        found = {name: load_adapter(folder) for name, folder in adapters.items()}
        if getattr(self.config, "is_permuted", False):
            heads = {"q_proj": self.config.heads, "k_proj": self.config.kv_heads}
            found = {name: permuted_rows(adapter, heads) for name, adapter in found.items()}
        made = Decoder(
            self.config, self._build, lambda: self.tokenizer, device=self.device, context=self.context,
            experts=self.experts,
        )  # fmt: skip
        made._adapters = AdapterSet(found)
        made.is_quantized, made.weight_type = self.is_quantized, self.weight_type
        return made

    def use_adapter(self, name: str | None) -> None:
        """Answer as this adapter from now on; None is the model itself."""
        known = self._adapters
        if known is None or (name is not None and name not in known.names):
            names = ", ".join(known.names) if known is not None else "none"
            raise UnknownNameError(f"there is no adapter {name!r}; known: {names}", code="N600")
        if name != known.active:
            known.active = name
            values = known.values()
            for graph in self._graphs.values():
                graph.set_params(values)

    # ------------------------------------------------------------------------------------------------------ one step

    def start(self, batch: int = 1, capacity: int = FIRST_CAPACITY) -> DecodeState:
        """An empty state."""
        rows, slots = min(capacity, self.context), self.config.slots
        shapes = [(batch, *(() if slot.is_fixed else (rows,)), *slot.shape) for slot in slots]
        return DecodeState([self.kept(np.zeros(shape, np.float32)) for shape in shapes], slots=slots)

    @property
    def has_state(self) -> bool:
        """Whether some layers carry a state, which cannot go back to an earlier token as a KV cache can."""
        return any(slot.is_fixed for slot in self.config.slots)

    @property
    def _chooses_on_device(self) -> bool:
        return self.experts is None and backend_for(self.device).home is not None

    @property
    def kv_bits(self) -> int:
        """Bits of a number in a paged KV cache that is not told otherwise: where matmuls are in bf16, so are pages."""
        backend = backend_for(self.device)
        narrow = backend.home is not None and "bf16" in backend.capabilities.narrow_matmuls
        return 16 if narrow and self.weight_type == "bf16" else 32

    def kept(self, array: np.ndarray) -> Any:
        """An array that steps change in place: in the memory of the device, where it has its own."""
        home = backend_for(self.device).home
        return array if home is None else home.upload(array, "KV cache")

    def step(self, state: DecodeState, ids: np.ndarray, *, every: bool = False) -> np.ndarray:
        """Logits after new tokens i32[B, S], which enter the state: f32[B, V], or with `every` f32[B, S, V]."""
        return self._stepped(state, ids, every, hidden=False)[0]

    def step_with_hidden(
        self, state: DecodeState, ids: np.ndarray, *, every: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `step`, with the hidden states that the logits are made of: f32[B, H], or with `every` f32[B, S, H]."""
        logits, hidden = self._stepped(state, ids, every, hidden=True)
        return logits, hidden

    def _stepped(self, state: DecodeState, ids: np.ndarray, every: bool, *, hidden: bool) -> list[np.ndarray]:
        (batch, count), vocab = ids.shape, self.config.vocab
        found = [np.empty((batch, count, vocab) if every else (batch, vocab), np.float32)]
        graph = self._graph_of_step(batch, count, every=every, hidden=hidden)
        if hidden:
            found.append(np.empty((batch, count, self._hidden) if every else (batch, self._hidden), np.float32))
        self._take_step(graph, state, ids, found)
        return found

    def step_into(self, state: DecodeState, ids: Any, logits: Any) -> None:
        """As `step`, with the last token's logits written to `logits`; both may be on the model's device."""
        self._take_step(self._graph_of_step(*ids.shape, every=False, hidden=False), state, ids, [logits])

    def _graph_of_step(self, batch: int, count: int, *, every: bool, hidden: bool) -> Runnable:
        one = count == batch == 1 and not every and backend_for(self.device).home is not None
        return self.graph_for(every=every, sizes=(("B", 1), ("S", 1)) if one else (), hidden=hidden)

    def _take_step(self, graph: Runnable, state: DecodeState, ids: Any, found: Sequence[Any]) -> None:
        batch, count = ids.shape
        self._check_room(state.length + count)
        self._reserve(state, state.length + count)
        if not state.feeds:
            state.feeds = dict(zip([slot.name for slot in self.config.slots], state.caches, strict=True))
        feeds = {"input_ids": ids, "past": np.array([state.length], np.int64), **state.feeds}
        feeds |= self.seen_feeds([state.seen] * batch, [state.length] * batch, count)
        graph.run_into(feeds, [found[0], *state.caches, *found[1:]])
        state.length += count

    def seen_feeds(self, seen: Sequence[SeenImages | None], starts: Sequence[int], count: int) -> dict[str, np.ndarray]:
        """What a step takes beside ids and caches: what so many tokens of each sequence show, from `starts` on."""
        del seen, starts, count
        return {}

    def _check_room(self, tokens: int) -> None:
        if tokens > self.context:
            raise OptionError(
                f"generate: {tokens} tokens are more than the context of {self.context}", code="O264",
                fix="load(path, context=…)",
            )  # fmt: skip

    def _reserve(self, state: DecodeState, rows: int) -> None:
        size = state.capacity
        if size is None or rows <= size:
            return
        while size < rows:
            size *= 2
        size = min(size, self.context)
        for i, old in enumerate(state.caches):
            if state.slots and state.slots[i].is_fixed:
                continue
            grown = np.zeros((old.shape[0], size, old.shape[2]), np.float32)
            grown[:, : state.length] = np.asarray(old)[:, : state.length]
            state.caches[i] = self.kept(grown)
        state.feeds = {}

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Logits of every position: `run(input_ids=…)["logits"]` is f32[B, S, V]."""
        if set(arrays) != {"input_ids"}:
            raise OptionError(f"run: takes input_ids, got {', '.join(sorted(arrays)) or 'nothing'}", code="O265")
        ids = np.ascontiguousarray(arrays["input_ids"], np.int32)
        return {"logits": self.step(self.start(len(ids), ids.shape[1]), ids, every=True)}

    # ---------------------------------------------------------------------------------------------------- generation

    @own_checks()
    def prompt_ids(
        self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None, limit: int | None = None
    ) -> list[int]:
        """Ids of a text, of chat messages by the model's template (with the tools that the model may call), or as they
        are. Of a prompt with more than `limit` tokens, no more is read than it takes to know that."""
        if isinstance(prompt, PromptTokens):
            return prompt.ids
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) if limit is None else self.tokenizer.encode(prompt, limit=limit)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return self.tokenizer.chat_ids(prompt, tools=tools, limit=limit)  # type: ignore[arg-type]
        try:
            return [operator.index(i) for i in prompt]  # type: ignore[arg-type]
        except TypeError:
            kind = type(prompt).__name__
            raise OptionError(f"generate: a prompt is a text, messages or token ids, got {kind}", code="O606") from None

    @own_checks()
    def read_prompt(
        self, prompt: Prompt, *, images: Sequence[Any] = (), tools: Sequence[Mapping[str, Any]] | None = None,
        limit: int | None = None,
    ) -> PromptTokens:  # fmt: skip
        """The ids of a prompt as `prompt_ids` has them, and what its images show where the model sees."""
        is_chat = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
        if images or (is_chat and images_of(prompt)):  # type: ignore[arg-type]
            raise OptionError("generate: this model does not see images", code="O606")
        return PromptTokens(self.prompt_ids(prompt, tools=tools, limit=limit))

    def tokens(
        self,
        ids: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        ends: Sequence[int] = (),
        state: DecodeState | None = None,
        grammar: Grammar | None = None,
        *,
        context_shift: bool = False,
    ) -> Iterator[int]:
        """New tokens, one by one, up to one of `ends`, which is not given; of those that a grammar allows.

        `state` may know a beginning of the prompt. With `context_shift`, the newer half of the tokens is read again
        when the context is full.
        """
        if not ids:
            raise OptionError("generate: the prompt is empty", code="O266")
        is_ours = state is None
        state = state or self._begun(PromptTokens(list(ids)), max_tokens)
        if self._chooses_on_device and sampler.is_simple and grammar is None and not context_shift:
            self._chooser = self._chooser or Chooser(self.device)
            ahead = is_ours or not self.has_state
            yield from tokens_ahead(self, self._chooser, state, ids, max_tokens, sampler, ends, ahead=ahead)
            return
        numbers, before = sampler.stream(), list(ids)
        logits = self.step(state, np.asarray([ids[state.length :]], np.int32))[0]
        matcher = None if grammar is None else grammar.matcher(self.tokenizer, self.config.vocab)
        for i in range(max_tokens):
            allowed = None if matcher is None else matcher.allowed(min(max_tokens, self.context - len(ids)) - i)
            token = sampler.choose(logits, before, numbers, start=len(ids), allowed=allowed)
            if token in ends:
                return
            yield token
            before.append(token)
            if matcher is not None:
                matcher.take(token)
            is_over = matcher is not None and matcher.is_done
            is_full = state.length >= self.context
            if is_over or i + 1 == max_tokens or (is_full and not context_shift):
                return
            if is_full:
                state = self.start(capacity=self.context)
                logits = self.step(state, np.asarray([before[-max(self.context // 2, 1) :]], np.int32))[0]
                continue
            logits = self.step(state, np.array([[token]], np.int32))[0]

    def token_rows(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampler: Sampler, ends: Sequence[int] = (),
        seen: Sequence[SeenImages | None] = (),
    ) -> Iterator[list[int | None]]:  # fmt: skip
        """New tokens of many prompts of any lengths, a step at a time; None for a prompt that has ended.

        Each prompt goes through the graph alone, unpadded; then all that have not ended take steps together. `seen` is
        what the images of each prompt show.
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
        for table, shown in zip(tables, seen, strict=False):
            table.seen = shown
        logits = [cache.step([t], np.asarray([ids], np.int32))[0] for t, ids in zip(tables, prompts, strict=True)]
        live = list(range(len(prompts)))
        numbers, before = [sampler.stream() for _ in prompts], [list(ids) for ids in prompts]
        for count in range(1, max_tokens + 1):
            found: list[int | None] = [None] * len(prompts)
            for i, x in zip(live, logits, strict=True):
                token = sampler.choose(x, before[i], numbers[i], start=len(prompts[i]))
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
        stop: str | Sequence[str] = (), **sampling: Any,
    ) -> list[str]:  # fmt: skip
        """Generate from prompts of any lengths in one batch; each text is what `generate` gives for it alone.

        `sampling` are more fields of `Sampler`.
        """
        sampler = self._sampler(
            max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed, **sampling,
        )  # fmt: skip
        tokens: list[list[int]] = [[] for _ in prompts]
        read = [self.read_prompt(p) for p in prompts]
        ids, seen = [r.ids for r in read], [r.seen for r in read]
        for row in self.token_rows(ids, max_tokens, sampler, self.tokenizer.eos, seen):
            for kept, token in zip(tokens, row, strict=True):
                if token is not None:
                    kept.append(token)
        return ["".join(streamed_text(ids, self.tokenizer, stop)) for ids in tokens]

    def generate(
        self, prompt: Prompt, *, max_tokens: int = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int | None = None, stop: str | Sequence[str] = (),
        stream: bool = False, n: int | None = None, beams: int = 1, length_penalty: float = 1.0,
        early_stopping: bool | str = False, draft: Decoder | None = None, draft_tokens: int | None = None,
        grammar: Grammar | None = None, show_special: bool = False, context_shift: bool = False,
        prompt_cache: str | os.PathLike[str] | None = None, penalty_alpha: float | None = None,
        images: Sequence[Any] = (), **sampling: Any,
    ) -> Any:  # fmt: skip
        """Generate text from a prompt (a text, chat messages or ids); with `stream`, an iterator of its pieces.

        `sampling` are more fields of `Sampler`: logit_bias, frequency_penalty, typical_p, mirostat_tau, and others.
        `n` asks for so many samples, as a list; `beams` for the likeliest text that a beam search finds, or with `n`
        for so many. The logarithm of a text's probability is divided by its length to the power of `length_penalty`;
        with `early_stopping`, a search is over as soon as `beams` texts have ended, with "never" once no text can be
        better. `penalty_alpha` asks for a contrastive search, which weighs the probability of each of the `top_k`
        likeliest tokens against its likeness to what came before. `draft` is a smaller model with
        the same tokenizer, for speculative decoding: it drafts `draft_tokens` at a time, by default as many as are
        verified in one step. This model accepts them or not: the text comes faster and is this model's own, the same at
        a temperature of 0, and of the same distribution above. `grammar` is what the text has to follow, such as
        `Grammar.json_schema(schema)`. With `show_special`, special tokens are part of the text. With `context_shift`,
        a text may be longer than the context: the older half is forgotten when that is full. `prompt_cache` is a file
        that keeps what was computed for the prompt; what is in it already is not computed again. `images` are those
        that the image tokens of a text stand for, where the model sees; messages have their own.
        """
        sampler, ends = self._sampler(
            max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed, **sampling,
        ), self.tokenizer.eos  # fmt: skip
        read = self.read_prompt(prompt, images=images)
        ids = read.ids
        ways = {"draft": draft is not None, "grammar": grammar is not None, "n": n is not None, "beams": beams != 1,
                "prompt_cache": prompt_cache is not None, "context_shift": context_shift,
                "penalty_alpha": penalty_alpha is not None}  # fmt: skip
        asked = [name for name, is_asked in ways.items() if is_asked]
        if set(asked) == {"n", "beams"}:
            asked = ["beams"]
        alone = next((name for name in ("n", "beams", "draft", "penalty_alpha") if name in asked), None)
        if alone is not None and len(asked) > 1:
            other = next(name for name in asked if name != alone)
            raise OptionError(f"generate: {alone} does not go with {other}; give one of them", code="O610")
        if read.seen is not None and read.seen.at.any() and set(asked) - {"grammar"}:
            raise OptionError(f"generate: images do not go with {asked[0]}; give one of them", code="O610")
        if (n is not None or beams != 1) and stream:
            raise OptionError("generate: only one text at a time can be streamed", code="O610")
        if n is not None and (n < 1 or not ids):
            raise OptionError(
                f"generate: n is at least 1 and the prompt not empty, got n={n} and {len(ids)} tokens", code="O236"
            )
        if n is not None or beams != 1:
            rows = (
                samples(self, ids, n, max_tokens, sampler, ends)
                if beams == 1 and n is not None
                else self._beams(ids, beams, n, max_tokens, sampler, length_penalty, early_stopping)
            )
            texts = ["".join(streamed_text(row, self.tokenizer, stop, special=show_special)) for row in rows]
            return texts[0] if n is None else texts
        if penalty_alpha is not None:
            chosen = contrastive_tokens(self, ids, max_tokens, sampler, penalty_alpha, ends)
        elif draft is not None:
            chosen = drafted_tokens(self, draft, ids, max_tokens, sampler, count=draft_tokens, ends=ends)
        else:
            state = None
            if prompt_cache is not None:
                state = self._remembered(prompt_cache, ids)
            elif read.seen is not None:
                state = self._begun(read, max_tokens)
            chosen = self.tokens(ids, max_tokens, sampler, ends, state, grammar, context_shift=context_shift)
        pieces = streamed_text(chosen, self.tokenizer, stop, special=show_special)
        return pieces if stream else "".join(pieces)

    def _beams(
        self, ids: Sequence[int], beams: int, count: int | None, max_tokens: int, sampler: Sampler, penalty: float,
        early_stopping: bool | str,
    ) -> list[list[int]]:  # fmt: skip
        """The tokens of the `count` best texts of a beam search."""
        if sampler.temperature > 0 or not ids:
            raise OptionError("generate: a beam search draws no tokens; give a temperature or beams", code="O236")
        if count is not None and count > beams:
            raise OptionError(f"generate: {beams} beams do not give n={count} texts", code="O236")
        if early_stopping not in (True, False, "never"):
            raise OptionError(f"generate: early_stopping is True, False or 'never', got {early_stopping!r}",
                              code="O236")  # fmt: skip
        found = best_beams(self, ids, beams, max_tokens, ends=self.tokenizer.eos, length_penalty=penalty,
                           early_stopping=early_stopping, sampler=sampler)  # fmt: skip
        return found[: count or 1]

    def _begun(self, read: PromptTokens, max_tokens: int) -> DecodeState:
        """A state for a prompt, which it has not read, and an answer."""
        state = self.start(capacity=max(FIRST_CAPACITY, _whole(len(read.ids) + min(max_tokens, 64))))
        state.seen = read.seen
        return state

    def _sampler(self, max_tokens: int, **sampling: Any) -> Sampler:
        if max_tokens < 0:
            raise OptionError(f"generate: max_tokens {max_tokens} is negative", code="O236")
        known = {f.name for f in fields(Sampler)}
        odd = next((name for name in sampling if name not in known), None)
        if odd is not None:
            raise OptionError(f"generate: there is no option {odd!r}{near(odd, known)}", code="O236")
        made = Sampler(**sampling)
        if made.min_tokens > max_tokens:
            raise OptionError(
                f"generate: min_tokens {made.min_tokens} is more than max_tokens {max_tokens}", code="O236"
            )
        return replace(made, ends=self.tokenizer.eos) if made.min_tokens and not made.ends else made

    def _remembered(self, path: str | os.PathLike[str], ids: Sequence[int]) -> DecodeState:
        """A state with all of a prompt but its last token, of which a file knew some, and knows all now."""
        state = load_prompt(path, self, ids) or self.start(capacity=max(FIRST_CAPACITY, len(ids)))
        if state.length < len(ids) - 1:
            self.step(state, np.asarray([ids[state.length : -1]], np.int32))
            save_prompt(path, self, state, ids)
        return state

    def weights(self) -> Weights:
        """The weights by name, as they were loaded."""
        found: Weights = self._build(self.context, every=False).weights
        return found

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, tool_choice: Any = "auto",
        stream: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """The assistant's answer to messages, as the next message; with `stream`, an iterator of the pieces of its
        text, whose `message` is the whole.

        `tools` are functions with annotations, or descriptions as OpenAI's clients write them. An answer that calls
        some has `tool_calls`; run them, and give their results as messages with the role `tool`. `tool_choice` is
        auto, none, required or the name of a tool. Other options are those of `generate`.
        """
        made = answer(self, messages, tools, tool_choice, options)
        return made if stream else made.message


def _whole(rows: int) -> int:
    """A power of two, so that near lengths share a plan."""
    return 1 << max(rows - 1, 1).bit_length()
