"""Answers of chat and completions, whole and in parts: text, tool calls, logprobs, usage."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.models import Call, CallParser, Tokenizer, ToolStyle
from strata.serving.api.errors import Refused
from strata.serving.api.requests import ChatRequest, TextRequest
from strata.serving.generation import Generation, TokenScore


@dataclass(frozen=True)
class Said:
    """More text, with the scores of its tokens where they were asked for."""

    text: str
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class Ended:
    """Why a choice ended, in the protocol's words: stop, length or tool_calls."""

    reason: str


class Reader:
    """Reads one generation as it comes: text, calls, and the end."""

    def __init__(self, generation: Generation, style: ToolStyle | None = None) -> None:
        self.generation = generation
        self._parser = None if style is None else CallParser(style)
        self._at = self._tokens = self._calls = 0
        self.is_over = False

    def read(self) -> list[Said | Call | Ended]:
        """What is new since the last time."""
        found: list[Said | Call | Ended] = []
        g = self.generation
        done = g.is_done  # asked first: what was said before it was done is there
        for text, tokens in g.pieces(self._at):
            self._at += 1
            scores = tuple(g.scores[self._tokens : tokens])
            self._tokens = tokens
            self._add(found, text if self._parser is None else self._parser.push(text), scores)
        if done and not self.is_over:
            g.check()
            if g.finish_reason == "cancelled":  # and its client is still there: half an answer is none
                raise Refused(503, "the server stops, and this was not answered whole", kind="unavailable_error",
                              code="shutting_down")  # fmt: skip
            self.is_over = True
            tail = "" if self._parser is None else self._parser.finish()
            self._add(found, tail, tuple(g.scores[self._tokens :]))
            reason = g.finish_reason if g.finish_reason in ("stop", "length") else "stop"
            called = self._parser is not None and self._parser.calls
            found.append(Ended("tool_calls" if called and reason == "stop" else reason))
        return found

    def _add(self, found: list[Said | Call | Ended], text: str, scores: tuple[TokenScore, ...]) -> None:
        if text or scores:
            found.append(Said(text, scores))
        if self._parser is not None:
            found += self._parser.calls[self._calls :]
            self._calls = len(self._parser.calls)


@dataclass
class Collected:
    """All of one choice."""

    text: str = ""
    said: list[Said] = field(default_factory=list)  # the text in its pieces
    scores: list[TokenScore] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    reason: str = "stop"


def collect(generation: Generation, style: ToolStyle | None = None) -> Collected:
    """A generation that is done."""
    made = Collected()
    for event in Reader(generation, style).read():
        match event:
            case Said(text, scores):
                made.text += text
                made.said.append(event)
                made.scores += scores
            case Call():
                made.calls.append(event)
            case Ended(reason):
                made.reason = reason
    return made


def usage_of(generations: Sequence[Generation], choices: int = 1) -> dict[str, Any]:
    """A prompt counts once, however many choices are made of it."""
    read, made = sum(len(g.prompt_ids) for g in generations[::choices]), sum(len(g.tokens) for g in generations)
    cached = sum(g.cached_tokens for g in generations[::choices])
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made,
            "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip


