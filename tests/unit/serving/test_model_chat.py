"""Chats with a model in the same process: messages in, a message out, with tools as functions or as descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import pytest

from strata.errors import OptionError
from strata.models import Decoder
from strata.models.chat import tool_of

pytest.importorskip("llguidance", reason="needs llguidance")
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def weather(city: str, days: Literal[1, 7], units: list[str] | None = None) -> str:
    """The weather of a city.

    More about it.
    """
    return f"{city} {days} {units}"


def clock() -> str:
    """What time it is."""
    return "noon"


def test_an_answer_is_the_next_message(chat_model: Callable[[], Decoder]) -> None:
    model = chat_model()
    made = model.chat(HELLO, max_tokens=8)
    assert made == {"role": "assistant", "content": model.generate(HELLO, max_tokens=8)}
    stream = model.chat(HELLO, max_tokens=8, stream=True)
    assert "".join(stream) == made["content"]
    assert stream.message == made
    again = model.chat([*HELLO, made, {"role": "user", "content": "more"}], max_tokens=4)
    assert again["role"] == "assistant"


def test_tools_are_called_and_answered(chat_model: Callable[[], Decoder]) -> None:
    model = chat_model()
    made = model.chat(HELLO, tools=[weather, clock], tool_choice="weather", max_tokens=200)
    (call,) = made["tool_calls"]
    assert call["function"]["name"] == "weather"
    given = json.loads(call["function"]["arguments"])
    assert set(given) >= {"city", "days"}
    assert given["days"] in (1, 7)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    end = model.chat([*HELLO, made, result], tools=[weather], tool_choice="none", max_tokens=4)
    assert "tool_calls" not in end
    described = [tool_of(t).described() for t in (weather, clock)]
    assert model.chat(HELLO, tools=described, tool_choice="required", max_tokens=200)["tool_calls"]
    named: Any = {"type": "function", "function": {"name": "clock"}}
    made = model.chat(HELLO, tools=described, tool_choice=named, max_tokens=200)
    assert [c["function"]["name"] for c in made["tool_calls"]] == ["clock"]


def test_functions_are_described_by_their_annotations() -> None:
    made = tool_of(weather)
    assert (made.name, made.description) == ("weather", "The weather of a city.")
    assert made.parameters == {
        "type": "object", "required": ["city", "days"],
        "properties": {"city": {"type": "string"}, "days": {"enum": [1, 7]},
                       "units": {"type": "array", "items": {"type": "string"}}},
    }  # fmt: skip


def test_what_makes_no_sense_is_told(chat_model: Callable[[], Decoder]) -> None:
    model = chat_model()
    for wrong, told in (
        (lambda: model.chat([]), "no messages"),
        (lambda: model.chat([{"content": "hello"}]), "message 0"),
        (lambda: model.chat(HELLO, tools=[3]), "a tool is a function"),
        (lambda: model.chat(HELLO, tools=[clock], tool_choice="clok"), "tool_choice is one of auto, none, required"),
        (lambda: model.chat(HELLO, tool_choice="required"), "there are no tools"),
    ):
        with pytest.raises(OptionError, match=told):
            wrong()
