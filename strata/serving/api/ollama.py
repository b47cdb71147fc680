"""Ollama's paths: /api/chat and /api/generate as lines of JSON, /api/embed, and the list of models."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from strata.models import Call, ToolStyle, call_message
from strata.serving.api.answers import Ended, Reader, Said, collect
from strata.serving.api.fields import Fields, shown, wrong
from strata.serving.api.requests import (
    TO_THE_END,
    AnswerFormat,
    ChatRequest,
    EmbeddingRequest,
    TextRequest,
    check_count,
    parse_options,
    parse_tools,
)
from strata.serving.generation import Generation

# options of llama.cpp that say how it computes, not what
MACHINE = (
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "use_mmap", "use_mlock", "num_thread", "numa",
    "num_keep",
)  # fmt: skip
# ways of choosing tokens that there are none of here, and the values that ask for none of them
UNUSED: Final[dict[str, tuple[Any, ...]]] = {
    "typical_p": (1,), "tfs_z": (1,), "mirostat": (0,), "repeat_last_n": (-1,), "penalize_newline": (True,),
}  # fmt: skip
DEFAULTS: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's
NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


@dataclass(frozen=True)
class OllamaRequest:
    """A chat, or a prompt, in Ollama's words."""

    inner: ChatRequest | TextRequest
    is_chat: bool
    done: str | None = None  # of a request without a prompt, which only makes sure that the model is there


def _common(body: Any) -> tuple[Fields, Any, bool, str | None, AnswerFormat]:
    fields = Fields(body, ignored=("keep_alive", "think", "truncate"))
    if fields.any("context"):
        raise wrong("context is not supported: send the messages to /api/chat", "context", "unsupported_parameter")
    given = {NAMES.get(k, k): v for k, v in fields.object("options").items() if k not in MACHINE}
    if type(given.get("max_tokens")) is int and given["max_tokens"] in (0, -1, -2):
        given["max_tokens"] = TO_THE_END
    if given.get("mirostat", 0) == 0:
        given = {k: v for k, v in given.items() if k not in ("mirostat_tau", "mirostat_eta")}
    options = Fields({**DEFAULTS, **given}, "options", called={ours: theirs for theirs, ours in NAMES.items()})
    for name, values in UNUSED.items():
        value = options.any(name, values[0])
        if value not in values and (name != "repeat_last_n" or given.get("repetition_penalty", 1) != 1):
            raise wrong(f"options.{name} = {shown(value)} is not supported", f"options.{name}", "unsupported_parameter")
    made = parse_options(options)
    options.finish()
    form = fields.any("format", "")
    if form not in ("", "json") and not isinstance(form, Mapping):
        raise wrong(f"format is json or a schema, got {shown(form)}", "format", "invalid_value")
    shape = (
        AnswerFormat("json_object") if form == "json" else AnswerFormat("json_schema", form) if form else AnswerFormat()
    )
    return fields, made, fields.flag("stream", True), fields.name("model"), shape


def parse_chat(body: Any) -> OllamaRequest:
    """The body of /api/chat."""
    fields, options, stream, model, form = _common(body)
    found = fields.any("messages")
    if not isinstance(found, list):
        raise wrong(f"messages is a list of messages, got {shown(found)}", "messages", "invalid_type")
    check_count(found, "messages")
    tools = parse_tools(fields.any("tools", []))
    fields.finish()
    messages = tuple(_message(i, m) for i, m in enumerate(found))
    inner = ChatRequest(messages, options, stream=stream, model=model, format=form, tools=tools)
    return OllamaRequest(inner, is_chat=True, done=None if messages else _kept(body))


def _kept(body: Mapping[str, Any]) -> str:
    """Why there is no text: the model is to be loaded, or let go, which a server of chosen models does not do."""
    return "unload" if body.get("keep_alive") in (0, "0", "0s", "0m") else "load"


def _message(at: int, found: Any) -> dict[str, Any]:
    name = f"messages[{at}]"
    fields = Fields(found, name, ("thinking",))
    role, content = fields.any("role"), fields.any("content", "")
    if role not in ("system", "user", "assistant", "tool") or not isinstance(content, str):
        raise wrong(f"{name} has a role and a text, got {shown(found)}", "messages", "invalid_value")
    images = fields.any("images")
    if images and role != "user":
        raise wrong(f"{name}: images are in messages of the user, not of {role}", "messages", "invalid_value")
    made: dict[str, Any] = {"role": role, "content": _with_images(content, images, name)}
    calls = fields.any("tool_calls", [])
    tool = fields.name("tool_name")
    if role == "tool":
        made["tool_call_id"] = tool or ""
    if calls:
        made["tool_calls"] = [_call(name, call) for call in (calls if isinstance(calls, list) else [calls])]
    fields.finish()
    return made


def _call(name: str, found: Any) -> dict[str, Any]:
    about = found.get("function") if isinstance(found, Mapping) else None
    if not isinstance(about, Mapping) or not isinstance(about.get("name"), str):
        raise wrong(f"{name}: tool_calls is a list of functions with names, got {shown(found)}", "messages")
    return call_message("", about["name"], about.get("arguments"))


