"""Chats: messages by the model's template, tools that the model may call, and its answers as messages."""

from strata.models.chat.answer import ChatStream, answer, tool_of
from strata.models.chat.tools import (
    Call,
    CallParser,
    Tool,
    ToolChoice,
    ToolStyle,
    call_message,
    style_of,
    tool_grammar,
    with_tools,
)

__all__ = ["Call", "CallParser", "ChatStream", "Tool", "ToolChoice", "ToolStyle", "answer", "call_message", "style_of",
           "tool_grammar", "tool_of", "with_tools"]  # fmt: skip
