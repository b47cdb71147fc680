"""Requests of the OpenAI API: JSON bodies become typed records, or one clear error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strata.models import Grammar, Tool, ToolChoice, call_message
from strata.serving.api.fields import Fields, shown, wrong

COMPLETION_TOKENS: Final = 16  # of a completion that does not say how many, as OpenAI has it
TO_THE_END: Final = 1 << 24  # of a chat that does not: what the context has room for
MOST_CHOICES: Final = 8
MOST_STOPS: Final = 16
MOST_LETTERS: Final = 1000  # of a stop string
MOST_BIASES: Final = 1024
MOST_PROMPTS: Final = 128
MOST_TOP: Final = 20
MOST_TOOLS: Final = 128
MOST_MESSAGES: Final = 2048
IMAGES: Final = ("image_url", "input_image")  # kinds of parts: of chats, and of responses
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
# of a message, what clients send back because they were given it
IGNORED_IN_MESSAGES: Final = ("refusal", "annotations", "audio", "reasoning", "reasoning_content", "function_call")


@dataclass(frozen=True)
class Options:
    """Sampling options, as `Engine.submit` takes them."""

    max_tokens: int = TO_THE_END
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    adapter: str | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    priority: int = 0

    def arguments(self, choice: int = 0) -> dict[str, Any]:
        """The arguments of one of several choices, each with its own seed."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        found["logit_bias"] = dict(self.logit_bias)
        if self.seed is not None:
            found["seed"] = self.seed + choice
        return found


@dataclass(frozen=True)
class AnswerFormat:
    """What an answer has to look like: any text, a JSON object, or JSON of a schema."""

    kind: str = "text"  # text, json_object or json_schema
    schema: Any = None
    name: str | None = None

    def grammar(self) -> Grammar | None:
        """What an answer of the format follows."""
        match self.kind:
            case "json_object":
                return Grammar.json_object()
            case "json_schema":
                return Grammar.json_schema(self.schema)
        return None


@dataclass(frozen=True)
class TextRequest:
    """Completions of prompts: `choices` of each."""

    prompts: tuple[str | tuple[int, ...], ...]
    options: Options = field(default_factory=Options)
    choices: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    model: str | None = None
    echo: bool = False
    format: AnswerFormat = field(default_factory=AnswerFormat)
    source: str = "prompt"  # the field that the prompts were read from


@dataclass(frozen=True)
class ChatRequest:
    """A chat completion: an answer to messages."""

    messages: tuple[dict[str, Any], ...]
    options: Options = field(default_factory=Options)
    choices: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    model: str | None = None
    format: AnswerFormat = field(default_factory=AnswerFormat)
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    source: str = "messages"  # the field that the messages were read from

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice.kind != "none"


@dataclass(frozen=True)
class EmbeddingRequest:
    """Embeddings of texts, or of the tokens of texts."""

    texts: tuple[str | tuple[int, ...], ...]
    base64: bool = False
    model: str | None = None
    dimensions: int | None = None
    cuts: bool = False  # texts that are too long, where they are else refused


@dataclass(frozen=True)
class RerankRequest:
    """Documents by how well they answer a query."""

    query: str
    documents: tuple[str, ...]
    top: int | None = None
    shows_documents: bool = False
    model: str | None = None


# ------------------------------------------------------------------------------------------------------ in common


