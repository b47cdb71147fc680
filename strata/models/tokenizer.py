"""Tokenizers: text to ids and back, from tokenizer.json or the vocabulary of a GGUF file.

Both become a tokenizer of the `tokenizers` package, which is imported when the first text has to be read.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from strata.config import config
from strata.core import Table, over_budget
from strata.errors import FileError, MissingFileError, OptionError, StrataError
from strata.kinds import with_article
from strata.models.weights import model_text, read_json

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How llama.cpp splits text before merging, by the name in `tokenizer.ggml.pre`; GPT-2's rule is the default.
SPLITS = {
    "llama-bpe": _WORDS + r"\p{N}{1,3}|" + _REST,
    "qwen2": _WORDS + r"\p{N}|" + _REST,
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell")
MOST_GROWTH = 4096  # times as long as it was that a tokenizer may make a text
PER_SECONDS = 1_000_000  # characters of a text for which a tokenizer may take `max_tokenizer_seconds` more
LONG = 2048  # characters from which on reading a text lets go of the interpreter
PER_TOKEN = 8  # characters of a text that are read first for each token that it may have
BREAK = "\ufdd0"  # a code point that is no character: tokens are not looked for across it
MOST_TOKEN = 4096  # characters of a token of a vocabulary that is a list
_LISTED = re.compile(r'"vocab"\s*:\s*\[|"Unigram"')
MOST_SPLITS = 256  # characters of a token whose halves are looked for in the vocabulary
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # kinds of tokens in GGUF


class Tokenizer:
    """Text to ids and back. `add_special` puts what the model expects around a text."""

    def __init__(
        self, inner: Any, *, eos: Sequence[int] = (), bos: int | None = None, template: str | None = None,
        patterns: bool = False,
    ) -> None:  # fmt: skip
        self._inner = inner
        self._patterns = patterns  # of a file, which may take for ever
        self.eos, self.bos, self.template = tuple(eos), bos, template

    def encode(self, text: str, *, add_special: bool = True, limit: int | None = None) -> list[int]:
        """The ids of a text. Of one with more than `limit` tokens, no more is read than it takes to know that."""
        given = _proper(text)
        size = len(given) if limit is None else max(PER_TOKEN * limit, 256)
        while limit is not None and size < len(given):
            ids = self._encoded(given[:size], add_special)
            if len(ids) > limit + 16:  # the last few may be others with what follows
                return ids
            size *= 4
        return self._encoded(given, add_special)

    def _encoded(self, given: str, add_special: bool) -> list[int]:
        with _panics_told("reading a text"):
            work = partial(self._inner.encode_batch, [given], add_special_tokens=add_special)
            if self._patterns:
                return list(_in_time(work, len(given))[0].ids)
            if len(given) > LONG:
                return list(work()[0].ids)
            return list(self._inner.encode(given, add_special_tokens=add_special).ids)

    def encode_batch(self, texts: Sequence[str], limit: int | None = None) -> list[list[int]]:
        """Ids of many texts, each cut to `limit` with its special tokens kept."""
        with _panics_told("reading texts"):
            if limit is not None:
                self._inner.enable_truncation(limit)
            else:
                self._inner.no_truncation()
            quick = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
            whole = [_proper(text) for text in texts]
            most = None if limit is None else max(4 * PER_TOKEN * limit, LONG)
            given = whole if most is None else [text[:most] for text in whole]
            work = partial(quick, given)
            found = [e.ids for e in (_in_time(work, sum(map(len, given))) if self._patterns else work())]
            for i, text in enumerate(whole):  # a text of which too little was read
                if most is not None and len(text) > most and len(found[i]) < (limit or 0):
                    work = partial(quick, [text])
                    found[i] = (_in_time(work, len(text)) if self._patterns else work())[0].ids
            return found

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], limit: int) -> list[tuple[list[int], list[int]]]:
        """Ids of pairs of texts, cut to `limit`, and the text that each belongs to."""
        most = 4 * PER_TOKEN * limit
        with _panics_told("reading texts"):
            self._inner.enable_truncation(limit)
            given = [(_proper(a)[:most], _proper(b)[:most]) for a, b in pairs]
            work = partial(self._inner.encode_batch, given)
            size = sum(len(a) + len(b) for a, b in given)
            return [(e.ids, e.type_ids) for e in (_in_time(work, size) if self._patterns else work())]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        wrong = next((i for i in ids if not 0 <= i < 1 << 32), None)
        if wrong is not None:
            raise OptionError(f"decode: {wrong} is not the id of a token", code="O268")
        with _panics_told("making a text"):
            if self._patterns:
                work = partial(self._inner.decode_batch, [list(ids)], skip_special_tokens=skip_special)
                return str(_in_time(work, len(ids))[0])
            return str(self._inner.decode(list(ids), skip_special_tokens=skip_special))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:  # fmt: skip
        """Messages laid out by the model's own template; needs jinja2."""
        if self.template is None:
            raise OptionError("this model has no chat template", code="O260")
        try:
            from strata.models.template import fill_template
        except ImportError:
            raise OptionError("chat templates need jinja2", code="O261", fix="pip install jinja2") from None
        name = self._inner.id_to_token
        return fill_template(self.template, {
            "messages": [dict(m) for m in messages], "add_generation_prompt": add_prompt,
            "bos_token": name(self.bos) if self.bos is not None else "",
            "eos_token": name(self.eos[0]) if self.eos else "",
            **({"tools": [dict(t) for t in tools]} if tools else {}),
        })  # fmt: skip

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        limit: int | None = None,
    ) -> list[int]:  # fmt: skip
        """The ids of messages by the template. Special tokens are those of the template: in a message, their names
        are text."""
        everything, special = self._names_of_tokens
        kept = [_broken(m, special if m.get("role") == "assistant" else everything) for m in messages]
        text = self.chat(kept, tools=None if tools is None else _broken(list(tools), everything))
        ids: list[int] = []
        for part in text.split(BREAK):
            if part:
                ids += self.encode(part, add_special=False, limit=None if limit is None else max(limit - len(ids), 1))
            if limit is not None and len(ids) > limit:
                break
        return ids

    def guide(self, vocabulary: int) -> Any:
        """This tokenizer as llguidance knows it, for a model with so many tokens."""
        made = self._guides.get(vocabulary)
        if made is None:
            import llguidance

            with _panics_told("making a grammar's vocabulary", code="F149"):
                ends = [e for e in self.eos if e < vocabulary] or None
                made = llguidance.LLTokenizer(self._inner.to_str(), n_vocab=vocabulary, eos_token=ends)
            self._guides[vocabulary] = made
        return made

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a character."""
        name = self._inner.id_to_token(token)
        if name is not None and self._letters and all(c in self._letters for c in name):
            return bytes(self._letters[c] for c in name)
        if name is not None and re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        return self.decode([token], skip_special=False).encode()

    @cached_property
    def _letters(self) -> dict[str, int]:
        """The bytes that letters stand for in a vocabulary of bytes; none in others."""
        if '"ByteLevel"' not in json.dumps(_described(self._inner.decoder)):
            return {}
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
        others = [b for b in range(256) if b not in shown]
        return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(others)}

    def tokens_of_letters(self, letters: int) -> int:
        """About so many tokens JSON of so many letters has."""
        return round(letters * self._tokens_per_letter)

    @cached_property
    def _tokens_per_letter(self) -> float:
        text = '{"name": "", "identifier": 0, "description": ["a"], "is_open": null}'
        return len(self.encode(text, add_special=False)) / len(text)

    @cached_property
    def matchers(self) -> Table[tuple[int, str], Any]:
        """Matchers of grammars at their start, by the size of the vocabulary and the grammar's text."""
        return Table("matchers")

    @cached_property
    def _guides(self) -> dict[int, Any]:
        return {}

    def id_of(self, name: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        found: int | None = self._inner.token_to_id(name)
        return found

    def name_of(self, token: int) -> str:
        """The name of a token in the vocabulary; empty where there is no such token."""
        return str(self._inner.id_to_token(token) or "")

    def special_id(self, name: str) -> int | None:
        """The id of a token that was added to the vocabulary under this name as a special one."""
        found = self._inner.get_added_tokens_decoder().items()
        return next((i for i, token in found if token.special and token.content == name), None)

    @cached_property
    def _names_of_tokens(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        """Patterns that find the places where a token of the vocabulary is named that no text is meant to have: of all
        that were added to it, and of the control tokens among them."""
        with _panics_told("reading the vocabulary"):
            added = self._inner.get_added_tokens_decoder().values()
        made = []
        for found in ([t.content for t in added], [t.content for t in added if t.special]):
            names = "|".join(re.escape(n) for n in found if len(n) > 1)
            made.append(re.compile(f"(?=(?:{names}))") if names else None)
        return made[0], made[1]


class TextModel:
    """A model of texts, whose tokenizer is made when it is first needed."""

    _make_tokenizer: Callable[[], Tokenizer]
    _tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer


def _broken(value: Any, names: re.Pattern[str] | None) -> Any:
    """Messages with a break behind the first letter of each name of a special token, so that it is read as text."""
    if isinstance(value, str):
        text = value.replace(BREAK, "\ufffd")
        places = [0, *(m.start() + 1 for m in names.finditer(text)), len(text)] if names is not None else [0, len(text)]
        return BREAK.join(text[a:b] for a, b in pairwise(places))
    if isinstance(value, Mapping):
        return {k: v if k in ("role", "type") else _broken(v, names) for k, v in value.items()}
    return [_broken(v, names) for v in value] if isinstance(value, (list, tuple)) else value


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise OptionError(
            "reading text needs the package tokenizers", code="O263", fix="pip install tokenizers"
        ) from None
    return tokenizers


def folder_tokenizer(folder: Path) -> Tokenizer:
    """From tokenizer.json, with the special tokens that the folder's other files name."""
    place = folder / "tokenizer.json"
    if not place.exists():
        raise MissingFileError(f"{folder} has no tokenizer.json", code="F146")
    text = model_text(place)
    _check_lengths(text, place)
    with _panics_told(f"{place} cannot be read", code="F146"):
        inner = _library().Tokenizer.from_str(text)
        _without_limits(inner, str(place))
    settings: dict[str, Any] = {}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists():
            settings |= {k: v for k, v in read_json(folder / name).items() if v is not None}
    ends = settings.get("eos_token_id", _id_of(inner, settings.get("eos_token")))
    eos = [i for i in (ends if isinstance(ends, list) else [ends]) if _is_id(i)]
    bos = settings.get("bos_token_id", _id_of(inner, settings.get("bos_token")))
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        template = model_text(folder / "chat_template.jinja")
    if isinstance(template, list):
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise FileError(f"{folder}: the chat template is {with_article(type(template))}, not a text", code="F155")
    return Tokenizer(inner, eos=eos, bos=bos if _is_id(bos) else None, template=template, patterns=_has_patterns(inner))


def _check_lengths(text: str, place: Path) -> None:
    """Unigram models, whose vocabulary is a list, keep tokens in a tree as deep as the longest: it ends the process."""
    if not _LISTED.search(text):
        return
    try:
        model = json.loads(text)["model"]
        longest = max((len(t[0]) for t in model["vocab"] if t and isinstance(t[0], str)), default=0)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return  # the package says what is wrong with it
    if longest > MOST_TOKEN:
        raise FileError(f"{place}: a token of {longest:,} characters, {MOST_TOKEN:,} are the most", code="F146")


def _id_of(inner: Any, token: Any) -> Any:
    """The id of a special token, given as a text or as a description of one."""
    content = str(token.get("content", "") if isinstance(token, dict) else token or "")
    return inner.token_to_id(content) if _is_proper(content) else None


def _is_id(x: Any) -> bool:
    return type(x) is int and 0 <= x < 1 << 31


def _is_proper(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _proper(text: Any) -> str:
    if not isinstance(text, str):
        raise OptionError(f"a text is needed, got {with_article(type(text))}", code="O268")
    if not text.isascii() and not _is_proper(text):
        raise OptionError("the text has half of a surrogate pair, which is not a character", code="O268")
    return text


def _in_time(work: Callable[[], Any], size: int) -> Any:
    """What a call gives that lets go of the interpreter: beside it, the seconds are counted, and signals are heard.

    Nothing ends a regular expression: where it takes too long, its thread is left behind.
    """
    done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            done.put((None, error))

    threading.Thread(target=run, name="strata-tokenizer", daemon=True).start()
    seconds = config().max_tokenizer_seconds * (1 + size / PER_SECONDS)
    try:
        result, error = done.get(timeout=seconds)
    except Empty:
        what = f"the tokenizer takes more than {seconds:.3g} s for {size:,} characters"
        raise over_budget("max_tokenizer_seconds", seconds, what, is_all=False) from None
    if error is not None:
        raise error
    return result


@contextmanager
def _panics_told(what: str, code: str = "F149") -> Iterator[None]:
    """What goes wrong inside the package is a FileError: it raises nothing finer, and its panics are no Exceptions."""
    try:
        yield
    except StrataError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt, or the end of the process
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        told = what if code == "F146" else f"{what}: the tokenizer fails"
        raise FileError(f"{told}: {reason[:300]}", code=code) from None


def _without_limits(inner: Any, place: str) -> None:
    """Padding and truncation are ours to decide, not the file's; what makes texts grow has a bound."""
    inner.no_padding()
    inner.no_truncation()
    for part in (inner.normalizer, inner.decoder):
        growth = _growth(_described(part))
        if growth > MOST_GROWTH:
            raise FileError(
                f"{place}: its steps make a text {growth:.3g} times as long, at most {MOST_GROWTH} are allowed",
                code="F146",
            )


def _described(part: Any) -> Any:
    """A step of a tokenizer as its file says it; None where it has none."""
    state = getattr(part, "__getstate__", lambda: None)()
    return json.loads(state) if isinstance(state, (bytes, str)) else None


def _has_patterns(inner: Any) -> bool:
    """Whether a step has a regular expression of its own."""
    return any('"Regex"' in json.dumps(_described(x)) for x in (inner.normalizer, inner.pre_tokenizer, inner.decoder))


def _growth(step: Any) -> float:
    """How many times as long a step of a normaliser or decoder makes a text, at most."""
    if not isinstance(step, dict):
        return 1.0
    total = 1.0
    for inner in (*(step.get("normalizers") or ()), *(step.get("decoders") or ())):
        total = min(total * _growth(inner), 1e30)
    if step.get("type") == "Replace":
        pattern = step.get("pattern")
        found, made = str(pattern.get("String", "")) if isinstance(pattern, dict) else "", str(step.get("content", ""))
        # an expression may find nothing, between any two characters
        total *= max(1.0, len(made) / len(found)) if found else 1.0 + len(made)
    return total


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """From the vocabulary of a GGUF file: byte-level BPE, or SentencePiece's BPE over scores."""
    model = metadata.get("tokenizer.ggml.model")
    names, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(model, str) or model not in ("gpt2", "llama") or names is None:
        raise FileError(f"gguf: a tokenizer of the kind {model!r} is not known: gpt2, llama", code="F147")
    tokens = _texts(metadata, "tokens")
    kind = [NORMAL] * len(tokens) if kinds is None else _numbers(metadata, "token_type", "iu").tolist()
    if len(kind) != len(tokens):
        raise FileError(f"gguf: {len(tokens)} tokens have {len(kind)} kinds", code="F147")
    with _panics_told("the vocabulary cannot be read", code="F147"):
        return _gguf_tokenizer(metadata, model, tokens, kind)


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{key}", ())
    made: list[Any] = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else [None]
    if not all(isinstance(x, str) for x in made):
        raise FileError(f"gguf: tokenizer.ggml.{key} is not a list of texts", code="F147")
    return made


def _numbers(metadata: Mapping[str, Any], key: str, kinds: str) -> np.ndarray:
    found = metadata.get(f"tokenizer.ggml.{key}")
    made = np.asarray(found) if isinstance(found, (np.ndarray, list)) else np.array("")
    if made.ndim != 1 or (made.dtype.kind not in kinds and made.size):
        raise FileError(f"gguf: tokenizer.ggml.{key} is not a list of numbers", code="F147")
    return made


def _gguf_tokenizer(metadata: Mapping[str, Any], model: str, tokens: list[str], kind: list[int]) -> Tokenizer:
    inner = _byte_level(metadata, tokens) if model == "gpt2" else _sentence_piece(metadata, tokens, kind)
    library = _library()
    special = [library.AddedToken(t, normalized=False, special=k == CONTROL)
               for t, k in zip(tokens, kind, strict=True) if k in (CONTROL, USER)]  # fmt: skip
    inner.add_special_tokens([t for t in special if t.special])
    inner.add_tokens([t for t in special if not t.special])
    found = {n: metadata.get(f"tokenizer.ggml.{n}_token_id") for n in ("bos", "eos", "eot")}
    for name, number in found.items():
        if number is not None and not (type(number) is int and 0 <= number < len(tokens)):
            raise FileError(
                f"gguf: the {name} token {number!r} is outside the vocabulary of {len(tokens)} tokens", code="F147"
            )
    if metadata.get("tokenizer.ggml.add_bos_token", model == "llama") is True and found["bos"] is not None:
        name = tokens[found["bos"]]
        inner.post_processor = library.processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A $B", special_tokens=[(name, found["bos"])]
        )
    eos = [n for n in dict.fromkeys((found["eos"], found["eot"])) if n is not None]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(inner, eos=eos, bos=found["bos"], template=template if isinstance(template, str) else None)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    library = _library()
    merges = [tuple(m.split(" ", 1)) for m in _texts(metadata, "merges")]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    try:
        model = library.models.BPE(vocabulary, merges)
    except Exception:  # noqa: BLE001 - the library refuses merges of what is no token; they can never be used
        known = [m for m in merges if len(m) == 2 and {m[0], m[1], m[0] + m[1]} <= vocabulary.keys()]
        model = library.models.BPE(vocabulary, known)
    inner = library.Tokenizer(model)
    pre = str(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    kinds = library.pre_tokenizers
    if pre in DIGITS_APART:
        first = [kinds.Digits(individual_digits=True), kinds.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif pre in SPLITS and pre != "gpt-2":
        first = [
            kinds.Split(library.Regex(SPLITS[pre]), "isolated"),
            kinds.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        first = [kinds.ByteLevel(add_prefix_space=False, use_regex=True)]
    inner.pre_tokenizer = kinds.Sequence(first)
    inner.decoder = library.decoders.ByteLevel()
    return inner


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], kind: list[int]) -> Any:
    """Merges follow the scores: of two pieces side by side, the pair whose joined piece scores highest goes first."""
    library = _library()
    scores = _numbers(metadata, "scores", "f") if "tokenizer.ggml.scores" in metadata else ()
    if len(scores) != len(tokens):
        raise FileError(f"gguf: {len(tokens)} tokens need as many scores", code="F147")
    vocabulary = {t: i for i, t in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        if kind[i] == NORMAL and 1 < len(token) <= MOST_SPLITS:
            merges += [(-float(scores[i]), i, token[:at], token[at:]) for at in range(1, len(token))
                       if token[:at] in vocabulary and token[at:] in vocabulary]  # fmt: skip
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise FileError(
            f"gguf: the unknown token {unknown!r} is outside the vocabulary of {len(tokens)} tokens", code="F147"
        )
    pairs = [(a, b) for *_, a, b in sorted(merges)]
    model = library.models.BPE(vocabulary, pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    inner = library.Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [library.normalizers.Prepend("▁")] if prefix else []
    inner.normalizer = library.normalizers.Sequence([*steps, library.normalizers.Replace(" ", "▁")])
    undo = library.decoders
    inner.decoder = undo.Sequence(
        [undo.Replace("▁", " "), undo.ByteFallback(), undo.Fuse(), *([undo.Strip(" ", 1, 0)] if prefix else [])]
    )
    return inner
