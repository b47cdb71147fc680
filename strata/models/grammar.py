"""Constrained generation: grammars and JSON schemas as masks over the vocabulary, by llguidance.

A grammar is written once (`Grammar.json_schema`, `Grammar.lark`); each generation follows it with a matcher of its own,
which says before every token which ones may come. A JSON text is brought to its end within the tokens that it may have:
when few are left, strings, lists and objects are closed as soon as the grammar lets them.
"""

from __future__ import annotations

import json
import string
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from strata.errors import OptionError, RunError
from strata.models.tokenizer import Tokenizer

MOST_BYTES: Final = 1 << 20  # of a grammar
MOST_KEPT: Final = 16 << 10  # bytes of one whose matcher is kept for those who follow it later
ANY_OBJECT: Final = {"type": "object"}
# separators as json.dumps writes them, and no room for endless white space
JSON_LAYOUT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# preferred in this order when few tokens are left, outside of a string: what closes, then values that open nothing
CLOSING: Final = ("}", "]", ",", '"', "null", "true", "false", "n", "t", "f", *"0123456789", "-", "Ġ", "▁")
LEAST_CLOSING, MOST_DEPTH = 32, 12
# letters of which one or two may lead to the end of a string that has a form, such as a time or an address
LETTERS: Final = (*(chr(c) for c in range(33, 127) if chr(c) not in '"\\0'), "0")  # there is no year 0
JOINTS: Final = ("@", ".", "-", ":", "/", "T", "Z", "+", "1", "0", "a")
OTHERS: Final = " " + string.punctuation.translate({34: "", 92: ""})  # but for quotes and backslashes
KINDS: Final = (*OTHERS, string.digits, string.ascii_uppercase, string.ascii_lowercase)  # first what ends a word
MOST_TRIES: Final = 1024  # letters that a generation tries in search of the end of a string
FORMATS: Final = {"uuid": 36, "date-time": 20, "ipv6": 16}  # letters of strings that have a form, at least


class Grammar:
    """What a generation has to follow, as text for llguidance; `matcher` follows it once."""

    json_layout: Final = JSON_LAYOUT  # `x-guidance` of a JSON schema inside another grammar

    def __init__(
        self, text: str, closing: int = 0, required: Sequence[str] = (), *, is_recursive: bool = False
    ) -> None:
        if len(text) > MOST_BYTES:
            raise OptionError(f"grammar: {len(text)} bytes are more than {MOST_BYTES}", code="O625")
        self.text = text
        self.required = tuple(required)  # names that objects need, to be written first when few tokens are left
        self.closing = closing  # letters that it may take to close what is open; 0 where nothing has to be closed
        self.is_recursive = is_recursive  # each level that is open may need about a quarter of that

    @staticmethod
    def shortest(schema: Any) -> int:
        """About so many letters a short text of a schema has."""
        return _shortest(schema, schema, MOST_DEPTH, {})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON of a schema; an empty one is any JSON."""
        library = _library()
        if not isinstance(schema, (Mapping, bool)):
            raise OptionError(f"grammar: a JSON schema is an object, got {type(schema).__name__}", code="O625")
        try:
            text = library.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_LAYOUT)
            names, recursive = sorted(_required(schema, MOST_DEPTH)), '"$ref"' in json.dumps(schema)
            return cls(text, cls.shortest(schema), names, is_recursive=recursive)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error)) from None

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema(ANY_OBJECT)

    @classmethod
    def lark(cls, text: str, closing: int = 0) -> Grammar:
        """A grammar in llguidance's dialect of Lark."""
        return cls(_library().LLMatcher.grammar_from_lark(text), closing)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """What a regular expression matches as a whole."""
        return cls(_library().LLMatcher.grammar_from_regex(pattern))

    def matcher(self, tokenizer: Tokenizer, vocabulary: int) -> Matcher:
        """A matcher at the start of a generation."""
        return Matcher(self, tokenizer, vocabulary)


