"""Tokenizers and chat templates that ask for too much, or fail inside: typed errors, never an abort or a panic."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from strata.config import using
from strata.errors import BudgetError, FileError, OptionError, StrataError
from strata.models import folder_tokenizer

pytest.importorskip("tokenizers", reason="needs tokenizers")
pytest.importorskip("jinja2", reason="needs jinja2")

from strata.models import template
from strata.models.template import fill_template
from tests.fuzz.mutate.tokenizers import sound_tokenizers

VALUES = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " a\nb "}],
    "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>",
}  # fmt: skip


def folder(tmp_path: Path, made: Any, **settings: Any) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("size", [2_000_000_000, 2**63, 8])
@pytest.mark.parametrize("at", range(4))
def test_padding_and_truncation_of_the_file_are_not_used(at: int, size: int, tmp_path: Path) -> None:
    made = sound_tokenizers()[at]
    made |= {"padding": None, "truncation": None}
    plain = folder_tokenizer(folder(tmp_path, made)).encode("hello hello hello hello")
    made["padding"] = {"strategy": {"Fixed": size}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
    made["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    found = folder_tokenizer(folder(tmp_path, made))
    assert found.encode("hello hello hello hello") == plain
    assert found.encode_batch(["hello hello hello hello"]) == [plain]
    assert len(found.encode_batch(["hello hello hello hello"], 3)[0]) == min(3, len(plain))


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", r"(\w+\s?)+$"])
def test_an_expression_that_tries_too_many_ways_is_a_typed_error(pattern: str, tmp_path: Path) -> None:
    made = sound_tokenizers()[0] | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "invert": False,
                                                      "behavior": "Isolated"}}  # fmt: skip
    found = folder_tokenizer(folder(tmp_path, made))
    for call in (found.encode, lambda text: found.encode_batch([text])):
        with pytest.raises(FileError, match="the tokenizer fails") as caught:
            call("a" * 40 + "!")
        assert caught.value.code == "F149"


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_an_expression_that_takes_too_long_is_a_typed_error(part: str, tmp_path: Path) -> None:
    """Of few ways at each place, and of many places: the engine's own limit counts the ways alone."""
    pattern = {"pattern": {"Regex": "a*a*[b-d][b-d]"}}
    step = (
        {"type": "Split", "invert": False, "behavior": "Isolated"} if part == "pre_tokenizer" else {"type": "Replace"}
    )
    made = sound_tokenizers()[0] | {part: step | pattern | ({} if part == "pre_tokenizer" else {"content": ""})}
    found = folder_tokenizer(folder(tmp_path, made))
    assert found.encode("abc") == found.encode_batch(["abc"])[0]
    for call in (found.encode, lambda text: found.encode_batch([text])):
        with (
            using(max_tokenizer_seconds=0.05),
            pytest.raises(BudgetError, match="the tokenizer takes more than") as told,
        ):
            call("a" * 700 + "be")
        assert told.value.setting == "max_tokenizer_seconds"


def test_steps_that_make_texts_grow_without_end(tmp_path: Path) -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
    made = sound_tokenizers()[1] | {"normalizer": {"type": "Sequence", "normalizers": [step] * 4}}
    with pytest.raises(FileError, match="times as long"):
        folder_tokenizer(folder(tmp_path, made))


