"""`strata chat`, `strata search`, `strata bench --compare`, the manual page: with small models that tests make."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.cli import main
from strata.cli.bench.compare import read_times
from strata.cli.chat import Conversation
from strata.cli.parser import make_parser
from strata.cli.search import passages_of, split
from strata.cli.shell.manual import page
from strata.models import PromptTokens


class Letters:
    """A tokenizer whose tokens are letters."""

    eos = (0,)

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(map(chr, ids))


class Echo:
    """A model that says its messages again, and notes which tokens it was given."""

    context = 64
    tokenizer = Letters()

    def __init__(self) -> None:
        self.read: list[int] = []

    class State:
        length = 0
        seen = None

    def start(self) -> Any:
        return Echo.State()

    def read_prompt(self, messages: list[dict[str, str]]) -> PromptTokens:
        return PromptTokens([ord(c) for m in messages for c in f"{m['role'][0]}:{m['content']};"])

    def tokens(self, ids: list[int], most: int, sampler: Any, ends: Any, state: Any) -> Any:
        self.read.append(len(ids) - state.length)
        state.length = len(ids)
        for i in range(min(3, most)):
            yield ord("xyz"[i])
            state.length += i < 2  # the last token is not read


def test_a_turn_reads_only_what_is_new() -> None:
    model = Echo()
    talk = Conversation(model, "be brief", 8, temperature=0.0)
    assert "".join(talk.reply("hi")) == "xyz"
    first = len("s:be brief;u:hi;")
    assert model.read == [first]
    # the model has read its prompt and "xy"; the template puts "a:" before the answer, so this model begins anew
    list(talk.reply("go on"))
    assert model.read[1] == first + len("a:xyz;u:go on;")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]


def test_old_turns_make_room() -> None:
    talk = Conversation(Echo(), None, 8, temperature=0.0)
    for i in range(8):
        list(talk.reply(f"message {i}"))
    assert talk.messages[-2]["content"] == "message 7"
    assert talk.prompt_tokens + 16 <= Echo.context
    assert len(talk.messages) < 16


def decoder_folder(place: Path) -> Path:
    """A Llama of random weights with a tokenizer of words and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<s>", "</s>", "<unk>", "user", "assistant", "hello", "you", "there", ":", "what", "is", "this", "that"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>", "<unk>"])
    place.mkdir()
    made.save(str(place / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}assistant :"
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(words),
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (len(words), 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (len(words), 32),
    }
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (32, 32), f"{at}self_attn.k_proj.weight": (16, 32),
            f"{at}self_attn.v_proj.weight": (16, 32), f"{at}self_attn.o_proj.weight": (32, 32),
            f"{at}mlp.gate_proj.weight": (64, 32), f"{at}mlp.up_proj.weight": (64, 32),
            f"{at}mlp.down_proj.weight": (32, 64), f"{at}input_layernorm.weight": (32,),
            f"{at}post_attention_layernorm.weight": (32,),
        }  # fmt: skip
    weights = {n: rng.standard_normal(s).astype(np.float32) / math.sqrt(s[-1]) for n, s in shapes.items()}
    st.io.save_safetensors(place / "model.safetensors", weights)
    return place


