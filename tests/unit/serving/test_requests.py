"""Bodies of requests: what they become, what is missing and what is wrong, each in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strata.errors import OptionError, RequestError
from strata.models import PAGE, Decoder, page_bytes
from strata.serving import (
    ChatRequest,
    EmbeddingRequest,
    Engine,
    Limits,
    Options,
    Service,
    TextRequest,
    parse_request,
    shared_memory,
)

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "hello"}]


def test_defaults() -> None:
    assert parse_request(CHAT, {"messages": HELLO}) == ChatRequest(
        ({"role": "user", "content": "hello"},), Options(temperature=1.0), 1, stream=False
    )
    assert parse_request(TEXT, {"prompt": "once"}) == TextRequest(("once",), Options(max_tokens=16))
    assert parse_request(VECTORS, {"input": "a text"}) == EmbeddingRequest(("a text",))


def test_all_that_is_understood() -> None:
    found = parse_request(
        CHAT,
        {
            "model": "m", "user": "u", "messages": [{"role": "system", "content": "be kind"}, {
                "role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "max_completion_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 9, "n": 2,
            "repetition_penalty": 1.2, "stop": ["x", "yz"], "stream": True, "stream_options": {"include_usage": True},
            "adapter": "fr", "frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "tools": None,
        },
    )  # fmt: skip
    assert found == ChatRequest(
        ({"role": "system", "content": "be kind"}, {"role": "user", "content": "ab"}),
        Options(7, 0.0, 0.5, 3, 0.1, 1.2, 9, ("x", "yz"), "fr"), 2, stream=True, usage_in_stream=True, model="m",
    )  # fmt: skip
    assert isinstance(found, ChatRequest)
    assert found.options.arguments(1)["seed"] == 10
    assert parse_request(TEXT, {"prompt": ["a", "b"], "stop": "x"}) == TextRequest(
        ("a", "b"), Options(max_tokens=16, stop=("x",))
    )
    assert parse_request(TEXT, {"prompt": [1, 2]}) == TextRequest(((1, 2),), Options(max_tokens=16))
    assert parse_request(TEXT, {"prompt": [[1, 2], [3]]}) == TextRequest(((1, 2), (3,)), Options(max_tokens=16))
    found = parse_request(VECTORS, {"input": ["a", "b"], "encoding_format": "base64"})
    assert found == EmbeddingRequest(("a", "b"), base64=True)


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        (CHAT, [], None, "the body is a list, an object is needed"),
        (CHAT, {}, "messages", "messages is a list of messages that is not empty, got None"),
        (CHAT, {"messages": []}, "messages", "messages is a list of messages that is not empty, got []"),
        (CHAT, {"messages": ["hi"]}, "messages", "messages[0] is an object with role and content, got 'hi'"),
        (CHAT, {"messages": [{"role": "boss", "content": ""}]}, "messages", "the role 'boss' is not one of"),
        (CHAT, {"messages": [*HELLO, {"role": "user"}]}, "messages", "messages[1]: the content is a text, got None"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url has a url"),
        (CHAT, {"messages": [{"role": "system", "content": [{"type": "image_url"}]}]}, "messages", "content is a text"),
        (CHAT, {"messages": HELLO, "temperature": -1}, "temperature", "a number from 0 to 100, got -1"),
        (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature", "got 'hot'"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens", "a whole number from 1 to 16777216, got 0"),
        (CHAT, {"messages": HELLO, "max_tokens": 1.5}, "max_tokens", "got 1.5"),
        (CHAT, {"messages": HELLO, "top_p": 0}, "top_p", "top_p is larger than 0"),
        (CHAT, {"messages": HELLO, "n": 9}, "n", "n is a whole number from 1 to 8, got 9"),
        (CHAT, {"messages": HELLO, "stream": 1}, "stream", "stream is true or false, got 1"),
        (CHAT, {"messages": HELLO, "stop": [""]}, "stop", "stop is a string or a list of up to 16, got ['']"),
        (CHAT, {"messages": HELLO, "stop": 3}, "stop", "got 3"),
        (CHAT, {"messages": HELLO, "adapter": 3}, "adapter", "adapter is a name, got 3"),
        (CHAT, {"messages": HELLO, "model": ["m"]}, "model", "model is a name, got ['m']"),
        (CHAT, {"messages": HELLO, "stream_options": 1}, "stream_options", "is a number, an object is needed"),
        (CHAT, {"messages": HELLO, "temprature": 1}, "temprature", "there is no field 'temprature'"),
        (CHAT, {"messages": HELLO, "presence_penalty": 3}, "presence_penalty", "a number from -2 to 2, got 3"),
        (TEXT, {"prompt": ""}, "prompt", "a prompt is a text or a list of token ids that is not empty, got ''"),
        (TEXT, {"prompt": []}, "prompt", "prompt is a text"),
        (TEXT, {"prompt": [[]]}, "prompt", "got []"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "got 1"),
        (TEXT, {"prompt": {"a": "b" * 100}}, "prompt", "..."),
        (VECTORS, {"input": []}, "input", "input is a text or a list of texts that are not empty, got []"),
        (VECTORS, {"input": ["a", ""]}, "input", "got ['a', '']"),
        (VECTORS, {"input": "a", "encoding_format": "hex"}, "encoding_format", "float or base64, got 'hex'"),
        (VECTORS, {"input": "a", "dimensions": 0}, "dimensions", "a whole number from 1"),
        ("/v2", {}, None, "there is no path '/v2'; known: /v1/completions"),
    ],
)  # fmt: skip
def test_mistakes(path: str, body: Any, field: str | None, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(path, body)
    assert message in caught.value.summary
    assert "\n" not in caught.value.summary
    assert len(caught.value.summary) < 200
    assert caught.value.field == field


def test_limits() -> None:
    limits = Limits(max_length=4, max_batch=2, vocabulary=10, image_sizes=(8, 64), channels=(1, 3))
    limits.check_ids([0, 9, 5, 5])
    limits.check_batch(2)
    limits.check_image(np.zeros((8, 64, 3)))
    limits.check_image(np.zeros((9, 9)))
    for check, value, message in (
        (limits.check_ids, [], "the prompt is empty"), (limits.check_ids, [1] * 5, "5 tokens are more than 4"),
        (limits.check_ids, [1, 10], "token 10 at position 1 is outside the vocabulary of 10"),
        (limits.check_ids, [-1], "token -1"),
        (limits.check_batch, 3, "3 at once are more than 2"), (limits.check_batch, 0, "nothing is asked for"),
        (limits.check_image, np.zeros(3), r"two or three axes, got \[3\]"),
        (limits.check_image, np.zeros((7, 9)), "an image of 7 x 9 is not within 8 to 64"),
        (limits.check_image, np.zeros((9, 65)), "9 x 65"),
        (limits.check_image, np.zeros((9, 9, 4)), "1 or 3 channels, got 4"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            check(value)
    Limits().check_ids([1 << 40] * 1000)


def test_models_share_a_limit_on_memory(decoder: Callable[..., Decoder]) -> None:
    """What weights leave is shared equally; who needs little leaves the rest to the others."""
    small, large = decoder(context=32), decoder(context=160)
    page = page_bytes(small)
    assert shared_memory(10**9, 10**6, [large, small]) == [4 * 160, 4 * 32]
    for more in (0, 5, 9, 40):
        found = shared_memory(1000 + (10 + 2 + more) * page, 1000, [large, small])
        assert sum(-(-n // PAGE) for n in found) <= 12 + more
        assert found[0] >= 160
        assert found[1] >= 32
    assert shared_memory(1000 + 30 * page, 1000, [large, small]) == [160 + 12 * PAGE, 4 * 32]
    assert shared_memory(1000 + 12 * page_bytes(small, 8), 1000, [large, small], bits=8) == [160, 32]
    with pytest.raises(OptionError, match=f"need {1000 + 12 * page:,} bytes, the limit is {1000 + 11 * page:,}"):
        shared_memory(1000 + 11 * page, 1000, [large, small])


def test_answers_without_a_limit_may_end_after_so_many_tokens(decoder: Callable[..., Decoder]) -> None:
    service = Service(Engine(decoder(), speculate=False), answer_tokens=7)
    told = {"messages": HELLO, "ignore_eos": True, "temperature": 0}
    made = service.answer(CHAT, told)
    assert (made["usage"]["completion_tokens"], made["choices"][0]["finish_reason"]) == (7, "length")
    assert service.answer(CHAT, {**told, "max_tokens": 9})["usage"]["completion_tokens"] == 9
    assert service.answer(TEXT, {"prompt": "once", "ignore_eos": True})["usage"]["completion_tokens"] == 16
    with pytest.raises(OptionError, match="answer_tokens 0 is not a positive number"):
        Service(decoder(), answer_tokens=0)