def test_many_steps_that_replace_one_character_by_another_are_no_growth(tmp_path: Path) -> None:
    made = sound_tokenizers()[0]
    steps = [{"type": "Replace", "pattern": {"String": chr(0xFF01 + i)}, "content": chr(0x21 + i)} for i in range(90)]
    made["normalizer"] = {"type": "Sequence", "normalizers": steps}
    tokenizer = folder_tokenizer(folder(tmp_path, made))
    assert tokenizer.encode("ｈｅｌｌｏ") == tokenizer.encode("hello")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model": 3}', "[" * 100_000])
def test_what_is_no_tokenizer(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(FileError, match=r"tokenizer\.json"):
        folder_tokenizer(tmp_path)


@pytest.mark.parametrize("length", [4096, 4097, 300_000])
def test_tokens_that_are_too_long_for_a_tree(length: int, tmp_path: Path) -> None:
    made = {"version": "1.0", "model": {"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0], ["x" * length, -1.0]]}}
    if length > 4096:
        with pytest.raises(FileError, match=f"a token of {length:,} characters, 4,096 are the most") as caught:
            folder_tokenizer(folder(tmp_path, made))
        assert caught.value.code == "F146"
    else:
        assert folder_tokenizer(folder(tmp_path, made)).encode("x" * length) == [1]


def test_a_missing_tokenizer_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        folder_tokenizer(tmp_path)
    assert isinstance(caught.value, FileError)


def test_texts_and_ids_that_are_none(tmp_path: Path) -> None:
    found = folder_tokenizer(folder(tmp_path, sound_tokenizers()[1]))
    for wrong in ("a\ud800", 3, None):
        with pytest.raises(OptionError):
            found.encode(wrong)  # type: ignore[arg-type]
        with pytest.raises(OptionError):
            found.encode_batch(["a", wrong])  # type: ignore[list-item]
    for ids in ([-1], [2**40]):
        with pytest.raises(OptionError, match="is not the id of a token"):
            found.decode(ids)


def test_special_tokens_that_are_none(tmp_path: Path) -> None:
    made = sound_tokenizers()[1]
    odd = {
        "eos_token_id": [2**40, -1, True, "x", 1],
        "bos_token_id": 2**70,
        "chat_template": "{{ bos_token }}{{ eos_token }}",
    }
    found = folder_tokenizer(folder(tmp_path, made, **odd))
    assert (found.eos, found.bos) == ((1,), None)
    assert found.chat([]) == "</s>"


# ------------------------------------------------------------------------------------------------------------ templates


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ m['role'] }}: {{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
         "user: hello</s>\nassistant: a\nb</s>\n"),
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.first }}{% endfor %}",
         "1False2True2True2False"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro f(x) %}<{{ x | upper }}>{% endmacro %}{{ f('a') ~ f('b') }}", "<A><B>"),
        ("{{ messages | tojson }}",  # in the given order, as templates are filled in by those who train with them
         '[{"role": "user", "content": "hello"}, {"role": "assistant", "content": " a\\nb "}]'),
        ("{{ '<é&>' | tojson }}", '"<é&>"'),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
         "assistant"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user, assistant"),
        ("{% for a, b in {'x': [1, 2], 'y': (3,)}.items() %}{{ a }}{{ b[0] }}{% endfor %}", "x1y3"),
        ("{{ messages[1].content.strip().split('\n')[-1] }}{{ '%s-%d' % ('a', 3) }}{{ '{:>3}'.format(1) }}",
         "ba-3  1"),
        ("{{ messages[::-1][0].role }}{{ ('ab' * 2) | replace('a', 'c') }}{{ 7 // 2 }}{{ 2 ** 10 }}",
         "assistantcbcb31024"),
        ("{% if add_generation_prompt %}A:{% endif %}{% set x %}q{{ 1 }}{% endset %}{{ x }}", "A:q1"),
        ("{% for m in messages recursive %}{{ m.role[0] }}{% endfor %}{{ range(3) | list }}{{ [1, 2] + [3] }}",
         "ua[0, 1, 2][1, 2, 3]"),
    ],
)  # fmt: skip
def test_what_templates_do(template: str, text: str) -> None:
    assert fill_template(template, VALUES) == text