class Matcher:
    """Follows one generation through a grammar."""

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, vocabulary: int) -> None:
        known = tokenizer.guide(vocabulary)
        self._vocabulary = vocabulary
        self._bits = np.zeros((vocabulary + 31) // 32, np.int32)
        if len(grammar.text) > MOST_KEPT:
            self._inner = self._begun(known, grammar)
        else:
            key = (vocabulary, grammar.text)
            self._inner = tokenizer.matchers.get_or_make(key, lambda: self._begun(known, grammar)).deep_copy()
        size = tokenizer.tokens_of_letters(grammar.closing)
        self._closing = LEAST_CLOSING + size * 3 // 2 if grammar.closing else 0  # tokens from the last on that close
        self._level = 1 + (size // 4 if grammar.is_recursive else 0)  # and more for each level that is open
        self._open = 0
        ends = [e for e in tokenizer.eos if e < vocabulary]
        self._closers = [*ends, *(i for i in map(tokenizer.id_of, CLOSING) if i is not None)]
        self._quote = tokenizer.id_of('"')
        self._letters, self._joints = (
            [i for i in map(tokenizer.id_of, some) if i is not None] for some in (LETTERS, JOINTS)
        )
        self._bytes = known.decode_bytes
        self._quoted = self._escaped = False  # what was said ends inside a string, behind a backslash
        self._string = b""  # what was said of that string
        self._required = [name.encode() for name in grammar.required]
        self._id_of = tokenizer.id_of
        self._way: list[int] = []  # tokens that lead to the end of the string
        self._tries = MOST_TRIES

    def _begun(self, known: Any, grammar: Grammar) -> Any:
        """A matcher of the library at the start. Its first mask is computed here, where nobody else waits for it."""
        made = _library().LLMatcher(known, grammar.text, log_level=0)
        if made.is_error():
            raise _refused(made.get_error())
        made.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if made.is_error():
            raise _refused(f"no text follows it: {made.get_error()}")
        return made

    @property
    def is_done(self) -> bool:
        """Nothing more can come."""
        return bool(self._inner.is_stopped())

    def allowed(self, left: int | None = None) -> np.ndarray:
        """Tokens that may come next, bool[V], where so many are left in all."""
        self._inner.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._inner.is_error():
            raise RunError(f"grammar: {_first_line(self._inner.get_error())}", code="X605")
        found = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocabulary]
        if (
            left is not None
            and self._closing
            and left <= self._closing + self._open * self._level
            and not self._escaped
        ):
            closer = self._string_end(found) if self._quoted else next((i for i in self._closers if found[i]), None)
            if closer is not None:
                found = np.zeros(self._vocabulary, np.uint8)
                found[closer] = 1
        return found.view(bool)

    def _string_end(self, allowed: np.ndarray) -> int | None:
        """The quote that ends a string, or a letter on a short way to it; None where no short way is known."""
        if self._quote is None or allowed[self._quote]:
            return self._quote
        for name in self._required:  # the name of something that has to be there
            if name.startswith(self._string) and len(name) > len(self._string):
                letter = self._id_of(chr(name[len(self._string)]))
                if letter is not None and allowed[letter]:
                    return letter
        ways = [*([i] for i in self._letters), *([i, j] for i in self._joints for j in self._joints)]
        for way in ways:
            if allowed[way[0]] and self._inner.validate_tokens([*way, self._quote]) > len(way):
                return way[0]
        if not self._way:
            self._way = self._way_out()
        return self._way[0] if self._way else None

    def _way_out(self) -> list[int]:
        """Letters behind which the string may end: at first few of each kind are tried, then all. Empty where none are
        found in few tries, of which a generation has so many in all."""
        return self._searched(self._tries // 2, few=True) or self._searched(self._tries, few=False)

    def _searched(self, tries: int, *, few: bool) -> list[int]:
        """Breadth first. Of letters with the same choice behind them, one is followed: with few at each depth,
        otherwise where also the choice before it is the same."""
        bits, seen = np.zeros_like(self._bits), set[tuple[bytes, bytes | int]]()
        states: deque[tuple[Any, list[int], bytes]] = deque([(self._inner.deep_copy(), [], b"")])
        while states and tries > 0:
            state, way, before = states.popleft()
            state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            choice = bits.tobytes()
            key = (choice, len(way) if few else before)
            if state.is_error() or key in seen:
                continue
            seen.add(key)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")
            if way and self._quote is not None and allowed[self._quote]:
                return way
            for kind in KINDS:
                letters = [i for i in map(self._id_of, kind) if i is not None and allowed[i]]
                for letter in letters[:1] if few and len(letters) == len(kind) else letters:
                    tries, self._tries = tries - 1, self._tries - 1
                    following = state.deep_copy()
                    if following.consume_token(letter):
                        states.append((following, [*way, letter], choice))
        return []

    def take(self, token: int) -> None:
        """The token that was chosen."""
        if not self._inner.consume_token(token):
            raise RunError(f"grammar: {_first_line(self._inner.get_error())}", code="X605")
        self._way = self._way[1:] if self._way[:1] == [token] else []
        if self._closing:
            for byte in self._bytes([token]):
                self._string = self._string + bytes([byte]) if self._quoted else b""
                if self._quoted:
                    self._quoted = self._escaped or byte != ord('"')
                    self._escaped = byte == ord("\\") and not self._escaped
                else:
                    self._quoted = byte == ord('"')
                    self._open += (byte in b"{[") - (byte in b"}]")

    def forced(self) -> list[int]:
        """Tokens that must come next, where the grammar leaves no choice."""
        return list(self._inner.compute_ff_tokens())


def _required(schema: Any, depth: int) -> set[str]:
    """Names that objects of a schema need."""
    if depth == 0 or not isinstance(schema, (Mapping, list)):
        return set()
    found: set[str] = set()
    for name, inner in schema.items() if isinstance(schema, Mapping) else enumerate(schema):
        if name == "required" and isinstance(inner, list):
            found |= {n for n in inner if isinstance(n, str)}
        else:
            found |= _required(inner, depth - 1)
    return found


def _shortest(schema: Any, root: Any, depth: int, known: dict[tuple[int, int], int]) -> int:
    """Letters of a short text of a schema; `known` are those of its parts, by their identity and depth."""
    if not isinstance(schema, Mapping) or depth == 0:
        return 8
    key = (id(schema), depth)
    if key not in known:
        known[key] = _shortest_of(schema, root, depth, known)
    return known[key]


def _shortest_of(schema: Mapping[str, Any], root: Any, depth: int, known: dict[tuple[int, int], int]) -> int:
    def inside(part: Any) -> int:
        return _shortest(part, root, depth - 1, known)

    reference = schema.get("$ref")
    if isinstance(reference, str):
        found = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(part, {}) if part and isinstance(found, Mapping) else found
        return inside(found)
    if "const" in schema or schema.get("enum"):
        values = schema["enum"] if "const" not in schema else [schema["const"]]
        return max(len(json.dumps(v)) for v in values) if isinstance(values, list) else 8
    size = 8 if "pattern" not in schema else 24
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            size = max([size, *map(inside, schema[name])])
    inner = schema.get("properties")
    if isinstance(inner, Mapping):  # those that need not be there may have been begun
        size += sum(len(n) + 6 + inside(inner[n]) for n in inner)
    if "items" in schema:
        size += inside(schema["items"])
    size += 2 * FORMATS.get(str(schema.get("format")), 0)
    for name in ("minLength", "minItems"):
        least = schema.get(name)
        if isinstance(least, int):
            size += min(least, 4096) * (1 if name == "minLength" else 2 + inside(schema.get("items")))
    return min(size, 1 << 16)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise OptionError(
            "grammars and JSON schemas need the package llguidance", code="O626", fix="pip install llguidance"
        ) from None
    return llguidance


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "it cannot be followed")[:300]


def _refused(reason: str) -> OptionError:
    return OptionError(f"grammar: {_first_line(reason)}", code="O625")
