"""Errors in OpenAI's shape: a status, a line, the field that is to blame, a code that programs read."""

from __future__ import annotations

from typing import Any

from strata.errors import OptionError, RequestError, RunError, StrataError


class Refused(Exception):  # noqa: N818 - it is an answer, not a failure
    """An answer that is an error: a status and a line."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", field: str | None = None,
        code: str | None = None, headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": field, "code": code}}
        self.line: dict[str, Any] = {"error": message}  # as Ollama has it


def refusal(error: Exception, retry_after: int = 1) -> Refused:
    """The answer for an error; where the queue is full, it says after how many seconds to ask again."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RunError) and error.code == "X600":
        headers = {"Retry-After": str(retry_after)}
        return Refused(429, error.summary, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
    if isinstance(error, RunError) and error.code == "X602":
        return Refused(503, error.summary, kind="unavailable_error", code="shutting_down")
    if isinstance(error, (OptionError, KeyError)) and isinstance(error, StrataError):
        field, reason = (error.field, error.reason) if isinstance(error, RequestError) else (None, None)
        return Refused(400, error.summary.removeprefix("request: "), field=field, code=reason or "invalid_value")
    summary = error.summary if isinstance(error, StrataError) else f"{type(error).__name__}: {error}"
    return Refused(500, summary[:500], kind="server_error", code="server_error")