def shown_scores(tokenizer: Tokenizer, scores: Sequence[TokenScore]) -> list[dict[str, Any]]:
    """Scores of tokens as chat completions and responses show them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token], skip_special=False)
        return {"token": text, "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}

    return [{**entry(s.token, s.logprob), "top_logprobs": [entry(t, p) for t, p in s.top]} for s in scores]


def call_part(call: Call, index: int | None = None) -> dict[str, Any]:
    """A call in an answer; in a stream it has an index."""
    made = {"id": call.number, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return made if index is None else {"index": index, **made}


class TextAnswer:
    """The answer to a request for texts: `whole` when all generations are done, `parts` as they come."""

    def __init__(
        self, request: TextRequest | ChatRequest, generations: Sequence[Generation], tokenizer: Tokenizer, model: str,
        style: ToolStyle | None = None,
    ) -> None:  # fmt: skip
        self.request, self.generations, self._tokenizer, self._style = request, generations, tokenizer, style
        self._chat = request if isinstance(request, ChatRequest) else None
        prefix = "cmpl" if self._chat is None else "chatcmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._readers = [Reader(g, style) for g in generations]
        self._begun = self._over = False
        self._calls = [0] * len(generations)
        self._offsets: list[int | None] = [None] * len(generations)  # where the text ends that was streamed

    # ----------------------------------------------------------------------------------------------------------- whole

    def whole(self) -> dict[str, Any]:
        choices = []
        for i, generation in enumerate(self.generations):
            found = collect(generation, self._style)
            said: dict[str, Any] = {"index": i, "finish_reason": found.reason}
            if self._chat is None:
                shown = self._shown_prompt(i)
                said["text"] = shown + found.text
                said["logprobs"] = self._all_text_scores(i, found.said)
            else:
                message: dict[str, Any] = {"role": "assistant", "content": found.text, "refusal": None}
                if found.calls:
                    message["content"] = found.text or None
                    message["tool_calls"] = [call_part(c) for c in found.calls]
                said["message"] = message
                said["logprobs"] = self._chat_scores(found.scores)
            choices.append(said)
        kind = "text_completion" if self._chat is None else "chat.completion"
        usage = usage_of(self.generations, self.request.choices)
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    # ---------------------------------------------------------------------------------------------------------- parts

    def parts(self) -> list[dict[str, Any]]:
        """The parts that are new: of all choices, as they come."""
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            for i in range(len(self.generations)):
                if self._chat is not None:
                    found.append(self._part(i, {"role": "assistant", "content": ""}))
        for i, reader in enumerate(self._readers):
            for event in reader.read():
                found.append(self._shown(i, event))
        if not self._over and all(r.is_over for r in self._readers):
            self._over = True
            if self.request.usage_in_stream:
                usage = usage_of(self.generations, self.request.choices)
                found.append({**self._part(0, {}), "choices": [], "usage": usage})
        return found

    def _shown(self, i: int, event: Said | Call | Ended) -> dict[str, Any]:
        match event:
            case Said(text, scores):
                if self._chat is not None:
                    return self._part(i, {"content": text}, None, self._chat_scores(scores))
                at = self._offsets[i]
                shown = self._shown_prompt(i) if at is None else ""
                marks = self._text_scores(i, event, at)
                self._offsets[i] = (at or 0) + len(shown) + len(text)
                return self._part(i, shown + text, None, marks)
            case Call():
                self._calls[i] += 1
                return self._part(i, {"tool_calls": [call_part(event, self._calls[i] - 1)]})
            case Ended(reason):
                return self._part(i, {} if self._chat is not None else "", reason)

    def _part(self, i: int, said: Any, reason: str | None = None, scores: Any = None) -> dict[str, Any]:
        name, kind = ("text", "text_completion") if self._chat is None else ("delta", "chat.completion.chunk")
        choice = {"index": i, name: said, "logprobs": scores, "finish_reason": reason}
        part = {**self._head, "object": kind, "choices": [choice]}
        return {**part, "usage": None} if self.request.usage_in_stream else part  # the last one has it

    # -------------------------------------------------------------------------------------------------------- logprobs

    def _shown_prompt(self, i: int) -> str:
        if not isinstance(self.request, TextRequest) or not self.request.echo:
            return ""
        prompt = self.request.prompts[i // self.request.choices]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(list(prompt), skip_special=False)

    def _token(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)

    def _chat_scores(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if self.request.options.logprobs is None:
            return None
        return {"content": shown_scores(self._tokenizer, scores), "refusal": None}

    def _all_text_scores(self, i: int, said: Sequence[Said]) -> dict[str, Any] | None:
        """Scores of a whole text: those of its pieces, as they are streamed."""
        made = self._text_scores(i, said[0] if said else Said("", ()), None)
        if made is not None and said:
            at = len(self._shown_prompt(i)) + len(said[0].text)
            for piece in said[1:]:
                more = self._text_scores(i, piece, at) or {}
                made = {name: values + more[name] for name, values in made.items()}
                at += len(piece.text)
        return made

    def _text_scores(self, i: int, said: Said, at: int | None) -> dict[str, Any] | None:
        """Scores of a piece of a text and where its tokens begin there; of the first one, `at` None, with the prompt.

        No token begins behind the end of its piece: one may show nothing, or half a character.
        """
        if self.request.options.logprobs is None:
            return None
        generation, scores = self.generations[i], list[TokenScore | None](said.scores)
        tokens = [s.token for s in said.scores]
        texts, offsets = [self._token(t) for t in tokens], []
        if at is None and isinstance(self.request, TextRequest) and self.request.echo:
            shown = [self._token(t) for t in generation.prompt_ids]
            at = len(self._shown_prompt(i))
            offsets = _places(shown, 0, at)
            scores, texts = [*generation.prompt_scores, *scores], [*shown, *texts]
        offsets += _places(texts[len(offsets) :], at or 0, (at or 0) + len(said.text))
        tops = []
        for s in scores:
            top = {} if s is None else {self._token(t): p for t, p in reversed((*s.top, (s.token, s.logprob)))}
            tops.append(None if s is None or not self.request.options.logprobs else top)
        return {"tokens": texts, "token_logprobs": [None if s is None else s.logprob for s in scores],
                "top_logprobs": tops, "text_offset": offsets}  # fmt: skip


def _places(texts: Sequence[str], at: int, end: int) -> list[int]:
    """Where texts begin that follow each other, in a text that ends somewhere."""
    found = []
    for text in texts:
        found.append(min(at, end))
        at += len(text)
    return found