STEPS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize("body", ["", "{{ i }}", "{% set x = j %}"])
def test_loops_have_a_budget(body: str) -> None:
    with pytest.raises(BudgetError) as caught:
        fill_template(STEPS.replace("BODY", body), VALUES)
    assert caught.value.setting in ("max_steps", "max_template_seconds")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 2000000000 }}",
        "{{ 2000000000 * 'a' }}",
        "{{ ['a'] * 2000000000 }}",
        "{{ 'a' | center(2000000000) }}",
        "{{ 'a'.rjust(2000000000) }}",
        "{{ '%2000000000d' % 1 }}",
        "{{ '%*d' % (2000000000, 1) }}",
        "{{ '%2000000000d' | format(1) }}",
        "{{ '{:2000000000}'.format('a') }}",
        "{{ '{:{}}'.format('a', 2000000000) }}",
        "{{ '\t'.expandtabs(2000000000) }}",
        "{{ 'a' | indent(2000000000, true) }}",
        "{{ messages | tojson(indent=2000000000) }}",
        "{{ 'a'.replace('', 'b' * 9999).replace('b', 'c' * 9999).replace('c', 'd' * 9999) }}",
        "{{ (['a' * 9999] * 999) | join(' ' * 99999) }}",
        "{{ (' ' * 99999).join(['a'] * 9999) }}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
        "{% for i in range(9999) %}{% set x %}{{ 'a' * 99999 }}{% endset %}{% endfor %}",
        "{% for i in range(99999) %}" + "static text " * 999 + "{% endfor %}",
        "{% macro f() %}" + "text " * 999 + "{% endmacro %}{% for i in range(99999) %}{{ f() }}{% endfor %}",
        "{{ ('a' * 9999999) | list | length }}",
        "{{ ('a ' * 9999999).split() }}",
    ],
)
def test_texts_have_a_budget(template: str) -> None:
    with pytest.raises(BudgetError) as caught:
        fill_template(template, VALUES)
    assert caught.value.setting == "max_template_bytes"


@pytest.mark.parametrize(
    "template",
    [
        "{{", "{% if %}", "{{ 1 / 0 }}", "{{ x.y }}", "{% include 'x' %}", "{{ ''.__class__.__mro__ }}",
        "{{ 9 ** 99999 }}",
        "{{ messages.append(1) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ " + "(" * 5000 + "1",
        "{{ lipsum() }}",
        "{% for i in range(99999999) %}{% endfor %}", "{{ (10 ** 5000) | string }}",
    ],
)  # fmt: skip
def test_templates_that_cannot_be_filled_in(template: str) -> None:
    with pytest.raises(FileError) as caught:
        fill_template(template, VALUES)
    assert caught.value.code == "F155"


def test_a_template_may_refuse() -> None:
    with pytest.raises(OptionError, match="the chat template says: roles must alternate"):
        fill_template("{{ raise_exception('roles must alternate') }}", VALUES)


def test_the_length_of_a_long_talk_is_cheap() -> None:
    """Asked for at every message, as templates do that look back from the end."""
    template = "{% for m in messages %}{{ 'x' if (messages|length - 1) - loop.index0 == 0 }}{% endfor %}"
    talk = [{"role": "user", "content": "hello"}] * 5000
    assert fill_template(template, {"messages": talk}) == "x"


def test_time_is_a_budget() -> None:
    with using(max_template_seconds=1e-9), pytest.raises(BudgetError, match="max_template_seconds"):
        fill_template("{% for m in messages %}{{ m.content }}{% endfor %}", VALUES)


def test_the_names_of_the_counters_cannot_be_taken() -> None:
    template = "{% set each = 3 %}{% set whole = 3 %}" + STEPS
    with using(max_steps=1000), pytest.raises(StrataError, match="max_steps"):
        fill_template(template, VALUES)


def test_a_template_is_compiled_once_and_each_use_has_its_own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for i in range(n) %}{{ x }}{% endfor %}{# compiled once #}"
    compiled: list[str] = []
    inner = template._compiled
    monkeypatch.setattr(template, "_compiled", lambda text: compiled.append(text) or inner(text))
    with using(max_steps=100), ThreadPoolExecutor(4) as threads:
        settings = [copy_context() for _ in range(24)]

        def use(at: int) -> str:
            return settings[at].run(fill_template, source, {"n": 30 if at % 3 else 300, "x": at})

        for at, made in enumerate([threads.submit(use, at) for at in range(24)]):
            if at % 3:
                assert made.result() == str(at) * 30
            else:
                with pytest.raises(BudgetError, match="takes 101 steps"):
                    made.result()
    assert compiled == [source]
