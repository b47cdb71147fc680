"""The Responses API of OpenAI: items in, items out, and the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from strata.models import Call, Tokenizer, ToolStyle, call_message
from strata.serving.api.answers import Collected, Ended, Reader, Said, collect, shown_scores, usage_of
from strata.serving.api.fields import Fields, shown, wrong
from strata.serving.api.requests import (
    MOST_TOP,
    AnswerFormat,
    ChatRequest,
    check_count,
    content_parts,
    content_text,
    parse_choice,
    parse_format,
    parse_options,
    parse_tools,
)
from strata.serving.generation import Generation, TokenScore

IGNORED: Final = (
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "reasoning",
    "truncation", "max_tool_calls",
)  # fmt: skip
SCORES: Final = "message.output_text.logprobs"
INCLUDED: Final = (SCORES, "reasoning.encrypted_content")  # what there is none of is included as well


@dataclass(frozen=True)
class ResponseRequest:
    """A response: the chat behind it, what it shows again, and whether it is remembered."""

    chat: ChatRequest
    shown: Mapping[str, Any] = field(default_factory=dict, hash=False)
    items: tuple[dict[str, Any], ...] = ()  # of the input, to be continued from
    stores: bool = True
    previous: str | None = None


def parse_response(body: Any, remembered: Mapping[str, Any] | None = None) -> ResponseRequest:
    """The body of /v1/responses; `remembered` are earlier items that it goes on from."""
    fields = Fields(body, ignored=IGNORED)
    given, instructions = fields.any("input"), fields.name("instructions")
    items = _items(given)
    previous = fields.name("previous_response_id")
    if previous is not None:
        if remembered is None:
            raise wrong(
                f"there is no response {previous!r}", "previous_response_id", "previous_response_not_found"
            )  # fmt: skip
        items = [*remembered["items"], *items]
    check_count(items, "input")
    text = Fields(fields.any("text", {}), "text")
    form = parse_format(text.any("format", {"type": "text"}), "text.format")
    text.name("verbosity")
    text.finish()
    tools = parse_tools(fields.any("tools", []))
    choice, tools = parse_choice(fields, tools)
    options = parse_options(fields)
    top, include = fields.whole("top_logprobs", 0, 0, MOST_TOP), fields.any("include", [])
    if not isinstance(include, list) or not all(i in INCLUDED for i in include):
        raise wrong(f"include is a list of {', '.join(INCLUDED)}, got {shown(include)}", "include", "invalid_value")
    if top or SCORES in include:
        options = replace(options, logprobs=top)
    stream, stores, model = fields.flag("stream"), fields.flag("store", True), fields.name("model")
    if fields.flag("background"):
        raise wrong("background = true is not supported", "background", "unsupported_parameter")
    fields.any("stream_options")
    fields.finish()
    messages = _messages(items)
    if instructions:
        messages = [{"role": "system", "content": instructions}, *messages]
    chat = ChatRequest(
        tuple(messages), options, stream=stream, model=model, format=form, tools=tools, tool_choice=choice,
        source="input",
    )  # fmt: skip
    about = {
        "instructions": instructions, "max_output_tokens": options.max_tokens if options.max_tokens < 1 << 24 else None,
        "temperature": options.temperature, "top_p": options.top_p, "previous_response_id": previous,
        "parallel_tool_calls": choice.parallel, "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [], "text": {"format": _shown_format(form)}, "store": stores,
        "metadata": body.get("metadata") or {}, "truncation": "disabled", "top_logprobs": top,
    }  # fmt: skip
    return ResponseRequest(chat, about, tuple(items), stores, previous)


def _shown_format(form: AnswerFormat) -> dict[str, Any]:
    if form.kind != "json_schema":
        return {"type": form.kind}
    return {"type": "json_schema", "name": form.name or "answer", "schema": form.schema, "strict": True}


def _items(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str) and given:
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(i, Mapping) for i in given):
        raise wrong(f"input is a text or a list of items, got {shown(given)}", "input", "invalid_type")
    return [dict(i) for i in given]


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as the messages of a chat."""
    found: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        name = f"input[{at}]"
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                if role not in ("system", "developer", "user", "assistant"):
                    raise wrong(f"{name}: the role {shown(role)} is not known", "input", "invalid_value")
                read = content_parts if role == "user" else content_text
                found.append({"role": role, "content": read(item.get("content"), name)})
            case "function_call":
                call = call_message(str(item.get("call_id", "")), str(item.get("name")), item.get("arguments"))
                if found and found[-1]["role"] == "assistant":
                    found[-1].setdefault("tool_calls", []).append(call)
                else:
                    found.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case "function_call_output":
                output = content_text(item.get("output"), name)
                found.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id", ""))})
            case "reasoning":
                pass
            case kind:
                raise wrong(f"{name}: an item of type {shown(kind)} is not supported", "input", "invalid_value")
    if not found:
        raise wrong("input has no message", "input", "invalid_value")
    return found