def test_chat_over_a_pipe_says_what_a_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = decoder_folder(tmp_path / "model")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello you\nwhat is this\n/save talk.json\n/exit\nnever read\n"))
    monkeypatch.chdir(tmp_path)
    assert main(["chat", str(folder), "--json", "--max-tokens", "6"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [t["message"] for t in turns] == ["hello you", "what is this"]
    said = json.loads((tmp_path / "talk.json").read_text())
    model = st.load(folder)
    asked = [{"role": "user", "content": "hello you"}]
    assert turns[0]["answer"] == model.generate(asked, max_tokens=6)
    again = [*asked, {"role": "assistant", "content": turns[0]["answer"]}, {"role": "user", "content": "what is this"}]
    assert said[:3] == again
    assert turns[1]["answer"] == model.generate(again, max_tokens=6)
    assert turns[1]["read_tokens"] < turns[1]["prompt_tokens"], "the KV cache was not used again"


# --------------------------------------------------------------------------------------------------------------- search


def test_passages_are_whole_paragraphs_with_their_lines(tmp_path: Path) -> None:
    text = "one\ntwo\n\n" + "three words here\n" * 60 + "\nfour\n"
    parts = list(split(tmp_path / "a.md", text))
    assert parts[0].line == 1
    assert all(text.splitlines()[p.line - 1] == p.text.splitlines()[0] for p in parts)
    assert "".join(p.text for p in parts).replace("\n", "") == text.replace("\n", "")
    (tmp_path / "a.md").write_text(text)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/b.md").write_text("no")
    (tmp_path / "c.bin.txt").write_bytes(b"\xff\xfe\x00")
    assert {p.file.name for p in passages_of(tmp_path, None)} == {"a.md"}
    assert list(passages_of(tmp_path, "*.rst")) == []


class Counting:
    """Vectors that count letters."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def embed(self, texts: Any, progress: Any = None) -> np.ndarray:
        many = [texts] if isinstance(texts, str) else list(texts)
        self.seen += many
        found = np.array([[t.lower().count(c) for c in "abcdefghijklmnopqrstuvwxyz"] for t in many], np.float32)
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)
        if progress is not None:
            progress(len(many), len(many))
        return found[0] if isinstance(texts, str) else found


def test_a_second_search_reads_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes, model = tmp_path / "notes", Counting()
    notes.mkdir()
    (notes / "fruit.md").write_text("banana ananas papaya")
    (notes / "tools.txt").write_text("drill screw hook")
    monkeypatch.setattr("strata.cli.search.load_model", lambda *_, **__: model)
    (tmp_path / "model.gguf").touch()

    def search(*words: str) -> dict[str, Any]:
        with st.config.using(cache_dir=tmp_path / "cache"):
            assert main(["search", str(notes), *words, "--model", str(tmp_path / "model.gguf"), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    first = search("ananas", "banana")
    assert first["embedded"] == 2
    assert Path(first["found"][0]["file"]).name == "fruit.md"
    assert first["found"][0]["score"] > first["found"][1]["score"]
    (notes / "tools.txt").write_text("hammer")
    again = search("screw")
    assert again["embedded"] == 1
    assert model.seen == ["banana ananas papaya", "drill screw hook", "ananas banana", "hammer", "screw"]


# -------------------------------------------------------------------------------------------------------------- compare


def report(best: float, name: str = "strata") -> dict[str, Any]:
    ways = [{"name": name, "threads": 1, "best": best, "median": best}]
    return {"name": "layer", "cold_compile": 0.5, "warm_compile": 0.1, "ways": ways}


def test_compare_finds_what_grew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(report(1e-3)))
    new.write_text(json.dumps(report(2e-3)))
    assert main(["bench", "--compare", str(old), str(new), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["slower"] == 1
    assert found["rows"][0]["name"] == "layer, strata, 1T"
    assert found["rows"][0]["speedup"] == 0.5
    assert found["geometric_mean"] == pytest.approx(0.5 ** (1 / 3))
    assert main(["bench", "--compare", str(new), str(old)]) == 0
    assert "2.00×" in capsys.readouterr().out
    assert main(["bench", "--compare", str(old), str(new), "--noise", "1.5"]) == 0


def test_compare_reads_the_suite_and_its_history(tmp_path: Path) -> None:
    result = {"workload": "softmax", "threads": 2, "contenders": {"strata": {"best": 0.25}, "numpy": {"best": 1.0}}}
    (tmp_path / "run.json").write_text(json.dumps({"results": [result]}))
    (tmp_path / "history.jsonl").write_text(
        json.dumps({"results": []}) + "\n" + json.dumps({"results": [result]}) + "\n"
    )
    for name in ("run.json", "history.jsonl"):
        assert read_times(str(tmp_path / name)) == {"softmax, 2T": 0.25}


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", '{"ways": []}'])
def test_compare_refuses_other_files(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(text)
    assert main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 2
    assert "not the results of strata bench" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- manual


def test_the_manual_has_every_command_and_option() -> None:
    told = page().replace("\\-", "-")
    (commands,) = [a.choices for a in make_parser()._actions if a.dest == "command"]
    assert commands is not None
    for name, sub in commands.items():  # type: ignore[attr-defined]
        assert f'.SS "strata {name}' in told
        for action in sub._actions:
            assert all(flag in told for flag in action.option_strings if flag not in ("-h", "--help"))
    assert not re.search(r"^[.'](?!TH|SH|SS|TP|B |I )", told, re.MULTILINE), "a line that roff would take as a request"


WITHOUT_JSON = {"opt", "exec", "completion", "manual", "demo"}  # which print texts, or what others print


def test_options_mean_the_same_everywhere() -> None:
    (commands,) = [a.choices for a in make_parser()._actions if a.dest == "command"]
    assert commands is not None
    meant: dict[str, set[Any]] = {}
    for name, sub in commands.items():  # type: ignore[attr-defined]
        flags = {flag: action for action in sub._actions for flag in action.option_strings}
        assert ("--json" in flags) == (name not in WITHOUT_JSON), name
        for flag in ("--device", "--threads", "--json", "--temperature", "--top-k", "--top-p", "--context"):
            if flag in flags:
                meant.setdefault(flag, set()).add((flags[flag].default, flags[flag].metavar, flags[flag].type))
        assert all(flag.startswith("--") or flag in ("-h", "-i", "-o") for flag in flags), name
    meant.pop("--context")  # a request's in serve
    assert {flag: found for flag, found in meant.items() if len(found) > 1} == {}
