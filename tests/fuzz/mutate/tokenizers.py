"""tokenizer.json of every kind of model, the files beside it, and chat templates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from strata.models import folder_tokenizer
from tests.fuzz.mutate.base import Files, Format
from tests.fuzz.mutate.changes import change_bytes, change_json, json_bytes

TEXTS = ("Hello, wörld! 123", "", "a" * 200, "<s> [CLS] \U0001f600 名前\n\t", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!")
TEMPLATES = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}",
    "{{ bos_token }}{{ messages[0].content | upper }}{% if add_generation_prompt %}A:{% endif %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "{% for i in range(100000000) %}x{% endfor %}", "{{ 'a' * 2000000000 }}", "{{ ['a'] * 2000000000 }}",
    "{{ 'a' | center(2000000000) }}", "{{ '%2000000000d' % 1 }}", "{{ '{:2000000000}'.format('a') }}",
    "{{ 9 ** 9 ** 9 }}", "{{ (2 ** 99999999) | string | length }}", "{{ 1 << 99999999999 }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(3) }}", "{% include 'x' %}",
    "{% import '/etc/passwd' as x %}",
    "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}", "{{ x.y.z }}",
    "{{ 1 / 0 }}",
    "{% for m in messages %}{{ m.content.replace('', 'a' * 1000) * 1000 }}{% endfor %}", "{{", "{% if %}",
    "{{ lipsum(99999) }}",
    "{{ dict(a=1) | tojson(indent=2000000000) }}", "{{ 'a' | indent(2000000000) }}", "{{ range(9) | sum(start='a') }}",
    "{{ (('a' * 1000) | list * 1000) | join(' ' * 10000) }}", "{{ 'a,' * 1000000 | wordwrap(1) }}",
    "{{ [[1] * 9999] * 9999 }}",
)  # fmt: skip
PATTERNS = ("(a+)+$", "(a|aa)+$", "(a*)*b", "[", "(?<=a+)b", r"\p{L}+|\s+", "(a{1,99}){1,99}", "(" * 500, "a{99999}",
            "", "(?i:'s|'t)", r"(\w+\s?)+$", "(x+x+)+y")  # fmt: skip


class Tokenizers(Format):
    name = "tokenizer"

    def prepare(self, folder: Path) -> None:
        self.sound = sound_tokenizers()
        for made in self.sound:
            for name, data in self._files(made, {}, random.Random(0)).items():
                (folder / name).write_bytes(data)
            assert self.attempt(folder, random.Random(0)) == "read"

    def _files(self, made: Any, more: dict[str, bytes], rng: random.Random) -> dict[str, bytes]:
        beside = {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "chat_template": TEMPLATES[0]}
        files = {
            "tokenizer.json": json.dumps(made).encode(),
            "tokenizer_config.json": json.dumps(beside).encode(),
            "config.json": b'{"model_type": "bert", "eos_token_id": 2}',
        }
        return files | more

    def mutant(self, rng: random.Random) -> Files:
        made = rng.choice(self.sound)
        match rng.randrange(10):
            case 0:
                return self._files(made, {"tokenizer.json": change_bytes(json.dumps(made).encode(), rng)}, rng)
            case 1:
                beside = {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "eos_token_id": [1, 2],
                          "chat_template": [{"name": "default", "template": rng.choice(TEMPLATES)}]}  # fmt: skip
                return self._files(made, {"tokenizer_config.json": json_bytes(change_json(beside, rng), rng)}, rng)
            case 2:
                return self._files(made, {"chat_template.jinja": _template(rng)}, rng)
            case 3:
                return self._files(_with_limits(made, rng), {}, rng)
            case 4:
                return self._files(_with_pattern(made, rng), {}, rng)
        changed = change_json(made, rng, ("BPE", "WordPiece", "Unigram", "WordLevel", "ByteLevel", "Sequence", "Split"))
        return self._files(made, {"tokenizer.json": json_bytes(changed, rng)}, rng)

    def attempt(self, folder: Path, rng: random.Random) -> str:
        made = folder_tokenizer(folder)
        for text in TEXTS:
            made.decode(made.encode(text))
        made.encode_batch(TEXTS, 16)
        made.encode_batch(TEXTS)
        made.decode([0, 1, 10**6])
        if made.template is not None:
            made.chat([{"role": "user", "content": "hello"}])
        return "read"


def _template(rng: random.Random) -> bytes:
    data = rng.choice(TEMPLATES).encode()
    return change_bytes(data, rng) if rng.random() < 0.3 else data


def _with_limits(made: Any, rng: random.Random) -> Any:
    """Fixed padding and truncation of all sizes."""
    made = json.loads(json.dumps(made))
    size = rng.choice((0, 1, 16, 2**31, 2 * 10**9, 2**63, -1, 2**64 - 1))
    made["padding"] = {
        "strategy": rng.choice(({"Fixed": size}, "BatchLongest")), "direction": "Right", "pad_id": 0,
        "pad_to_multiple_of": rng.choice((None, 0, 8, 2**31, size)), "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip
    made["truncation"] = {"direction": "Right", "max_length": rng.choice((0, 1, size)), "strategy": "LongestFirst",
                          "stride": rng.choice((0, 1, 16, size))}  # fmt: skip
    return made


def _with_pattern(made: Any, rng: random.Random) -> Any:
    """Regular expressions, some of which an engine that tries every way needs for ever."""
    made = json.loads(json.dumps(made))
    pattern = {"Regex": rng.choice(PATTERNS)}
    if rng.random() < 0.5:
        made["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "invert": False, "behavior": "Isolated"}
    else:
        made["normalizer"] = {"type": "Replace", "pattern": pattern, "content": rng.choice(("", "b", "a" * 1000))}
    return made


def sound_tokenizers() -> list[Any]:
    """Small tokenizers of each kind of model, as the values of their JSON."""
    import tokenizers as library
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    words = [
        "<s>",
        "</s>",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[PAD]",
        *"abcdefghijklmnopqrstuvwxyz",
        "he",
        "ll",
        "hello",
        "##o",
    ]
    ids = {w: i for i, w in enumerate(words)}
    bpe = library.Tokenizer(models.BPE(ids, [("h", "e"), ("l", "l")], unk_token="[UNK]", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(library.Regex(r"\p{N}|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.enable_truncation(64)
    bpe.enable_padding(length=8)
    piece = library.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    piece.normalizer = normalizers.BertNormalizer()
    piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    piece.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 3), ("[SEP]", 4)]
    )
    piece.decoder = decoders.WordPiece()
    piece.add_special_tokens(["[CLS]", "[SEP]", "<new>"])
    unigram = library.Tokenizer(models.Unigram([(w, -float(i)) for i, w in enumerate(words)], 2, False))
    unigram.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(library.Regex(" {2,}"), " "), normalizers.Prepend("▁")]
    )
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    level = library.Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    level.pre_tokenizer = pre_tokenizers.Whitespace()
    return [json.loads(t.to_str()) for t in (bpe, piece, unigram, level)]
