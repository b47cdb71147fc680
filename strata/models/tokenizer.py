"""Tokenizers: text to ids and back, from tokenizer.json or from the vocabulary inside a GGUF file.

Both become a tokenizer of the `tokenizers` package, which is imported when the first text has to be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strata.core import read_text
from strata.errors import FileError, MissingFileError, OptionError
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
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # kinds of tokens in GGUF


class Tokenizer:
    """Text to ids and back. `add_special` puts what the model expects around a text."""

    def __init__(
        self, inner: Any, *, eos: Sequence[int] = (), bos: int | None = None, template: str | None = None
    ) -> None:
        self._inner = inner
        self.eos, self.bos, self.template = tuple(eos), bos, template

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        found: list[int] = self._inner.encode(text, add_special_tokens=add_special).ids
        return found

    def encode_batch(self, texts: Sequence[str], limit: int | None = None) -> list[list[int]]:
        """Ids of many texts, each cut to `limit` with its special tokens kept."""
        if limit is not None:
            self._inner.enable_truncation(limit)
        else:
            self._inner.no_truncation()
        self._inner.no_padding()
        quick = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
        return [e.ids for e in quick(list(texts))]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_prompt: bool = True) -> str:
        """Messages laid out by the model's own template; needs jinja2."""
        if self.template is None:
            raise OptionError("this model has no chat template", code="O260")
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise OptionError("chat templates need jinja2", code="O261", fix="pip install jinja2") from None

        def refuse(message: str) -> None:
            raise OptionError(f"the chat template says: {message}", code="O262")

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        name = self._inner.id_to_token
        text: str = environment.from_string(self.template).render(
            messages=[dict(m) for m in messages], add_generation_prompt=add_prompt,
            bos_token=name(self.bos) if self.bos is not None else "", eos_token=name(self.eos[0]) if self.eos else "",
        )  # fmt: skip
        return text


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
    try:
        inner = _library().Tokenizer.from_str(read_text(place))
    except Exception as error:  # noqa: BLE001 - the package raises nothing finer
        raise FileError(f"{place} cannot be read: {error}", code="F146") from None
    settings: dict[str, Any] = {}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists():
            settings |= {k: v for k, v in read_json(folder / name).items() if v is not None}
    ends = settings.get("eos_token_id", inner.token_to_id(_content(settings.get("eos_token"))))
    eos = [i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int)]
    bos = settings.get("bos_token_id", inner.token_to_id(_content(settings.get("bos_token"))))
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        template = model_text(folder / "chat_template.jinja")
    if isinstance(template, list):
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    return Tokenizer(inner, eos=eos, bos=bos if isinstance(bos, int) else None, template=template)


def _content(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """From the vocabulary of a GGUF file: byte-level BPE, or SentencePiece's BPE over scores."""
    model = metadata.get("tokenizer.ggml.model")
    names, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if model not in ("gpt2", "llama") or names is None:
        raise FileError(f"gguf: a tokenizer of the kind {model!r} is not known: gpt2, llama", code="F147")
    tokens = list(names)
    kind = [NORMAL] * len(tokens) if kinds is None else [int(k) for k in kinds]
    if len(kind) != len(tokens):
        raise FileError(f"gguf: {len(tokens)} tokens have {len(kind)} kinds", code="F147")
    inner = _byte_level(metadata, tokens) if model == "gpt2" else _sentence_piece(metadata, tokens, kind)
    library = _library()
    special = [library.AddedToken(t, normalized=False, special=k == CONTROL)
               for t, k in zip(tokens, kind, strict=True) if k in (CONTROL, USER)]  # fmt: skip
    inner.add_special_tokens([t for t in special if t.special])
    inner.add_tokens([t for t in special if not t.special])
    found = {n: metadata.get(f"tokenizer.ggml.{n}_token_id") for n in ("bos", "eos", "eot")}
    for name, number in found.items():
        if number is not None and not (isinstance(number, int) and 0 <= number < len(tokens)):
            raise FileError(f"gguf: the {name} token {number!r} is none of {len(tokens)}", code="F147")
    if metadata.get("tokenizer.ggml.add_bos_token", model == "llama") and found["bos"] is not None:
        name = tokens[found["bos"]]
        inner.post_processor = library.processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A $B", special_tokens=[(name, found["bos"])]
        )
    eos = [n for n in dict.fromkeys((found["eos"], found["eot"])) if n is not None]
    return Tokenizer(inner, eos=eos, bos=found["bos"], template=metadata.get("tokenizer.chat_template"))


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    library = _library()
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges", ())]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    known = [
        m for m in merges if len(m) == 2 and m[0] in vocabulary and m[1] in vocabulary and m[0] + m[1] in vocabulary
    ]
    inner = library.Tokenizer(library.models.BPE(vocabulary, known))
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
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
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise FileError(f"gguf: {len(tokens)} tokens need as many scores", code="F147")
    vocabulary = {t: i for i, t in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        if kind[i] == NORMAL and len(token) > 1:
            merges += [(-float(scores[i]), i, token[:at], token[at:]) for at in range(1, len(token))
                       if token[:at] in vocabulary and token[at:] in vocabulary]  # fmt: skip
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise FileError(f"gguf: the unknown token {unknown!r} is none of {len(tokens)}", code="F147")
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
