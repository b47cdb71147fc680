"""Tool calls: how a model's family writes them, a grammar for them, and a parser of what was written, also in parts.

A chat template shows how the model was taught to call functions. Where it knows nothing of tools, they are described in
a system message, and calls are written as most families do it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strata.models.grammar import Grammar
from strata.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask to be called."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def described(self) -> dict[str, Any]:
        """As chat templates take it."""
        about = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": about}


@dataclass(frozen=True)
class ToolChoice:
    """Which tools may be called: auto, none, required (some one) or named (this one)."""

    kind: str = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True)
class ToolStyle:
    """How a family writes calls: a mark before each, the name of the arguments, a mark behind; or one list of all."""

    begin: str
    end: str = ""
    arguments: str = "arguments"
    is_list: bool = False
    described: bool = False  # by us, in a system message

    def describe(self, tools: Sequence[Tool]) -> str:
        """The tools, for a template that does not know them."""
        lines = [
            "You may call functions to help with the request. They are:", "<tools>",
            *(json.dumps(t.described(), ensure_ascii=False) for t in tools), "</tools>",
            "To call one, answer with its name and its arguments as JSON, and nothing else:",
            f'{self.begin}{{"name": "the name", "arguments": {{"an": "argument"}}}}{self.end}',
        ]  # fmt: skip
        return "\n".join(lines)


HERMES: Final = ToolStyle("<tool_call>\n", "\n</tool_call>")
STYLES: Final = {  # by what stands in the template
    "<tool_call>": HERMES,
    "[TOOL_CALLS]": ToolStyle("[TOOL_CALLS]", is_list=True),
    "<|tool_call|>": ToolStyle("<|tool_call|>", is_list=True),
    "<|python_tag|>": ToolStyle("", arguments="parameters"),
}
PLAIN: Final = ToolStyle("<tool_call>\n", "\n</tool_call>", described=True)


def style_of(template: str | None) -> ToolStyle:
    """How the model behind a chat template writes calls."""
    if template and "tools" in template:
        for mark, style in STYLES.items():
            if mark in template:
                return style
    return PLAIN


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[Tool], style: ToolStyle) -> list[dict[str, Any]]:
    """Messages for a template that does not know tools: described first, calls and results as texts."""
    found: list[dict[str, Any]] = []
    for message in messages:
        match message:
            case {"role": "assistant", "tool_calls": calls}:
                written = [json.dumps({"name": c["function"]["name"], style.arguments: c["function"]["arguments"]})
                           for c in calls]  # fmt: skip
                text = "\n".join([message["content"], *(f"{style.begin}{w}{style.end}" for w in written)]).strip()
                found.append({"role": "assistant", "content": text})
            case {"role": "tool", "content": content}:
                found.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
            case _:
                found.append(message)
    about = style.describe(tools)
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{about}"}, *found[1:]]
    return [{"role": "system", "content": about}, *found]


# -------------------------------------------------------------------------------------------------------- grammars


def tool_grammar(
    tools: Sequence[Tool], choice: ToolChoice, style: ToolStyle, tokenizer: Tokenizer, *, schema: Any = None
) -> Grammar:
    """Calls of the tools that may be called; with `auto`, a text without or before them, or JSON of a schema."""
    tools = [t for t in tools if choice.kind != "named" or t.name == choice.name]
    begin, rest = _mark(style.begin, tokenizer)
    end = " ".join(_mark(style.end, tokenizer)) if style.end else ""
    lines = ["%llguidance {}"]
    names = []
    for i, tool in enumerate(tools):
        given = json.dumps({**(dict(tool.parameters) or {"type": "object"}), "x-guidance": Grammar.json_layout})
        head = json.dumps('{"name": ' + json.dumps(tool.name) + f', "{style.arguments}": ')
        lines.append(f'f{i}: {head} %json {given} "}}"')
        names.append(f"f{i}")
    lines.append(f"one: {' | '.join(names)}")
    many = choice.parallel and choice.kind != "named"
    if style.is_list:
        lines.append('body: "[" one (", " one)* "]"' if many else 'body: "[" one "]"')
        many = False
    else:
        lines.append(f"body: one {end}")
    if choice.kind != "auto":
        again = f'("\\n" {begin} {rest} body)*' if many and style.begin else ""
        lines.append(f"start: {begin} {rest} body {again}")
        closing = max(len(t.name) + Grammar.shortest(dict(t.parameters)) for t in tools) + 48
        return Grammar.lark("\n".join(lines), closing)
    text = "TEXT"
    if schema is not None:
        laid_out = {"x-guidance": Grammar.json_layout, **(schema if isinstance(schema, dict) else {})}
        lines.append(f"said: %json {json.dumps(laid_out)}")
        lines.append(f"start: said | {begin} {rest} body")
    elif not style.begin:
        lines += [r"TEXT: /[^{](.|\n)*/", "start: one | TEXT |"]
    else:
        lines.append(r"TEXT: /(.|\n)*/")
        if begin.startswith("<["):
            lines.append(f"call: TEXT {begin} {rest} body")
        else:
            lines += [f"head[lazy]: TEXT {begin}", f"call: head {rest} body"]
        lines.append(f"start: call* {text}" if many else f"start: call | {text}")
    return Grammar.lark("\n".join(lines))


def _mark(text: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """A mark and the white space behind it, in a grammar: a special token by its number, others as text."""
    name = text.strip()
    if not name:
        return "", ""
    number = tokenizer.special_id(name)
    if number is None:
        return json.dumps(text), ""
    before, behind = text[: text.index(name)], text[text.index(name) + len(name) :]
    parts = [json.dumps(before) if before else "", f"<[{number}]>"]
    return " ".join(p for p in parts if p), json.dumps(behind) if behind else ""


# ---------------------------------------------------------------------------------------------------------- parsing


@dataclass(frozen=True)
class Call:
    """A call that the model asks for; its arguments are JSON text."""

    number: str
    name: str
    arguments: str


def call_message(number: str, name: str, given: Any) -> dict[str, Any]:
    """A call in the messages of a template, which takes its arguments as data."""
    try:
        arguments = json.loads(given) if isinstance(given, str) and given else given or {}
    except (ValueError, RecursionError):
        arguments = given
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


class CallParser:
    """Splits an answer, as it comes, into text and calls."""

    def __init__(self, style: ToolStyle) -> None:
        self._style = style
        self._begin, self._end = style.begin.strip(), style.end.strip()
        self._held = ""
        self._inside = self._behind = False  # a call; the mark that ends one
        self._json = _JsonEnd()
        self._started = False
        self.calls: list[Call] = []

    def push(self, piece: str) -> str:
        """More of the answer; gives what of it is text. Calls that are complete are in `calls`."""
        said = ""
        self._held += piece
        while True:
            if self._behind:
                rest = self._held.lstrip()
                if self._end.startswith(rest) and rest != self._end:
                    return said
                self._held, self._behind = rest.removeprefix(self._end), False
            if not self._inside:
                text, found = self._before_mark()
                said += text
                if not found:
                    return said if self.calls == [] or said.strip() else ""
            end = self._json.push(self._held)
            if end is None:
                return said
            self._take(self._held[:end])
            self._held = self._held[end:]
            self._inside, self._behind, self._started, self._json = False, bool(self._end), True, _JsonEnd()

    def finish(self) -> str:
        """What is left at the end, as text: a call that was not completed, too."""
        text = (self._begin if self._inside else "") + self._held
        self._held = ""
        return text if not self.calls or not self._end.startswith(text.strip()) else ""

    def _before_mark(self) -> tuple[str, bool]:
        """The text before the next call, and whether one begins behind it."""
        if not self._begin:  # a call is all there is, or there is none
            start = self._held.lstrip()
            self._inside = (not self._started) and start.startswith("{")
            if self._inside:
                self._held = start
                return "", True
            text, self._held = ("", self._held) if not start and not self._started else (self._held, "")
            self._started = self._started or bool(start)
            return text, False
        at = self._held.find(self._begin)
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(self._begin) :].lstrip()
            self._inside = True
            return text if text.strip() else "", True
        safe = len(self._held) - next(
            (
                n
                for n in range(min(len(self._begin), len(self._held)), 0, -1)
                if self._begin.startswith(self._held[-n:])
            ),
            0,
        )
        text, self._held = self._held[:safe], self._held[safe:]
        return text, False

    def _take(self, text: str) -> None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return
        for call in found if isinstance(found, list) else [found]:
            if isinstance(call, dict) and isinstance(call.get("name"), str):
                given = call.get("arguments", call.get("parameters", {}))
                arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
                self.calls.append(Call(f"call_{secrets.token_hex(12)}", call["name"], arguments))


class _JsonEnd:
    """Finds where a JSON object or list ends in a text that grows."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quoted = self._escaped = False

    def push(self, text: str) -> int | None:
        """The end, or None while it has not come; `text` begins as it did before."""
        while self._at < len(text):
            letter = text[self._at]
            self._at += 1
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        return None
