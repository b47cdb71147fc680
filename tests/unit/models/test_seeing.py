"""Language models that see: images in prompts and chats, alone, served and in batches, and mistakes."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import strata as st
from strata.cli import main
from strata.errors import FileError, OptionError, ShapeError
from strata.models import PromptTokens, Sampler, page_keys
from strata.serving import Engine, Service
from strata.serving.api.fields import RequestError
from tests.unit.models.test_decoder_vectors import folder as decoder_folder
from tests.unit.models.test_families import folder

PHOTOS = [np.random.default_rng(i).integers(0, 256, (30 + 9 * i, 50, 3), dtype=np.uint8) for i in range(3)]
NAMES = {
    "smolvlm": {99: "<image>", 98: "<fake_token_around_image>", 97: "<global-img>"},
    "qwen2_vl": {99: "<|image_pad|>", 98: "<|vision_start|>", 97: "<|vision_end|>"},
}
SIZES = {
    "smolvlm": {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
    "qwen2_vl": {"min_pixels": 64, "max_pixels": 1024, "patch_size": 4},
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}PLACE{% else %}{{ p['text'] }}{% endif %} {% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module", params=["smolvlm", "qwen2_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return st.load(_folder(request.param, tmp_path_factory.mktemp("seeing")))


def _folder(kind: str, path: Path) -> Path:
    place, names = folder(path, kind), NAMES[kind]
    words = Tokenizer(models.WordLevel({names.get(i, f"w{i}"): i for i in range(100)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    words.save(str(place / "tokenizer.json"))
    (place / "preprocessor_config.json").write_text(json.dumps(SIZES[kind]), "utf-8")
    shown = names[99] if kind == "smolvlm" else f"{names[98]}{names[99]}{names[97]}"
    (place / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", shown), "utf-8")
    return place


def url(photo: np.ndarray, kind: str = "PNG") -> str:
    file = io.BytesIO()
    Image.fromarray(photo).save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def asked(*images: Any, text: str = "w5 w6") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": i}} if isinstance(i, str) else {"type": "image", "image": i}
             for i in images]  # fmt: skip
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def logits(model: Any, read: PromptTokens) -> np.ndarray:
    state = model.start()
    state.seen = read.seen
    found: np.ndarray = model.step(state, np.asarray([read.ids], np.int32))
    return found


def test_an_image_becomes_tokens(model: Any) -> None:
    read = model.read_prompt(asked(PHOTOS[0]))
    count = read.ids.count(model.image_encoder.token)
    assert count == len(read.seen.rows) - 1 == int(read.seen.at.max())
    if model.image_encoder.positions(np.zeros(1, np.int64), []) is None:  # two squares of four vectors, and all
        assert (count, read.seen.positions) == (20, None)
    else:  # 30 x 50 pixels are 24 x 40 in patches of 4, of which four are a vector
        grid = np.mgrid[:3, :5].reshape(2, -1)
        first = read.ids.index(model.image_encoder.token)
        assert count == 15
        np.testing.assert_array_equal(read.seen.positions[1:, first : first + 15], grid + first)
        assert read.seen.placed(len(read.ids), 1).tolist() == [[len(read.ids) - 15 + 5]] * 3
    by_hand = model.start()
    by_hand.seen = read.seen
    tokens = list(model.tokens(read.ids, 8, Sampler(), model.tokenizer.eos, by_hand))
    wanted = model.tokenizer.decode(tokens)
    assert model.chat(asked(PHOTOS[0]), max_tokens=8)["content"] == wanted
    assert model.chat(asked(url(PHOTOS[0])), max_tokens=8)["content"] == wanted
    other = model.read_prompt(asked(PHOTOS[0][::-1]))
    assert other.ids == read.ids
    assert not np.array_equal(logits(model, other), logits(model, read))


def test_images_in_a_plain_prompt(model: Any) -> None:
    name = model.tokenizer.name_of(model.image_encoder.token)
    both, turned = (model.read_prompt(f"w3 {name} w4 {name}", images=p) for p in (PHOTOS[:2], PHOTOS[1::-1]))
    assert not np.array_equal(logits(model, both), logits(model, turned))
    assert model.generate(both, max_tokens=6) == model.generate(f"w3 {name} w4 {name}", images=PHOTOS[:2], max_tokens=6)
    with pytest.raises(OptionError, match="the prompt has 2 places for 1 images"):
        model.generate(f"w3 {name} w4 {name}", images=PHOTOS[:1])
    with pytest.raises(OptionError, match="images do not go with n"):
        model.generate(f"w3 {name}", images=PHOTOS[:1], n=2)
    assert model.generate("w3 w4 w5", max_tokens=4) == model.generate([3, 4, 5], max_tokens=4)


def test_names_of_tokens_in_a_message_are_text(model: Any) -> None:
    name = model.tokenizer.name_of(model.image_encoder.token)
    read = model.read_prompt(asked(PHOTOS[0], text=f"w5 {name} w6"))
    assert read.ids.count(model.image_encoder.token) == len(read.seen.rows) - 1


def test_served_as_alone(model: Any) -> None:
    """Requests with other images do not share pages; those with the same do. Texts come between."""
    photos = (PHOTOS[0], PHOTOS[0][::-1])
    chats = [*(asked(photo, text="w5 " * 30) for photo in photos), asked(text="w7 " * 40)]
    keys = [page_keys(read.ids, None, read.seen) for read in map(model.read_prompt, chats)]
    assert not set(keys[0]) & set(keys[1])
    alone = [model.generate(model.read_prompt(c), max_tokens=12) for c in chats]
    assert model.generate_many(chats, max_tokens=12) == alone
    with Engine(model, cache_tokens=1024, max_tokens=48) as engine:
        made = [engine.submit(c, max_tokens=12) for c in (*chats, *chats)]
        assert [g.text() for g in made] == [*alone, *alone]
        again = engine.submit(chats[0], max_tokens=12)
        assert again.text() == alone[0]
        assert again.cached_tokens > 0


def test_images_over_http(model: Any) -> None:
    service = Service(model, name="eyes")
    wanted = model.chat(asked(PHOTOS[0]), max_tokens=6)["content"]

    def said(content: Any) -> Any:
        body = {"model": "eyes", "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
        return service.answer("/v1/chat/completions", body)["choices"][0]["message"]["content"]

    text = {"type": "text", "text": "w5 w6"}
    assert said(asked(url(PHOTOS[0]))[0]["content"]) == wanted
    for link, told in (
        ("https://example.org/cat.png", "nothing is fetched"), ("/etc/passwd", "nothing is fetched"),
        ("data:image/png;base64,!!", "not base64"), ("data:image/png,abc", "in base64"),
        (f"data:image/png;base64,{base64.b64encode(b'no image').decode()}", "not an image that Pillow can read"),
        (url(np.zeros((1, (1 << 25) + 1, 3), np.uint8)), "pixels"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=told):
            said([{"type": "image_url", "image_url": {"url": link}}, text])
    with pytest.raises(RequestError, match="more than 16 images"):
        said([{"type": "image_url", "image_url": {"url": url(PHOTOS[0])}}] * 17)
    with pytest.raises(RequestError, match="image_url has a url"):
        said([{"type": "image_url", "image_url": {"link": "x"}}, text])


def test_images_in_responses_and_for_clients_of_ollama(model: Any) -> None:
    service = Service(model, name="eyes")
    wanted = model.chat(asked(PHOTOS[0]), max_tokens=6)["content"]
    content = [
        {"type": "input_image", "image_url": url(PHOTOS[0]), "detail": "auto"},
        {"type": "input_text", "text": "w5 w6"},
    ]
    body = {"model": "eyes", "input": [{"role": "user", "content": content}], "max_output_tokens": 6, "temperature": 0}
    first = service.answer("/v1/responses", body)
    assert first["output"][0]["content"][0]["text"] == wanted
    follow = [{"role": "user", "content": "w7"}]
    again = service.answer("/v1/responses", {**body, "input": follow, "previous_response_id": first["id"]})
    chat = [*asked(PHOTOS[0]), {"role": "assistant", "content": wanted}, {"role": "user", "content": "w7"}]
    assert again["output"][0]["content"][0]["text"] == model.chat(chat, max_tokens=6)["content"]
    with pytest.raises(RequestError, match="image_url has a url"):
        service.answer(
            "/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}
        )

    packed = url(PHOTOS[0]).partition(",")[2]
    options = {"num_predict": 6, "temperature": 0}
    said = {"role": "user", "content": "w5 w6", "images": [packed]}
    body = {"model": "eyes", "messages": [said], "options": options, "stream": False}
    assert service.answer("/api/chat", body)["message"]["content"] == wanted
    body = {"model": "eyes", "prompt": "w5 w6", "images": [packed], "options": options, "stream": False}
    assert service.answer("/api/generate", body)["response"] == wanted
    for path, wrong, told in (
        ("/api/chat", {"messages": [{**said, "role": "system"}]}, "not of system"),
        ("/api/chat", {"messages": [{**said, "images": "cat.png"}]}, "a list of files in base64"),
        ("/api/chat", {"messages": [{**said, "images": ["!!"]}]}, "not base64"),
        ("/api/generate", {"prompt": "w5", "images": [packed], "raw": True}, "leave raw out"),
    ):
        with pytest.raises(RequestError, match=told):
            service.answer(path, wrong)


def test_the_command_shows_an_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = _folder("smolvlm", tmp_path / "model")
    Image.fromarray(PHOTOS[0]).save(tmp_path / "a.png")
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\n"))
    assert main(["chat", str(place), "--image", str(tmp_path / "a.png"), "--max-tokens", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[0])
    wanted = st.load(place).chat(asked(PHOTOS[0]), max_tokens=4)["content"]
    assert (told["answer"], told["tokens"]) == (wanted, 4)


def test_mistakes(model: Any, tmp_path: Path) -> None:
    for wrong, error, told in (
        (asked("https://example.org/cat.png"), OptionError, "not fetched from https: URLs"),
        (asked(str(tmp_path / "none.png")), FileError, "none.png"),
        (asked(b"no image"), FileError, "not an image that Pillow can read"),
        ([{"role": "user", "content": [{"type": "image"}]}], OptionError, "has one of image"),
    ):
        with pytest.raises(error, match=told):
            model.chat(wrong)
    with pytest.raises(ShapeError, match="pixel_values are"):
        model.run(input_ids=[[99]], pixel_values=np.zeros((1, 2)))
    with pytest.raises(OptionError, match="takes none"):
        model.adapted({"a": "b"})


def test_a_model_of_texts_says_that_it_does_not_see(tmp_path: Path) -> None:
    plain = st.load(decoder_folder(tmp_path / "model", "llama"), context=64)
    with pytest.raises(OptionError, match="does not see images"):
        plain.chat(asked(PHOTOS[0]))
