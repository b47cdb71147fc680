"""OpenAI's own client against the server: what it sends is understood, and what it gets is what it expects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from strata.models import Decoder, Grammar
from strata.models.chat.tools import HERMES, STYLES, Call, CallParser, style_of, tool_grammar
from strata.serving import Engine, HttpOptions, Server, Service
from strata.serving.api.requests import parse_chat
from tests.torture.schemas import wrong_answers
from tests.unit.serving.test_server import Words

openai = pytest.importorskip("openai", reason="needs openai")
pydantic = pytest.importorskip("pydantic", reason="needs pydantic")
pytest.importorskip("llguidance", reason="needs llguidance")
pytestmark = pytest.mark.filterwarnings("ignore")
KEY = "a-secret-of-ours"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"], "additionalProperties": False, "$defs": {"days": {"enum": [1, 7]}}}}}  # fmt: skip
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(chat_model: Callable[[], Decoder]) -> Iterator[Server]:
    service = Service(Engine(chat_model(), cache_tokens=4096), Words(), name="tiny")
    with Server(service, port=0, options=HttpOptions(api_keys=(KEY,))) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_chat(client: Any) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2,
        extra_body={"ignore_eos": True, "top_k": 40, "min_p": 0.0},
    )  # fmt: skip
    (choice,) = made.choices
    assert choice.finish_reason == "length"
    assert made.usage.completion_tokens == 6
    found = choice.logprobs.content
    assert len(found) == 6
    assert bytes(b for t in found for b in t.bytes).decode("utf-8", "replace") == choice.message.content
    for token in found:
        assert token.logprob == max(t.logprob for t in token.top_logprobs)
        assert len(token.top_logprobs) == 2


def test_choices_are_streamed_together(client: Any) -> None:
    options: Any = dict(model="tiny", messages=HELLO, max_tokens=12, n=3, seed=4, extra_body={"ignore_eos": True})
    whole = client.chat.completions.create(**options)
    texts = ["", "", ""]
    for part in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = part.usage
    assert texts == [c.message.content for c in whole.choices]
    assert len(set(texts)) == 3
    assert usage.completion_tokens == whole.usage.completion_tokens == 36


def test_each_step_is_told_of_every_choice(decoder: Callable[..., Decoder]) -> None:
    engine = Engine(decoder(), speculate=False)
    body = {"prompt": "hello", "n": 3, "max_tokens": 5, "stream": True, "seed": 1}
    job = Service(engine).start("/v1/completions", body)
    job.parts()
    for _ in range(5):
        engine.step()
        assert [c["index"] for p in job.parts() for c in p["choices"] if c["text"]] == [0, 1, 2]
    assert job.is_done


def test_penalties_and_biases(client: Any) -> None:
    options: Any = dict(model="tiny", prompt="hello", max_tokens=20, temperature=0)
    biased = client.completions.create(**options, logit_bias={"64": 100})
    assert len(set(biased.choices[0].text)) == 1
    varied = client.completions.create(**options, logit_bias={"64": 100}, frequency_penalty=2, presence_penalty=2)
    assert varied.choices[0].text.startswith(biased.choices[0].text[0])
    stopped = client.completions.create(**options, logit_bias={"64": 100}, stop=biased.choices[0].text[:3])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")


def test_echoed_prompts_are_scored(client: Any, chat_model: Callable[[], Decoder]) -> None:
    made = client.completions.create(
        model="tiny", prompt="once upon", echo=True, logprobs=3, max_tokens=2, temperature=0
    )
    choice = made.choices[0]
    scores = choice.logprobs
    assert choice.text.startswith("once upon")
    assert (len(scores.tokens), scores.token_logprobs[0], "".join(scores.tokens[:9])) == (11, None, "once upon")
    assert scores.text_offset[:9] == list(range(9))
    model = chat_model()
    ids = model.tokenizer.encode("once upon")
    logits = model.run(input_ids=np.array([ids], np.int32))["logits"][0].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = [logs[i, ids[i + 1]] for i in range(8)]
    assert np.allclose(scores.token_logprobs[1:9], wanted, atol=1e-4)
    assert all(s is None or max(s.values()) == pytest.approx(logs[i - 1].max(), abs=1e-4)
               for i, s in enumerate(scores.top_logprobs[:9]))  # fmt: skip
    only = client.completions.create(model="tiny", prompt=ids, echo=True, logprobs=1, max_tokens=0)
    assert only.choices[0].text == "once upon"
    assert only.usage.completion_tokens == 0


def test_schemas(client: Any) -> None:
    class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        name: str
        age: int
        tags: list[str]
        nested: dict[str, float] | None

    for seed in range(4):
        made = client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Person, max_tokens=120, seed=seed
        )
        assert isinstance(made.choices[0].message.parsed, Person)
        assert made.choices[0].finish_reason == "stop"
        made = client.chat.completions.create(
            model="tiny", messages=HELLO, response_format={"type": "json_object"}, max_tokens=60, seed=seed
        )
        assert isinstance(json.loads(made.choices[0].message.content), dict)
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}
    with pytest.raises(openai.BadRequestError, match="grammar"):
        client.chat.completions.create(model="tiny", messages=HELLO, response_format=wrong)


def test_tools(client: Any) -> None:
    options: Any = dict(model="tiny", messages=HELLO, tools=[WEATHER, CLOCK], max_tokens=160, seed=3)
    made = client.chat.completions.create(**options, tool_choice="required", parallel_tool_calls=False)
    (call,) = made.choices[0].message.tool_calls
    assert made.choices[0].finish_reason == "tool_calls"
    assert call.function.name in ("weather", "clock")
    json.loads(call.function.arguments)
    named = client.chat.completions.create(**options, tool_choice={"type": "function", "function": {"name": "weather"}})
    given = json.loads(named.choices[0].message.tool_calls[0].function.arguments)
    assert set(given) == {"city", "days"}
    assert given["days"] in (1, 7)
    parts = list(client.chat.completions.create(**options, tool_choice="required", stream=True))
    calls = [c for p in parts for choice in p.choices for c in choice.delta.tool_calls or ()]
    assert [c.index for c in calls] == list(range(len(calls)))
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    assert client.chat.completions.create(**{**options, "max_tokens": 8}, tool_choice="none").choices[0].message.content
    after = [*HELLO, made.choices[0].message.model_dump(exclude_none=True),
             {"role": "tool", "tool_call_id": call.id, "content": "mild"}]  # fmt: skip
    assert client.chat.completions.create(**{**options, "messages": after, "max_tokens": 4}, tool_choice="auto").choices
    with pytest.raises(openai.BadRequestError, match="names none of the tools"):
        client.chat.completions.create(**options, tool_choice={"type": "function", "function": {"name": "sing"}})


@pytest.mark.parametrize("style", [HERMES, *STYLES.values()])
def test_calls_are_parsed_however_they_are_cut(style: Any, chat_model: Callable[[], Decoder]) -> None:
    calls = [("weather", {"city": 'a "}{" b', "days": 7}), ("clock", {})]
    texts = [json.dumps({"name": n, style.arguments: a}) for n, a in calls]
    if style.is_list:
        text = f"{style.begin}[{', '.join(texts)}]"
    elif style.begin:
        text = "\n".join(f"{style.begin}{t}{style.end}" for t in texts)
    else:
        text, calls = texts[0], calls[:1]
    before = "Let me see. " if style.begin else ""
    for size in (1, 2, 3, 7, 1000):
        parser = CallParser(style)
        said = "".join(parser.push((before + text)[i : i + size]) for i in range(0, len(before + text), size))
        assert (said + parser.finish()).strip() == before.strip()
        assert [(c.name, json.loads(c.arguments)) for c in parser.calls] == calls
    plain = CallParser(style)
    assert "".join(plain.push(c) for c in "no call, 1 < 2") + plain.finish() == "no call, 1 < 2"
    assert all(isinstance(c, Call) for c in parser.calls)
    # what the grammar lets through is what the parser reads
    model = chat_model()
    for choice in ("auto", "required"):
        request = parse_chat({"messages": HELLO, "tools": [WEATHER, CLOCK], "tool_choice": choice})
        matcher = tool_grammar(request.tools, request.tool_choice, style, model.tokenizer).matcher(
            model.tokenizer, model.config.vocab
        )
        short = text.replace('a \\"}{\\" b', "Paris")
        for token in model.tokenizer.encode(short, add_special=False):
            assert matcher.allowed()[token], short
            matcher.take(token)
    assert style_of(f"{{% if tools %}}{style.begin}<|python_tag|>") in (style, HERMES)


def test_responses(client: Any) -> None:
    made = client.responses.create(model="tiny", input="hello", max_output_tokens=8, instructions="be brief",
                                   extra_body={"ignore_eos": True})  # fmt: skip
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.output_text
    assert made.output[0].status == "incomplete"
    again = client.responses.create(model="tiny", input="more", previous_response_id=made.id, max_output_tokens=4)
    assert again.usage.input_tokens > made.usage.input_tokens
    assert client.responses.retrieve(made.id).output_text == made.output_text
    client.responses.delete(made.id)
    with pytest.raises(openai.BadRequestError, match="there is no response"):
        client.responses.create(model="tiny", input="more", previous_response_id=made.id)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    with client.responses.stream(model="tiny", input="hello", text=text, max_output_tokens=60) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert set(json.loads(final.output_text)) == {"a"}
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    asked: Any = dict(model="tiny", input="hello", max_output_tokens=5, top_logprobs=2, temperature=0,
                      include=["message.output_text.logprobs"])  # fmt: skip
    scored = client.responses.create(**asked).output[0].content[0].logprobs
    assert len(scored) == 5
    assert all(len(s.top_logprobs) == 2 and s.logprob == s.top_logprobs[0].logprob for s in scored)
    with client.responses.stream(**asked) as stream:
        parts = [s for event in stream if event.type == "response.output_text.delta" for s in event.logprobs]
        assert [s.token for s in parts] == [s.token for s in scored]
    with pytest.raises(openai.BadRequestError, match="include is a list of"):
        client.responses.create(model="tiny", input="hello", include=["web_search_call.results"])
    tool = {"type": "function", **WEATHER["function"]}
    called = client.responses.create(
        model="tiny", input="hello", tools=[tool], tool_choice="required", max_output_tokens=160,
        parallel_tool_calls=False,
    )  # fmt: skip
    (item,) = called.output
    assert (item.type, item.name) == ("function_call", "weather")
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "mild"}
    after = client.responses.create(model="tiny", input=[result], previous_response_id=called.id, max_output_tokens=3)
    assert after.output_text


def test_vectors_and_models(client: Any, server: Server) -> None:
    made = client.embeddings.create(model="tiny", input=["banana", "x"])  # asks for base64
    assert [d.embedding for d in made.data] == [[6, 3], [1, 0]]
    short = client.embeddings.create(model="tiny", input=[[97, 97], [98]], dimensions=1)
    assert [d.embedding for d in short.data] == [[1], [1]]
    with pytest.raises(openai.BadRequestError, match="more than the 2"):
        client.embeddings.create(model="tiny", input="x", dimensions=3)
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("gpt")
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"query": "aaaa", "documents": ["x", "aaa", {"text": "axxxxx"}], "top_n": 2, "return_documents": True}
    ranked = httpx.post(f"{server.url}/v1/rerank", json=body, headers=headers).json()["results"]
    assert [(r["index"], r["document"]["text"]) for r in ranked] == [(1, "aaa"), (2, "axxxxx")]
    assert ranked[0]["relevance_score"] == pytest.approx(1.0)


def test_errors_are_those_of_the_client(client: Any, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong-key", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(openai.BadRequestError, match="does not see images"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [part]}])


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as made:
        yield made


def test_clients_of_ollama(http: httpx.Client) -> None:
    assert http.get("/api/tags").json()["models"][0]["name"] == "tiny"
    assert "version" in http.get("/api/version").json()
    assert http.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == ["completion", "tools"]
    options = {"num_predict": 5, "num_ctx": 100, "temperature": 0, "ignore_eos": True}
    body = {"model": "tiny:latest", "messages": HELLO, "options": options}
    lines = [json.loads(line) for line in http.post("/api/chat", json=body).text.splitlines()]
    whole = http.post("/api/chat", json={**body, "stream": False}).json()
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert (lines[-1]["done"], lines[-1]["done_reason"], lines[-1]["eval_count"]) == (True, "length", 5)
    made = http.post("/api/generate", json={"model": "tiny", "prompt": "x", "format": "json", "stream": False,
                                            "options": {"num_predict": 60}}).json()  # fmt: skip
    assert isinstance(json.loads(made["response"]), dict)
    assert http.post("/api/embed", json={"model": "tiny", "input": "banana"}).json()["embeddings"] == [[6, 3]]
    assert http.post("/api/show", json={"model": "gpt"}).json() == {"error": "there is no model 'gpt'"}
    usual = {"mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1.0, "typical_p": 1.0, "repeat_last_n": 64}
    assert http.post("/api/chat", json={**body, "options": {**options, **usual}}).status_code == 200
    for calls in (True, 1, {}, "x", [None], [{}], [{"function": {}}], [{"function": {"name": 1}}]):
        asked = {**body, "messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": calls}]}
        told = http.post("/api/chat", json=asked)
        assert (told.status_code, "tool_calls is a list" in told.text) == ((400, True) if calls else (200, False))
    told = http.post("/api/generate", json={"prompt": "x", "context": [1, 2]})
    assert (told.status_code, told.json()["error"].startswith("context is not supported")) == (400, True)
    for other in ({"mirostat": 2}, {"repeat_last_n": 64, "repeat_penalty": 1.2}):
        told = http.post("/api/chat", json={**body, "options": other})
        assert (told.status_code, told.json()) == (400, {"error": f"options.{next(iter(other))} = "
                                                         f"{next(iter(other.values()))} is not supported"})  # fmt: skip


def test_clients_of_ollama_that_ask_for_a_model_only(http: httpx.Client) -> None:
    """Without a prompt nothing is generated: the model is there."""
    for path, asked, said in (
        ("/api/generate", {}, {"response": ""}), ("/api/generate", {"prompt": ""}, {"response": ""}),
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
    ):  # fmt: skip
        for stream in (True, False):
            made = http.post(path, json={"model": "tiny", "stream": stream, **asked}).json()
            assert {**made, **said, "done": True, "done_reason": "load"} == made
        assert http.post(path, json={**asked, "keep_alive": 0}).json()["done_reason"] == "unload"
        assert http.post(path, json={**asked, "model": "gpt"}).status_code == 404
    assert http.post("/api/embeddings", json={"model": "tiny", "prompt": "banana"}).json() == {"embedding": [6, 3]}
    assert set(http.post("/api/nothing", json={}).json()) == {"error"}
    told = http.post("/api/chat", json={"messages": HELLO, "options": {"num_predict": -7}}).json()["error"]
    assert told.startswith("options.num_predict is")
    entry = http.get("/api/tags").json()["models"][0]
    assert (entry["details"]["family"], entry["details"]["format"]) == ("llama", "safetensors")
    assert entry["size"] > 0


def test_errors_have_codes_and_fields(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "bogus"}}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "g"}}]}}
    for more, field, code in (
        ({"messages": "hi"}, "messages", "invalid_value"),
        ({"response_format": "json"}, "response_format", "invalid_type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
        ({"adapter": "x"}, "adapter", "invalid_value"), ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"tools": [tool], "tool_choice": "required"}, "tools", "invalid_value"),
        ({"tools": [tool], "tool_choice": allowed}, "tool_choice", "invalid_value"),
    ):  # fmt: skip
        told = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2, **more})
        assert (told.status_code, told.json()["error"]["param"], told.json()["error"]["code"]) == (400, field, code)
    for path, body, field, code in (
        ("/v1/completions", {"prompt": ""}, "prompt", "invalid_value"),
        ("/v1/completions", {"prompt": [1, 99999]}, "prompt", "invalid_value"),
        ("/v1/completions", {"prompt": [1] * 5000}, "prompt", "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": [{**HELLO[0], "content": "x" * 5000}]}, "messages",
         "context_length_exceeded"),
        ("/v1/responses", {"input": "x" * 5000}, "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": "x" * 5000}, "input", "context_length_exceeded"),
    ):  # fmt: skip
        told = http.post(path, json=body)
        error = told.json()["error"]
        assert (path, told.status_code, error["param"], error["code"]) == (path, 400, field, code)


def test_a_prompt_larger_than_the_cache_is_too_long(chat_model: Callable[[], Decoder]) -> None:
    with Server(Service(Engine(chat_model(), cache_tokens=64)), port=0) as server:
        told = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 100}).json()["error"]
    assert (told["param"], told["code"]) == ("prompt", "context_length_exceeded")


def test_allowed_tools(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": name}} for name in ("first", "second")]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[1:]}}
    for seed in range(3):
        made = client.chat.completions.create(
            model="tiny", messages=HELLO, tools=tools, tool_choice=choice, seed=seed, max_tokens=100
        )
        assert {c.function.name for c in made.choices[0].message.tool_calls or ()} == {"second"}
    flat: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "first"}]}
    given: Any = [{"type": "function", "name": name, "parameters": {}} for name in ("first", "second")]
    answer = client.responses.create(model="tiny", input="hello", tools=given, tool_choice=flat, max_output_tokens=100)
    assert {item.name for item in answer.output if item.type == "function_call"} == {"first"}


def test_answers_to_random_schemas_are_valid(chat_model: Callable[[], Decoder]) -> None:
    """Of a random model, which would never say so itself; `python -m tests.torture.schemas MODEL` asks for more."""
    with Server(Service(Engine(chat_model(), max_requests=8)), port=0) as server:
        assert wrong_answers(server.url, 12, max_tokens=200) == []


def test_a_grammar_is_brought_to_its_end(chat_model: Callable[[], Decoder], rng: np.random.Generator) -> None:
    """Schemas of all sorts, with the model's own wishes: always JSON of the schema, within the tokens there are."""
    model = chat_model()
    engine = Engine(model, cache_tokens=8192)
    schemas: list[Any] = [
        {"type": "array", "items": {"type": "string"}}, {"type": "string"}, {"type": "number"}, {},
        {"type": "object", "additionalProperties": {"type": "array"}},
        {"anyOf": [{"type": "null"}, {"type": "string"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "string"}}, "required": ["b"]},
        {"type": "array", "prefixItems": [{"const": 1}, {"enum": ["x", "y"]}], "minItems": 2, "items": False},
        *({"type": "string", "format": f} for f in ("date-time", "time", "email", "uuid", "ipv4")),
        {"type": "string", "pattern": "^[a-z]+-[0-9]+$"}, {"type": "string", "pattern": r"^\w+@\w+\.com$"},
        *({"type": "string", "pattern": p} for p in (r"^[a-z]*-\d{6}/[A-F]{3}$", r"^(ab|c)+z\d+!$")),
        {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": "^x*<[0-9]+:end>$"}},
    ]  # fmt: skip
    requests = [
        engine.submit("go", grammar=Grammar.json_schema(s), max_tokens=100, temperature=t, seed=int(rng.integers(1000)))
        for s in schemas for t in (0.0, 1.0, 2.0)
    ]  # fmt: skip
    engine.run()
    for request in requests:
        json.loads(request.text())
        assert request.finish_reason == "stop"
    grammar = Grammar.json_schema(schemas[0])
    alone = model.generate("go", grammar=grammar, max_tokens=60)
    assert isinstance(json.loads(alone), list)
    assert engine.submit("go", grammar=grammar, max_tokens=60).text() == alone
