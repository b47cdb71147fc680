"""What notebooks show of an object: one line, and its text when that is opened."""

from __future__ import annotations

from html import escape

MOST_LINES = 400
LONGEST_LINE = 400


def folded(title: str, text: str) -> str:
    """A line that opens to a text; of a long text, its beginning."""
    lines = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…" for line in text.splitlines()]
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"… and {len(lines) - MOST_LINES:,} lines more"]
    body = escape("\n".join(lines))
    return f"<details><summary><code>{escape(title)}</code></summary><pre>{body}</pre></details>"
