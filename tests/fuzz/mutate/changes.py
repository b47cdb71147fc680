"""Changes that fit any format: to bytes, to numbers with a place, to JSON values, to texts."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

NUMBERS = (
    0, 1, 2, 3, -1, -2, 7, 8, 64, 255, 256, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, -(2**31), -(2**40),
    2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 10**9, 2 * 10**9,
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-300, 1e300, 3.4e38, float("inf"), float("-inf"), float("nan"))
WORDS = ("", "a", "x" * 300, "\0", "é", "\ud800", "../x", "/etc/passwd", "{}", "%s%n", "9" * 30, "null", "\n", "名前")


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few random changes: bytes, whole numbers, pieces cut, doubled or moved, and truncation."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if len(raw) < 16:
            break
        at = rng.randrange(min(len(raw), rng.choice((64, 512, len(raw)))))
        match rng.randrange(7):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                raw[at] ^= 1 << rng.randrange(8)
            case 2:
                number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.randrange(2**16), len(raw)))
                raw[at : at + 8] = struct.pack("<Q", number)
            case 3:
                del raw[at : at + rng.randrange(1, 32)]
            case 4:
                raw[at:at] = raw[at : at + rng.randrange(1, 32)]
            case 5:
                raw = raw[:at]
            case 6:
                raw[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 7, 8, 9, 2**31, 2**32 - 1)))
    return bytes(raw)


def packed(form: str, value: int) -> bytes:
    """A number in a width, wrapped into it."""
    bits = 8 * struct.calcsize(form)
    return struct.pack(form.upper(), value % (1 << bits))


# ----------------------------------------------------------------------------------------------------------------- JSON

Place = tuple[Any, Any]  # a dict or list, and a key or index of it


def places(value: Any) -> list[Place]:
    """Every place in a tree of JSON that holds a value."""
    found: list[Place] = []
    left = [value]
    while left:
        at = left.pop()
        keys: Sequence[Any] = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        for key in keys:
            found.append((at, key))
            left.append(at[key])
    return found


def change_json(value: Any, rng: random.Random, words: Sequence[str] = ()) -> Any:
    """A copy with one to three places changed: numbers, kinds, keys, lists, parts moved elsewhere, deep nesting."""
    made = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        known = places(made)
        if not known:
            break
        # places near the root are few and matter most
        holder, key = known[min(rng.randrange(len(known)), rng.randrange(len(known)))]
        _change_place(holder, key, rng, known, (*WORDS, *words))
    return made


def _change_place(holder: Any, key: Any, rng: random.Random, known: list[Place], words: Sequence[str]) -> None:
    old = holder[key]
    match rng.randrange(12):
        case 0 | 1 | 2 if isinstance(old, (int, float)):
            near = (old + 1, old - 1, old * 2, -old) if abs(old) < 1e18 and old == old else (0,)
            holder[key] = rng.choice((*NUMBERS, *FLOATS, *near))
        case 0 | 1 if isinstance(old, str):
            holder[key] = rng.choice(words)
        case 3:
            holder[key] = rng.choice((None, True, False, 0, -1, 1.5, "a", [], {}, [[]], {"": None}, [1, "a"]))
        case 4:
            del holder[key]
        case 5 if isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), json.loads(json.dumps(old)))
        case 6 if isinstance(holder, dict):
            holder[rng.choice((*words, *(str(k) for _, k in known)))] = holder.pop(key)
        case 7:
            other, at = rng.choice(known)
            copied = json.dumps(other[at] if not isinstance(other, list) or at < len(other) else None)
            holder[key] = json.loads(copied) if len(copied) < 4096 else None
        case 8:
            for _ in range(rng.choice((1, 2, 30, 400))):
                old = [old] if rng.random() < 0.5 else {"a": old}
            holder[key] = old
        case 9 if isinstance(old, list) and len(old) < 64:
            holder[key] = old * rng.choice((0, 2, 50))
        case 10:
            holder[key] = rng.choice(words) * rng.choice((1, 10, 1000))
        case _:
            holder[key] = rng.choice((*NUMBERS, *FLOATS, *words))


def json_bytes(value: Any, rng: random.Random) -> bytes:
    """JSON as bytes, now and then in ways that a writer would not: keys twice, bad UTF-8, a wall of brackets."""
    try:
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    except RecursionError:
        text = "{}"
    data = text.encode("utf-8", "surrogatepass")
    match rng.randrange(24):
        case 0:
            wall = b"[" * rng.choice((100, 2000, 100_000))
            at = rng.randrange(len(data) + 1)
            return data[:at] + wall + data[at:]
        case 1 if data[:1] == b"{" and len(data) > 2:
            return b"{" + data[1:-1] + b"," + data[1:]
        case 2:
            at = rng.randrange(len(data) + 1)
            return data[:at] + rng.choice((b"\xff", b"\xc0\x80", b"\0", b"\xed\xa0\x80", b"\xef\xbb\xbf")) + data[at:]
        case 3:
            return data[: rng.randrange(len(data) + 1)]
        case 4:
            return b"\xef\xbb\xbf" + data
        case 5:
            digits = b"9" * rng.choice((20, 400, 5000))
            return re.sub(rb"\d+", lambda m: digits if rng.random() < 0.1 else m[0], data)
    return data


# ----------------------------------------------------------------------------------------------------------------- text

TEXT_NUMBERS = (*map(str, NUMBERS), "9" * 400, "9" * 5000, "1e400", "-0.0", "nan", "inf", "0x", "1_0")
MARKS = "[](){}<>,.:%@-+*/#=\"'é\t \n\0\\0123xN_"


def change_text(text: str, rng: random.Random, words: Sequence[str] = ()) -> str:
    """One to four changes to numbers, names, lines, characters and brackets of a text."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        text = rng.choice(_TEXT_CHANGES)(text, rng, words)
    return text