def _with_images(text: str, images: Any, name: str) -> str | list[dict[str, Any]]:
    """A text, behind the images that it is about: base64, without the head of a data: URL."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(i, str) for i in images):
        raise wrong(f"{name}: images is a list of files in base64, got {shown(images)}", "images", "invalid_type")
    return [*({"type": "image", "image": f"data:;base64,{i}"} for i in images), {"type": "text", "text": text}]


def parse_generate(body: Any) -> OllamaRequest:
    """The body of /api/generate: a prompt as a user's message, or as it is if `raw` says so."""
    fields, options, stream, model, form = _common(body)
    prompt, system, raw = fields.any("prompt", ""), fields.name("system"), fields.flag("raw")
    if not isinstance(prompt, str):
        raise wrong(f"prompt is a text, got {shown(prompt)}", "prompt", "invalid_type")
    content = _with_images(prompt, fields.any("images"), "prompt")
    for name in ("suffix", "template"):
        if fields.any(name):
            raise wrong(f"{name} is not supported", name, "unsupported_parameter")
    fields.finish()
    if raw and isinstance(content, list):
        raise wrong("raw prompts have no place for images: leave raw out", "images", "unsupported_parameter")
    if raw:
        return OllamaRequest(TextRequest((prompt,), options, stream=stream, model=model, format=form), is_chat=False)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    inner = ChatRequest(tuple(messages), options, stream=stream, model=model, format=form, source="prompt")
    return OllamaRequest(inner, is_chat=False, done=None if content else _kept(body))


def parse_embed(body: Any) -> EmbeddingRequest:
    """The body of /api/embed."""
    fields = Fields(body, ignored=("keep_alive", "options"))
    found = fields.any("input")
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise wrong(f"input is a text or a list of texts that are not empty, got {shown(found)}", "input")
    size = fields.whole("dimensions", 1, 1, 1 << 20) if "dimensions" in fields else None
    cuts = fields.flag("truncate", True)
    made = EmbeddingRequest(tuple(texts), model=fields.name("model"), dimensions=size, cuts=cuts)
    fields.finish()
    return made


def parse_embedding(body: Any) -> EmbeddingRequest:
    """The body of /api/embeddings, the older path: one prompt."""
    fields = Fields(body, ignored=("keep_alive", "options", "truncate"))
    prompt = fields.any("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise wrong(f"prompt is a text that is not empty, got {shown(prompt)}", "prompt", "invalid_type")
    made = EmbeddingRequest((prompt,), model=fields.name("model"), cuts=True)
    fields.finish()
    return made


def _data(text: str) -> Any:
    """The arguments of a call as data; as they are where they are no JSON, as those of a function that takes a text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer:
    """The answer in Ollama's words."""

    def __init__(
        self, request: OllamaRequest, generations: Sequence[Generation], model: str, style: ToolStyle | None
    ) -> None:
        self.request, self.generations, self._model, self._style = request.inner, generations, model, style
        self._is_chat, self._done = request.is_chat, request.done
        self._reader = Reader(generations[0], style) if generations else None
        self._started = time.perf_counter()

    def whole(self) -> dict[str, Any]:
        if self._reader is None:
            return self._part("", (), self._done)
        found = collect(self.generations[0], self._style)
        return self._part(found.text, found.calls, found.reason)

    def parts(self) -> list[dict[str, Any]]:
        if self._reader is None:
            return [self._part("", (), self._done)]
        made = []
        for event in self._reader.read():
            match event:
                case Said(text, _):
                    if text:
                        made.append(self._part(text))
                case Call():
                    made.append(self._part("", [event]))
                case Ended(reason):
                    made.append(self._part("", (), reason))
        return made

    def _part(self, text: str, calls: Sequence[Call] = (), reason: str | None = None) -> dict[str, Any]:
        made: dict[str, Any] = {"model": self._model, "created_at": _now()}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = [{"function": {"name": c.name, "arguments": _data(c.arguments)}} for c in calls]
            made["message"] = message
        else:
            made["response"] = text
        made["done"] = reason is not None
        if reason is not None and not self.generations:
            made["done_reason"] = reason
        elif reason is not None:
            g = self.generations[0]
            total = time.perf_counter() - self._started
            first = g.first_token or total
            made |= {
                "done_reason": "length" if reason == "length" else "stop", "total_duration": int(total * 1e9),
                "load_duration": 0, "prompt_eval_count": len(g.prompt_ids), "prompt_eval_duration": int(first * 1e9),
                "eval_count": len(g.tokens), "eval_duration": int(max(total - first, 0) * 1e9),
            }  # fmt: skip
        return made


def model_entry(name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """A model in the list of /api/tags."""
    details = {"format": about.get("format", ""), "family": about.get("family", ""), "families": None,
               "parameter_size": about.get("parameters", ""), "quantization_level": ""}  # fmt: skip
    return {"name": name, "model": name, "modified_at": about.get("created", _now()), "size": about.get("bytes", 0),
            "digest": about.get("digest", ""), "details": details}  # fmt: skip