class ResponseAnswer:
    """A response, whole or as the events of a stream."""

    def __init__(
        self, request: ResponseRequest, generations: Sequence[Generation], tokenizer: Tokenizer, model: str,
        style: ToolStyle | None,
    ) -> None:  # fmt: skip
        self.request, self.generations, self._tokenizer, self._style = request, generations, tokenizer, style
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._model = model
        self._reader = Reader(generations[0], style)
        self._number = 0
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._message: dict[str, Any] | None = None  # the one that is being said
        self._begun = False

    @property
    def remembered(self) -> dict[str, Any]:
        """What a later request may go on from."""
        found = collect(self.generations[0], self._style)
        return {"items": [*self.request.items, *self._items(found)], "response": self.whole()}

    def whole(self) -> dict[str, Any]:
        found = collect(self.generations[0], self._style)
        return self._response(self._items(found), found.reason, self._id)

    def _items(self, found: Collected) -> list[dict[str, Any]]:
        """All of an answer: a message, and calls behind it."""
        said = _message(found.text, self._scores(found.scores))
        if found.reason == "length" and not found.calls:
            said["status"] = "incomplete"
        return [*([said] if found.text or not found.calls else []), *(_call(c) for c in found.calls)]

    def _scores(self, scores: Sequence[TokenScore]) -> list[dict[str, Any]]:
        return shown_scores(self._tokenizer, scores) if self.request.chat.options.logprobs is not None else []

    def _response(self, output: list[dict[str, Any]], reason: str | None, number: str) -> dict[str, Any]:
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        usage = usage_of(self.generations)
        shown_usage = {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip
        return {
            "id": number, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "model": self._model, "output": output, **self.request.shown,
            "usage": None if reason is None else shown_usage,
        }  # fmt: skip

    # ---------------------------------------------------------------------------------------------------------- events

    def parts(self) -> list[dict[str, Any]]:
        """The events that are new."""
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            for kind in ("response.created", "response.in_progress"):
                found.append(self._event(kind, response=self._response([], None, self._id)))
        for event in self._reader.read():
            match event:
                case Said(text, scores):
                    found += self._said(text, self._scores(scores))
                case Call():
                    found += [*self._end_message(), *self._called(event)]
                case Ended(reason):
                    found += self._end_message("incomplete" if reason == "length" else "completed")
                    kind = "response.incomplete" if reason == "length" else "response.completed"
                    found.append(self._event(kind, response=self._response(self._output, reason, self._id)))
        return found

    def _event(self, kind: str, **about: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **about}

    def _said(self, text: str, scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        if self._message is None:
            self._message = {**_message(""), "status": "in_progress", "content": []}
            found.append(self._event("response.output_item.added", output_index=self._at, item=dict(self._message)))
            found.append(self._content_event("response.content_part.added", part=_part("")))
            self._message["content"] = [_part("")]
        self._message["content"][0]["text"] += text
        self._message["content"][0]["logprobs"] += scores
        found.append(self._content_event("response.output_text.delta", delta=text, logprobs=scores))
        return found

    @property
    def _at(self) -> int:
        return len(self._output)

    def _content_event(self, kind: str, **about: Any) -> dict[str, Any]:
        assert self._message is not None
        return self._event(kind, item_id=self._message["id"], output_index=self._at, content_index=0, **about)

    def _end_message(self, status: str = "completed") -> list[dict[str, Any]]:
        if self._message is None:
            return []
        part = self._message["content"][0]
        found = [
            self._content_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._content_event("response.content_part.done", part=part),
        ]
        self._message["status"] = status
        found.append(self._event("response.output_item.done", output_index=self._at, item=self._message))
        self._output.append(self._message)
        self._message = None
        return found

    def _called(self, call: Call) -> list[dict[str, Any]]:
        item = _call(call)
        at, number = self._at, item["id"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        self._output.append(item)
        return [
            self._event("response.output_item.added", output_index=at, item=begun),
            self._event(
                "response.function_call_arguments.delta", item_id=number, output_index=at, delta=call.arguments
            ),
            self._event(
                "response.function_call_arguments.done", item_id=number, output_index=at, name=call.name,
                arguments=call.arguments,
            ),
            self._event("response.output_item.done", output_index=at, item=item),
        ]  # fmt: skip


def _part(text: str, scores: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(scores)}


def _message(text: str, scores: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant", "status": "completed",
            "content": [_part(text, scores)]}  # fmt: skip


def _call(call: Call) -> dict[str, Any]:
    return {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", "status": "completed",
            "call_id": call.number, "name": call.name, "arguments": call.arguments}  # fmt: skip