def replace_one(pattern: str, text: str, rng: random.Random, change: Callable[[re.Match[str]], str]) -> str:
    """One of the matches of a pattern changed."""
    found = list(re.finditer(pattern, text))
    if not found:
        return text
    chosen = rng.choice(found)
    return text[: chosen.start()] + change(chosen) + text[chosen.end() :]


def _number(text: str, rng: random.Random, words: Sequence[str]) -> str:
    return replace_one(r"(?<![\w%.])-?\d+(?:\.\d+)?", text, rng, lambda _: rng.choice(TEXT_NUMBERS))


def _name(text: str, rng: random.Random, words: Sequence[str]) -> str:
    own = re.findall(r"[A-Za-z_][\w.]*", text) or ["x"]
    choices = (own, own, words or own, WORDS)
    return replace_one(r"[A-Za-z_][\w.]*", text, rng, lambda _: rng.choice(rng.choice(choices)))


def _value(text: str, rng: random.Random, words: Sequence[str]) -> str:
    own = re.findall(r"%\d+|\bh\d+\b", text) or ["%0"]
    return replace_one(r"%\d+|\bh\d+\b", text, rng, lambda _: rng.choice((*own, "%99999")))


def _lines(text: str, rng: random.Random, words: Sequence[str]) -> str:
    lines = text.split("\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            lines.pop(a)
        case 1:
            lines.insert(a, lines[b])
        case 2:
            lines[a], lines[b] = lines[b], lines[a]
        case 3 if len(lines) > 2:
            lines[a:a] = [lines[b]] * 20
        case _:
            lines = lines[: a + 1]
    return "\n".join(lines)


def _character(text: str, rng: random.Random, words: Sequence[str]) -> str:
    at = rng.randrange(len(text) + 1)
    kept = text[at + 1 :] if rng.random() < 0.5 else text[at:]
    return text[:at] + rng.choice(MARKS) + kept


def _nesting(text: str, rng: random.Random, words: Sequence[str]) -> str:
    """Brackets around something, many times, and sums and products that grow when they are multiplied out."""
    depth = rng.choice((1, 3, 50, 1000, 20_000))
    opened, closed = rng.choice(("()", "[]", "{}", "<>"))
    match rng.randrange(4):
        case 0:
            return replace_one(r"\w+", text, rng, lambda m: opened * depth + m[0] + closed * depth)
        case 1:
            factors = "*".join(f"(A{i} + B{i})" for i in range(rng.choice((3, 12, 30))))
            return replace_one(r"(?<=[\[<, ])(?:\d+|[A-Z]\w*)(?=[\],> ])", text, rng, lambda _: factors)
        case 2:
            sign = rng.choice(("min(A, ", "max(B, ", "(C // ", "(D % ", "-(", "(1 + "))
            sizes = sign * depth + "E" + ")" * depth
            return replace_one(r"(?<=[\[<, ])(?:\d+|[A-Z]\w*)(?=[\],> ])", text, rng, lambda _: sizes)
        case _:
            return replace_one(r"\([^()\n]*\)", text, rng, lambda m: opened * depth + m[0] + closed * depth)


def _list(text: str, rng: random.Random, words: Sequence[str]) -> str:
    """An item of a list doubled, dropped, or repeated many times."""
    count = rng.choice((0, 2, 2, 40, 3000))
    return replace_one(r"[\w%.]+, ", text, rng, lambda m: m[0] * count)


_TEXT_CHANGES = (_number, _number, _number, _name, _name, _value, _value, _lines, _lines, _character, _nesting, _list)


def text_bytes(text: str, rng: random.Random) -> bytes:
    """A text as bytes, lone surrogates and all."""
    return text.encode("utf-8", "surrogatepass")
