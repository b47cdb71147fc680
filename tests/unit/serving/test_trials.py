"""Grammars of strangers: those that take too long are found out in a process that can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strata.errors import OptionError, RequestError
from strata.models import Decoder, Grammar
from strata.models import grammar as grammars
from strata.models.grammar import Matcher
from strata.serving import Engine, Server, Service, ask
from strata.serving.trial import GrammarTrials, Untried

Make = Callable[..., Decoder]
CHAT = "/v1/chat/completions"
GOOD = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
# one pattern more doubles the time: of 24, it is minutes
ENDLESS = {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.*"} for i in range(24)]}

pytest.importorskip("llguidance", reason="needs llguidance")


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    made = GrammarTrials(seconds=1.0)
    yield made
    made.close()


def chat(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": [{"role": "user", "content": "go"}], "max_tokens": 40, "response_format": form}


def test_what_takes_too_long_is_refused_and_others_are_tried_again(trials: GrammarTrials) -> None:
    trials.check(Grammar.json_schema(GOOD))
    first = trials._process
    with pytest.raises(RequestError, match="takes more than 1 s") as caught:
        trials.check(Grammar.json_schema(ENDLESS))
    assert caught.value.field == "response_format"
    assert first is not None
    assert first.poll() is not None
    with pytest.raises(RequestError, match="takes more than 1 s"):
        trials.check(Grammar.json_schema(ENDLESS), tries=False)  # it is known by now
    assert trials._process is None
    with pytest.raises(RequestError, match="regex"):
        trials.check(Grammar.json_schema({"type": "string", "pattern": "("}))
    trials.check(Grammar.regex("[a-z]+"))
    assert trials._process is not None


def test_each_is_tried_once(trials: GrammarTrials) -> None:
    with pytest.raises(Untried) as caught:
        trials.check(Grammar.json_schema(GOOD), tries=False)
    assert not trials.judge(caught.value.grammar).wrong
    trials.close()
    trials.check(Grammar.json_schema(GOOD), tries=False)
    trials.check(Grammar.json_object(), tries=False)
    assert trials._process is None


def test_a_process_that_has_died_is_started_again(trials: GrammarTrials) -> None:
    trials.check(Grammar.json_schema(GOOD))
    assert trials._process is not None
    trials._process.kill()
    trials._process.wait()
    trials.check(Grammar.regex("a+"))


def test_a_server_answers_while_a_grammar_is_tried(chat_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with one thread that reads requests."""
    go, tried = threading.Event(), GrammarTrials._tried

    def slow(self: GrammarTrials, *given: Any) -> str:
        assert go.wait(30)
        return tried(self, *given)

    monkeypatch.setattr(GrammarTrials, "_tried", slow)
    from strata.serving import HttpOptions

    service = Service(Engine(chat_model()), name="tiny")
    with Server(service, port=0, options=HttpOptions(workers=1)) as server:
        found: list[Any] = []
        asked = [threading.Thread(target=lambda: found.append(ask(server.url, CHAT, chat(GOOD)))) for _ in range(3)]
        for thread in asked:
            thread.start()
        assert ask(server.url, "/v1/completions", {"prompt": "hello", "max_tokens": 1})["choices"]
        assert not found
        go.set()
        for thread in asked:
            thread.join(30)
        assert all(f["choices"][0]["message"]["content"] in ('{"a": 1}', '{"a": 2}') for f in found)
        wrong = ask(server.url, CHAT, chat({"type": "string", "pattern": "("}))["error"]
        assert (wrong["param"], wrong["code"]) == ("response_format", "invalid_value")
    assert service.trials._process is None


def test_a_grammar_that_no_text_follows_is_the_clients_mistake(chat_model: Make) -> None:
    model = chat_model()
    with pytest.raises(OptionError, match="no text follows it"):
        Grammar.json_schema({"$ref": "#"}).matcher(model.tokenizer, model.config.vocab)


def test_a_grammar_that_comes_again_is_not_compiled_again(chat_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, begun, count = chat_model(), Matcher._begun, [0]

    def counted(self: Matcher, *given: Any) -> Any:
        count[0] += 1
        return begun(self, *given)

    monkeypatch.setattr(Matcher, "_begun", counted)
    grammar = Grammar.json_schema({**GOOD, "title": "of this test"})
    first, second = (grammar.matcher(model.tokenizer, model.config.vocab) for _ in range(2))
    assert count == [1]
    brace = model.tokenizer.encode("{", add_special=False)
    first.take(brace[0])
    assert second.allowed()[brace[0]]  # each goes its own way
    assert not first.allowed()[brace[0]]
    large = Grammar.json_schema({"enum": ["x" * 100 + str(i) for i in range(200)]})
    for _ in range(2):
        large.matcher(model.tokenizer, model.config.vocab)
    assert count == [3]


def test_schemas_that_name_themselves_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, shortest = [0], grammars._shortest

    def counted(*given: Any) -> int:
        count[0] += 1
        return shortest(*given)

    monkeypatch.setattr(grammars, "_shortest", counted)
    inner = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/A"} for i in range(100)}}
    assert Grammar.shortest({"$ref": "#/$defs/A", "$defs": {"A": inner}}) == 1 << 16
    assert count[0] < 100 * grammars.MOST_DEPTH * 3
