"""Requests of the OpenAI API: JSON bodies become typed records, or one clear error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strata.errors import RequestError

MAX_TOKENS: Final = 256  # where a request does not say
MOST_CHOICES: Final = 8
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
# what clients send along and no answer depends on
IGNORED: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# what is understood as long as it asks for nothing: its value then
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "logprobs": (False, 0), "echo": (False,),
    "top_logprobs": (0,), "suffix": ("",), "best_of": (1,), "tools": ([],), "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},), "parallel_tool_calls": (True, False), "modalities": (["text"],),
}  # fmt: skip


def wrong(message: str, name: str | None = None) -> RequestError:
    """A request that cannot be answered; `name` is the field that is to blame."""
    error = RequestError(f"request: {message}", code="O620")
    error.field = name
    return error


@dataclass(frozen=True)
class Options:
    """Sampling options, as `Engine.submit` takes them."""

    max_tokens: int = MAX_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    adapter: str | None = None

    def arguments(self, choice: int = 0) -> dict[str, Any]:
        """The arguments of one of several choices, each with its own seed."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.seed is not None:
            found["seed"] = self.seed + choice
        return found


@dataclass(frozen=True)
class TextRequest:
    """Completions of prompts: `choices` of each."""

    prompts: tuple[str | tuple[int, ...], ...]
    options: Options = field(default_factory=Options)
    choices: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    model: str | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A chat completion: an answer to messages."""

    messages: tuple[dict[str, str], ...]
    options: Options = field(default_factory=Options)
    choices: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    model: str | None = None


@dataclass(frozen=True)
class EmbeddingRequest:
    """Embeddings of texts."""

    texts: tuple[str, ...]
    base64: bool = False
    model: str | None = None


class _RequestBody:
    """Fields of a JSON body, taken one by one; what is left over at the end was not understood."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, Mapping):
            raise wrong(f"the body is {_kind(body)}, an object is needed")
        self._left = {str(k): v for k, v in body.items() if v is not None and k not in IGNORED}

    def any(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        found = self._left.pop(name, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not least <= found <= most:
            raise wrong(f"{name} is a number from {least:g} to {most:g}, got {_shown(found)}", name)
        return float(found)

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        found = self._left.pop(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            raise wrong(f"{name} is a whole number from {least} to {most}, got {_shown(found)}", name)
        return found

    def flag(self, name: str) -> bool:
        found = self._left.pop(name, False)
        if not isinstance(found, bool):
            raise wrong(f"{name} is true or false, got {_shown(found)}", name)
        return found

    def name(self, name: str) -> str | None:
        found = self._left.pop(name, None)
        if found is not None and not isinstance(found, str):
            raise wrong(f"{name} is a name, got {_shown(found)}", name)
        return found

    def finish(self) -> None:
        for name, value in self._left.items():
            if name not in NEUTRAL:
                raise wrong(f"there is no field {name!r}", name)
            if value not in NEUTRAL[name]:
                raise wrong(f"{name} = {_shown(value)} is not supported", name)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _options(body: _RequestBody) -> Options:
    name = "max_completion_tokens" if "max_completion_tokens" in body._left else "max_tokens"
    stop = body.any("stop", ())
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops) or len(stops) > 16:
        raise wrong(f"stop is a string or a list of up to 16, got {_shown(stop)}", "stop")
    seed = body.whole("seed", -1, -(2**63), 2**63 - 1) if "seed" in body._left else None
    top_p = body.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise wrong("top_p is larger than 0, got 0", "top_p")
    return Options(
        max_tokens=body.whole(name, MAX_TOKENS, 1, 1 << 24), temperature=body.number("temperature", 1.0, 0.0, 100.0),
        top_p=top_p, top_k=body.whole("top_k", 0, 0, 1 << 24), min_p=body.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=body.number("repetition_penalty", 1.0, 1e-3, 1e3), stop=tuple(stops),
        adapter=body.name("adapter"), seed=None if seed is None else seed % 2**63,
    )  # fmt: skip


def _streaming(body: _RequestBody) -> tuple[bool, bool]:
    stream, extra = body.flag("stream"), body.any("stream_options", {})
    if not isinstance(extra, Mapping) or not isinstance(extra.get("include_usage", False), bool):
        raise wrong(f"stream_options is an object, got {_shown(extra)}", "stream_options")
    return stream, bool(extra.get("include_usage", False))


def _common(body: _RequestBody) -> tuple[Options, int, bool, bool, str | None]:
    """What requests for texts share."""
    return _options(body), body.whole("n", 1, 1, MOST_CHOICES), *_streaming(body), body.name("model")


def parse_text(body: Any) -> TextRequest:
    """The body of /v1/completions."""
    fields = _RequestBody(body)
    found = fields.any("prompt")
    one = isinstance(found, str) or (isinstance(found, list) and found and all(type(i) is int for i in found))
    many = [found] if one else found
    if not isinstance(many, list) or not many:
        raise wrong(f"prompt is a text, a list of texts, or a list of token ids, got {_shown(found)}", "prompt")
    prompts: list[str | tuple[int, ...]] = []
    for prompt in many:
        if isinstance(prompt, str) and prompt:
            prompts.append(prompt)
        elif isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
            prompts.append(tuple(prompt))
        else:
            raise wrong(f"a prompt is a text or a list of token ids that is not empty, got {_shown(prompt)}", "prompt")
    made = TextRequest(tuple(prompts), *_common(fields))
    fields.finish()
    return made


def parse_chat(body: Any) -> ChatRequest:
    """The body of /v1/chat/completions."""
    fields = _RequestBody(body)
    found = fields.any("messages")
    if not isinstance(found, list) or not found:
        raise wrong(f"messages is a list of messages that is not empty, got {_shown(found)}", "messages")
    messages = tuple(_message(i, m) for i, m in enumerate(found))
    made = ChatRequest(messages, *_common(fields))
    fields.finish()
    return made


def _message(at: int, found: Any) -> dict[str, str]:
    name = f"messages[{at}]"
    if not isinstance(found, Mapping):
        raise wrong(f"{name} is an object with role and content, got {_shown(found)}", "messages")
    role, content = found.get("role"), found.get("content")
    if role not in ROLES:
        raise wrong(f"{name}: the role {_shown(role)} is none of {', '.join(ROLES)}", "messages")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None for p in content]
        content = "".join(p for p in parts if isinstance(p, str)) if all(isinstance(p, str) for p in parts) else None
    if not isinstance(content, str):
        raise wrong(f"{name}: the content is a text, got {_shown(found.get('content'))}", "messages")
    return {"role": str(role), "content": content}


def parse_embedding(body: Any) -> EmbeddingRequest:
    """The body of /v1/embeddings."""
    fields = _RequestBody(body)
    found = fields.any("input")
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise wrong(f"input is a text or a list of texts that are not empty, got {_shown(found)}", "input")
    kind = fields.any("encoding_format", "float")
    if kind not in ("float", "base64"):
        raise wrong(f"encoding_format is float or base64, got {_shown(kind)}", "encoding_format")
    made = EmbeddingRequest(tuple(texts), kind == "base64", fields.name("model"))
    fields.finish()
    return made


Request = TextRequest | ChatRequest | EmbeddingRequest
PATHS: Final[dict[str, Callable[[Any], Request]]] = {
    "/v1/completions": parse_text, "/v1/chat/completions": parse_chat, "/v1/embeddings": parse_embedding,
}  # fmt: skip


def parse_request(path: str, body: Any) -> Request:
    """A typed request from its path and JSON body."""
    if path not in PATHS:
        raise wrong(f"there is no path {path!r}; there are {', '.join(PATHS)}")
    return PATHS[path](body)


def prompts_of(request: TextRequest | ChatRequest) -> Sequence[Any]:
    """The prompts as `Engine.submit` takes them."""
    return [list(request.messages)] if isinstance(request, ChatRequest) else list(request.prompts)
