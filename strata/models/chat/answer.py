"""A model's answer to messages, as the next message: text, and calls of tools."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from strata.core import here
from strata.errors import OptionError
from strata.models.chat.tools import (
    CallParser,
    Tool,
    ToolChoice,
    ToolStyle,
    call_message,
    style_of,
    tool_grammar,
    with_tools,
)

if TYPE_CHECKING:
    from strata.models.generate import Decoder

_KINDS: Final = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_CHOICES: Final = ("auto", "none", "required")


class ChatStream:
    """An answer as it comes: iterate over the pieces of its text; `message` is all of it, with the calls."""

    def __init__(self, pieces: Iterator[str], style: ToolStyle | None) -> None:
        self._pieces = pieces
        self._parser = None if style is None else CallParser(style)
        self._said: list[str] = []
        self._texts = self._read()

    def __iter__(self) -> Iterator[str]:
        return self._texts

    @property
    def message(self) -> dict[str, Any]:
        """The whole message of the assistant; what has not come yet is waited for."""
        for _ in self._texts:
            pass
        made: dict[str, Any] = {"role": "assistant", "content": "".join(self._said)}
        if self._parser is not None and self._parser.calls:
            made["content"] = made["content"].strip()
            made["tool_calls"] = [
                {"id": c.number, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self._parser.calls
            ]
        return made

    def _read(self) -> Iterator[str]:
        for piece in self._pieces:
            text = piece if self._parser is None else self._parser.push(piece)
            if text:
                self._said.append(text)
                yield text
        tail = "" if self._parser is None else self._parser.finish()
        if tail:
            self._said.append(tail)
            yield tail


def answer(
    model: Decoder, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, choice: Any,
    options: Mapping[str, Any],
) -> ChatStream:  # fmt: skip
    """What a model says next."""
    laid_out = [_laid_out(i, m) for i, m in enumerate(messages)]
    if not laid_out:
        raise OptionError("chat: there are no messages", code="O266", place=here())
    known = [tool_of(t) for t in tools or ()]
    chosen = _choice(choice, known)
    if not known or chosen.kind == "none":
        return ChatStream(model.generate(model.read_prompt(laid_out), stream=True, **options), None)
    if options.get("grammar") is not None or options.get("draft") is not None:
        raise OptionError("chat: tools have a grammar of their own; give no grammar and no draft", code="O610")
    style = style_of(model.tokenizer.template)
    if style.described:
        ids = model.read_prompt(with_tools(laid_out, known, style))
    else:
        ids = model.read_prompt(laid_out, tools=[t.described() for t in known])
    grammar = tool_grammar(known, chosen, style, model.tokenizer)
    pieces = model.generate(ids, stream=True, **{**options, "grammar": grammar, "show_special": True})
    return ChatStream(pieces, style)


def _laid_out(i: int, message: Any) -> dict[str, Any]:
    """A message as templates take it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise OptionError(f"chat: message {i} is a mapping with a role and a content, got {message!r}", code="O606")
    made = {**message, "content": message.get("content") or ""}
    if made["role"] == "developer":
        made["role"] = "system"
    if made.get("tool_calls"):
        calls = [(c.get("id", ""), c.get("function", {})) for c in made["tool_calls"] if isinstance(c, Mapping)]
        made["tool_calls"] = [call_message(n, str(f.get("name")), f.get("arguments")) for n, f in calls]
    return made


def _choice(given: Any, tools: Sequence[Tool]) -> ToolChoice:
    """auto, none, required, or the name of a tool, alone or as OpenAI's clients write it."""
    if given in _CHOICES:
        if given == "required" and not tools:
            raise OptionError("chat: tool_choice is required, and there are no tools", code="O606", place=here())
        return ToolChoice(str(given))
    name = given.get("function", given).get("name") if isinstance(given, Mapping) else given
    if name not in {t.name for t in tools}:
        names = ", ".join([*_CHOICES, *(t.name for t in tools)])
        raise OptionError(f"chat: tool_choice is one of {names}, got {given!r}", code="O606", place=here())
    return ToolChoice("named", str(name))


# ------------------------------------------------------------------------------------------------------------- tools


def tool_of(given: Any) -> Tool:
    """A tool from its description, as OpenAI's clients write it, or from a function with annotations."""
    if isinstance(given, Tool):
        return given
    if isinstance(given, Mapping):
        about = given.get("function", given)
        name = about.get("name") if isinstance(about, Mapping) else None
        if isinstance(name, str) and name and isinstance(about.get("parameters") or {}, Mapping):
            return Tool(name, str(about.get("description") or ""), dict(about.get("parameters") or {}))
    elif callable(given) and hasattr(given, "__name__"):
        return _of_function(given)
    raise OptionError(
        f"chat: a tool is a function, or its name, description and parameters, got {given!r}", code="O606", place=here()
    )


def _of_function(fn: Callable[..., Any]) -> Tool:
    """Its name, the head of its docstring, and its parameters by their annotations."""
    hints = get_type_hints(fn)
    found: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        found[name] = _schema(hints.get(name, Any))
        if parameter.default is parameter.empty:
            required.append(name)
    about = (inspect.getdoc(fn) or "").partition("\n\n")[0]
    return Tool(fn.__name__, about, {"type": "object", "properties": found, "required": required})


def _schema(hint: Any) -> dict[str, Any]:
    """JSON Schema of an annotation; anything where it says nothing."""
    if hint in _KINDS:
        return {"type": _KINDS[hint]}
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return {"enum": list(inner)}
    if kind in (Union, types.UnionType):
        some = [_schema(t) for t in inner if t is not type(None)]
        return some[0] if len(some) == 1 else {"anyOf": some}
    if kind in (list, tuple, set, Sequence):
        return {"type": "array", **({"items": _schema(inner[0])} if inner else {})}
    return {"type": "object"} if kind in (dict, Mapping) else {}