def parse_options(body: Fields, default_tokens: int = TO_THE_END, least_tokens: int = 1) -> Options:
    """How tokens are chosen."""
    name = next((n for n in ("max_completion_tokens", "max_output_tokens", "max_tokens") if n in body), "max_tokens")
    most = body.whole(name, default_tokens, least_tokens, TO_THE_END)
    if name != "max_tokens":
        body.any("max_tokens")
    stop = body.any("stop", ())
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops) or len(stops) > 16:
        raise wrong(f"stop is a string or a list of up to {MOST_STOPS}, got {shown(stop)}", "stop", "invalid_value")
    long = next((s for s in stops if len(s) > MOST_LETTERS), None)
    if long is not None:
        raise wrong(f"a stop string has up to {MOST_LETTERS} letters, got {len(long)}", "stop", "invalid_value")
    seed = body.whole("seed", -1, -(2**63), 2**63 - 1) if "seed" in body else None
    top_p = body.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise wrong("top_p is larger than 0, got 0", "top_p", "invalid_value")
    return Options(
        max_tokens=most, temperature=body.number("temperature", 1.0, 0.0, 100.0),
        top_p=top_p, top_k=max(body.whole("top_k", 0, -1, 1 << 24), 0), min_p=body.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=body.number("repetition_penalty", 1.0, 1e-3, 1e3), stop=tuple(stops),
        adapter=body.name("adapter"), seed=None if seed is None else seed % 2**63,
        frequency_penalty=body.number("frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=body.number("presence_penalty", 0.0, -2.0, 2.0), logit_bias=_biases(body),
        ignore_eos=body.flag("ignore_eos"), priority=body.whole("priority", 0, -100, 100),
    )  # fmt: skip


def _biases(body: Fields) -> tuple[tuple[int, float], ...]:
    found = body.object("logit_bias")
    if len(found) > MOST_BIASES:
        raise wrong(f"logit_bias has up to {MOST_BIASES} tokens, got {len(found)}", "logit_bias", "invalid_value")
    made = []
    for token, bias in found.items():
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not (token.isascii() and token.isdigit() and len(token) < 10) or not is_number:
            raise wrong(
                f"logit_bias is token ids with numbers from -100 to 100, got {shown({token: bias})}", "logit_bias",
                "invalid_value",
            )  # fmt: skip
        made.append((int(token), float(bias)))
    return tuple(made)


def _streaming(body: Fields) -> tuple[bool, bool]:
    stream, extra = body.flag("stream"), Fields(body.any("stream_options", {}), "stream_options")
    usage = extra.flag("include_usage")
    extra.flag("include_obfuscation")
    extra.finish()
    return stream, usage


def _common(body: Fields, options: Options) -> tuple[Options, int, bool, bool, str | None]:
    """What requests for texts share."""
    return options, body.whole("n", 1, 1, MOST_CHOICES), *_streaming(body), body.name("model")


def parse_format(found: Any, where: str = "response_format") -> AnswerFormat:
    """`response_format`: text, json_object, or json_schema with a schema in it or beside it."""
    fields = Fields(found, where)
    kind = fields.any("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise wrong(f"{where}.type is text, json_object or json_schema, got {shown(kind)}", where, "invalid_value")
    if kind != "json_schema":
        fields.finish()
        return AnswerFormat(str(kind))
    if "json_schema" not in fields and "schema" not in fields:
        raise wrong(f"{where} has no json_schema", f"{where}.json_schema", "missing_required_parameter")
    inner = Fields(fields.any("json_schema"), f"{where}.json_schema") if "json_schema" in fields else fields
    schema, name = inner.any("schema", {}), inner.name("name")
    inner.flag("strict")
    inner.name("description")
    if not isinstance(schema, (Mapping, bool)):
        raise wrong(f"{where}: the schema is an object, got {shown(schema)}", where, "invalid_value")
    inner.finish()
    fields.finish()
    return AnswerFormat("json_schema", schema, name)


def parse_tools(found: Any, where: str = "tools") -> tuple[Tool, ...]:
    """Functions, as chat completions have them or flat, as responses do."""
    if not isinstance(found, list) or len(found) > MOST_TOOLS:
        raise wrong(f"{where} is a list of up to {MOST_TOOLS} functions, got {shown(found)}", where, "invalid_value")
    made: list[Tool] = []
    for i, tool in enumerate(found):
        path = f"{where}[{i}]"
        outer = Fields(tool, path)
        kind = outer.any("type", "function")
        if kind != "function":
            raise wrong(f"{path}.type is function, got {shown(kind)}", path, "unsupported_parameter")
        fields = Fields(outer.any("function"), f"{path}.function") if "function" in outer else outer
        name, about = fields.name("name"), fields.name("description")
        parameters = fields.object("parameters")
        fields.flag("strict")
        if not name or len(name) > 64 or not all(c.isalnum() or c in "_-." for c in name):
            raise wrong(f"{path}: a name is up to 64 letters, digits, _ and -, got {shown(name)}", path)
        if name in {t.name for t in made}:
            raise wrong(f"{path}: there is a function {name!r} already", path)
        fields.finish()
        outer.finish()
        made.append(Tool(name, about or "", parameters))
    return tuple(made)


def parse_choice(fields: Fields, tools: tuple[Tool, ...]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """`tool_choice`, which names a tool that is there or several that are allowed, and those that there are then."""
    found, parallel = fields.any("tool_choice", "auto"), fields.flag("parallel_tool_calls", True)
    if isinstance(found, Mapping) and found.get("type") == "allowed_tools":
        inner = found.get("allowed_tools", found)
        found, names = _allowed(inner if isinstance(inner, Mapping) else {}, {t.name for t in tools})
        tools = tuple(t for t in tools if t.name in names)
    return _choice(found, parallel, tools), tools


def _allowed(found: Mapping[str, Any], known: set[str]) -> tuple[Any, set[str]]:
    """The mode of `allowed_tools` and their names."""
    listed, mode = found.get("tools"), found.get("mode", "auto")
    abouts = [t.get("function", t) for t in listed if isinstance(t, Mapping)] if isinstance(listed, list) else []
    names = {str(a.get("name")) for a in abouts if isinstance(a, Mapping)}
    if not names or not names <= known or mode not in ("auto", "required"):
        raise wrong(f"allowed_tools has a mode and names some of the tools, got {shown(dict(found))}", "tool_choice")
    return mode, names


def _choice(found: Any, parallel: bool, tools: Sequence[Tool]) -> ToolChoice:
    if isinstance(found, Mapping):
        inner = found.get("function", found)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if found.get("type") != "function" or name not in {t.name for t in tools}:
            raise wrong(f"tool_choice names none of the tools: {shown(found)}", "tool_choice", "invalid_value")
        return ToolChoice("named", str(name), parallel)
    if found not in ("auto", "none", "required"):
        raise wrong(f"tool_choice is auto, none, required or a function, got {shown(found)}", "tool_choice")
    if found == "required" and not tools:
        raise wrong("tool_choice is required, and there are no tools", "tool_choice", "invalid_value")
    return ToolChoice(str(found), None, parallel)


# ---------------------------------------------------------------------------------------------------- each path's own


def is_ids(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(type(i) is int for i in found)


def parse_text(body: Any) -> TextRequest:
    """The body of /v1/completions."""
    fields = Fields(body)
    found = fields.any("prompt")
    many = [found] if isinstance(found, str) or is_ids(found) else found
    if not isinstance(many, list) or not many:
        raise wrong(f"prompt is a text, a list of texts, or a list of token ids, got {shown(found)}", "prompt")
    if len(many) > MOST_PROMPTS:
        raise wrong(f"prompt is a list of up to {MOST_PROMPTS}, got {len(many)}", "prompt", "invalid_value")
    prompts: list[str | tuple[int, ...]] = []
    for prompt in many:
        if isinstance(prompt, str) and prompt:
            prompts.append(prompt)
        elif is_ids(prompt):
            prompts.append(tuple(prompt))
        else:
            raise wrong(f"a prompt is a text or a list of token ids that is not empty, got {shown(prompt)}", "prompt")
    echo = fields.flag("echo")
    options = parse_options(fields, COMPLETION_TOKENS, 0 if echo else 1)
    asked = fields.any("logprobs", None)
    if asked is not None and asked is not False:
        if type(asked) is not int or not 0 <= asked <= MOST_TOP:
            raise wrong(f"logprobs is a whole number from 0 to {MOST_TOP}, got {shown(asked)}", "logprobs")
        options = _with(options, logprobs=asked)
    choices = fields.any("best_of", None)
    form = parse_format(fields.any("response_format", {"type": "text"}))
    common = _common(fields, options)
    if choices is not None and choices != common[1]:
        raise wrong(f"best_of = {shown(choices)} and n = {common[1]} differ, which is not supported", "best_of")
    made = TextRequest(tuple(prompts), *common, echo=echo, format=form)
    fields.finish()
    return made


def _with(options: Options, **changes: Any) -> Options:
    from dataclasses import replace

    return replace(options, **changes)


def parse_chat(body: Any) -> ChatRequest:
    """The body of /v1/chat/completions."""
    fields = Fields(body)
    messages = parse_messages(fields.any("messages"))
    options = parse_options(fields)
    asked, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, 0, MOST_TOP)
    if top and not asked:
        raise wrong("top_logprobs needs logprobs = true", "top_logprobs", "invalid_value")
    if asked:
        options = _with(options, logprobs=top)
    tools = parse_tools(fields.any("tools", []))
    choice, tools = parse_choice(fields, tools)
    form = parse_format(fields.any("response_format", {"type": "text"}))
    made = ChatRequest(messages, *_common(fields, options), format=form, tools=tools, tool_choice=choice)
    fields.finish()
    return made


def parse_messages(found: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, list) or not found:
        raise wrong(f"messages is a list of messages that is not empty, got {shown(found)}", "messages")
    check_count(found, "messages")
    return tuple(_message(i, m) for i, m in enumerate(found))


def check_count(found: Sequence[Any], name: str) -> None:
    """Refuse a chat that is longer than any, before its template is filled in."""
    if len(found) > MOST_MESSAGES:
        raise wrong(f"{name} is a list of up to {MOST_MESSAGES}, got {len(found)}", name, "array_above_max_length")


def _message(at: int, found: Any) -> dict[str, Any]:
    name = f"messages[{at}]"
    if not isinstance(found, Mapping):
        raise wrong(f"{name} is an object with role and content, got {shown(found)}", "messages", "invalid_type")
    fields = Fields(found, name, IGNORED_IN_MESSAGES)
    role, given, calls = fields.any("role"), fields.any("content"), fields.any("tool_calls")
    if role not in ROLES:
        raise wrong(f"{name}: the role {shown(role)} is not one of {', '.join(ROLES)}", "messages", "invalid_value")
    content: Any = "" if given is None and calls and role == "assistant" else None
    if content is None:
        content = content_parts(given, name) if role == "user" else content_text(given, name)
    made: dict[str, Any] = {"role": str(role), "content": content}
    author = fields.name("name")
    if author is not None:
        made["name"] = author
    if calls is not None:
        if role != "assistant" or not isinstance(calls, list):
            raise wrong(f"{name}: tool_calls is a list that an assistant has, got {shown(calls)}", "messages")
        made["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    number = fields.name("tool_call_id")
    if role == "tool":
        if number is None:
            raise wrong(f"{name}: a tool's message has a tool_call_id", "messages")
        made["tool_call_id"] = number
    fields.finish()
    return made


def content_parts(content: Any, name: str) -> str | list[dict[str, Any]]:
    """A text; or, where some of its parts are images, the parts: texts, and URLs of images."""
    kinds = [p.get("type") if isinstance(p, Mapping) else None for p in content] if isinstance(content, list) else []
    if not any(k in IMAGES for k in kinds):
        return content_text(content, name)
    made = []
    for kind, part in zip(kinds, content, strict=True):
        if kind in IMAGES:
            given = part.get("image_url")
            url = given.get("url") if isinstance(given, Mapping) else given
            if not isinstance(url, str):
                raise wrong(f"{name}: image_url has a url, got {shown(given)}", "messages", "invalid_type")
            made.append({"type": "image", "image": url})
        else:
            made.append({"type": "text", "text": content_text([part], name)})
    return made


def content_text(content: Any, name: str) -> str:
    """A text, or parts of one."""
    if isinstance(content, list):
        kinds = [p.get("type") if isinstance(p, Mapping) else None for p in content]
        if any(k in IMAGES for k in kinds):
            raise wrong(
                f"{name}: the content is a text: this model does not see images", "messages", "unsupported_parameter"
            )
        parts = [
            p.get("refusal" if k == "refusal" else "text")
            if k in ("text", "input_text", "output_text", "refusal") else None
            for p, k in zip(content, kinds, strict=True)
        ]  # fmt: skip
        content = "".join(p for p in parts if isinstance(p, str)) if all(isinstance(p, str) for p in parts) else None
    if not isinstance(content, str):
        raise wrong(f"{name}: the content is a text, got {shown(content)}", "messages", "invalid_type")
    return content


def _call(name: str, found: Any) -> dict[str, Any]:
    """A call that an assistant asked for, with its arguments as data, as templates take them."""
    about = found.get("function") if isinstance(found, Mapping) else None
    if not isinstance(about, Mapping) or not isinstance(about.get("name"), str):
        raise wrong(f"{name} is a call of a function with a name, got {shown(found)}", "messages", "invalid_type")
    return call_message(str(found.get("id", "")), str(about["name"]), about.get("arguments", "{}"))


def parse_embedding(body: Any) -> EmbeddingRequest:
    """The body of /v1/embeddings."""
    fields = Fields(body)
    found = fields.any("input")
    texts = [found] if isinstance(found, str) or is_ids(found) else found
    if not isinstance(texts, list) or not texts or not all((isinstance(t, str) and t) or is_ids(t) for t in texts):
        raise wrong(f"input is a text or a list of texts that are not empty, got {shown(found)}", "input")
    kind = fields.any("encoding_format", "float")
    if kind not in ("float", "base64"):
        raise wrong(f"encoding_format is float or base64, got {shown(kind)}", "encoding_format", "invalid_value")
    size = fields.whole("dimensions", 1, 1, 1 << 20) if "dimensions" in fields else None
    made = EmbeddingRequest(
        tuple(t if isinstance(t, str) else tuple(t) for t in texts), kind == "base64", fields.name("model"), size,
        fields.flag("truncate"),
    )  # fmt: skip
    fields.finish()
    return made


def parse_rerank(body: Any) -> RerankRequest:
    """The body of /v1/rerank."""
    fields = Fields(body)
    query, found = fields.any("query"), fields.any("documents")
    if not isinstance(query, str) or not query:
        raise wrong(f"query is a text that is not empty, got {shown(query)}", "query", "invalid_type")
    if not isinstance(found, list) or not found:
        raise wrong(f"documents is a list of texts that is not empty, got {shown(found)}", "documents", "invalid_type")
    texts = [d.get("text") if isinstance(d, Mapping) else d for d in found]
    odd = next((d for d, t in zip(found, texts, strict=True) if not isinstance(t, str) or not t), None)
    if odd is not None or not all(texts):
        raise wrong(f"a document is a text that is not empty, got {shown(odd)}", "documents", "invalid_type")
    top = fields.whole("top_n", 1, 1, 1 << 20) if "top_n" in fields else None
    made = RerankRequest(query, tuple(map(str, texts)), top, fields.flag("return_documents"), fields.name("model"))
    fields.any("max_chunks_per_doc")
    fields.finish()
    return made


Request = TextRequest | ChatRequest | EmbeddingRequest | RerankRequest
PATHS: Final[dict[str, Callable[[Any], Request]]] = {
    "/v1/completions": parse_text, "/v1/chat/completions": parse_chat, "/v1/embeddings": parse_embedding,
    "/v1/rerank": parse_rerank,
}  # fmt: skip


def parse_request(path: str, body: Any) -> Request:
    """A typed request from its path and JSON body."""
    if path not in PATHS:
        raise wrong(f"there is no path {path!r}; known: {', '.join(PATHS)}")
    return PATHS[path](body)
