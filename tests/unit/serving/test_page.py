"""The page at /: in a browser, a message is answered, and what the server does is shown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import strata.serving.http
from strata.models import Decoder
from strata.serving import Engine, HttpOptions, LoadTest, Server, Service, plot_load, run_load
from tests.browser import CHROMIUM, Browser

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_chats_and_shows_the_load(chat_model: Callable[[], Decoder], tmp_path: Path) -> None:
    key = "a-secret-of-ours"
    service = Service(Engine(chat_model()), name="tiny")
    with Server(service, port=0, options=HttpOptions(api_keys=(key,))) as server:
        browser = Browser(tmp_path)
        try:
            browser.ask("Page.navigate", url=server.url)
            browser.until("document.readyState === 'complete' && !!document.getElementById('key')")
            browser.value(f"at('key').value = '{key}'; at('key').dispatchEvent(new Event('change'))")
            browser.until("at('model').value === 'tiny'")
            browser.value("at('tokens').value = 12; at('text').value = '<b>hello</b>'; at('form').requestSubmit()")
            browser.until("messages.length === 2 && stopping === null")
            assert browser.value("document.querySelector('.user').textContent") == "<b>hello</b>"
            plain = "formatted(messages[1].content).map((part) => part.textContent ?? part).join('')"
            assert browser.value(f"document.querySelector('.assistant').textContent === {plain}")
            assert not browser.value("document.querySelector('.error')")
            browser.until("at('load').textContent.includes('KV cache')")
            assert "running" in browser.value("at('load').textContent")
            # going away while it answers
            browser.value("at('tokens').value = 100000; at('text').value = 'more'; at('form').requestSubmit()")
            engine = service.engine
            assert engine is not None
            browser.until("stopping !== null || messages.length === 4")
            browser.value("stopping?.abort()")
            browser.until("messages.length === 4 && stopping === null")
            end = time.monotonic() + 60
            while engine.load["waiting"] or engine.load["running"]:  # the server hears of it within a step
                assert time.monotonic() < end, engine.load
                time.sleep(0.05)
        finally:
            browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_talk_has_the_room_and_answers_are_text(tmp_path: Path) -> None:
    page = Path(strata.serving.http.__file__).with_name("page.html")
    browser = Browser(tmp_path)
    try:
        browser.ask("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
        browser.ask("Page.navigate", url=page.as_uri())
        browser.until("document.readyState === 'complete' && !!document.querySelector('main')")
        place = "document.querySelector('{}').getBoundingClientRect()"
        said, form, side = (browser.value(f"{place.format(tag)}.toJSON()") for tag in ("main", "form", "aside"))
        assert said["width"] == form["width"] > 3 * side["width"]
        assert said["right"] <= side["left"], "figures stand at the right"
        answer = "**Two** words, `x < 1`:\n```python\nprint('<b>')\n```\n<i>done</i>"
        shown = f"show('assistant', '').append(...formatted({json.dumps(answer)}))"
        browser.value(f"messages.push({{ role: 'user', content: '' }}); {shown}")
        tags = "[...document.querySelector('.assistant').children].map((made) => [made.tagName, made.textContent])"
        assert browser.value(tags) == [["STRONG", "Two"], ["CODE", "x < 1"], ["PRE", "print('<b>')"]]
        browser.value("at('clear').click()")
        assert browser.value("messages.length + document.querySelectorAll('.message').length") == 0
    finally:
        browser.close()


def test_the_page_takes_nothing_from_elsewhere(chat_model: Callable[[], Decoder]) -> None:
    with Server(Service(Engine(chat_model()), name="tiny"), port=0) as server:
        found = httpx.get(server.url)
        assert found.headers["content-security-policy"].startswith("default-src 'none'")
        assert "http://" not in found.text.replace("http://www.w3.org", "")
        assert "https://" not in found.text
        load = httpx.get(f"{server.url}/load").json()
        assert load["models"]["tiny"]["running"] == 0


def test_a_load_test_reports_rates_and_latencies(chat_model: Callable[[], Decoder]) -> None:
    with Server(Service(Engine(chat_model()), name="tiny"), port=0) as server:
        for more in ({}, {"rate": 200.0}, {"model": "none"}):
            load = LoadTest(url=server.url, requests=6, clients=3, prompt_tokens=8, shared=4, max_tokens=5, **more)
            found = run_load(load)
            assert found["requests"] == 6
            if "model" in more:
                assert found["failed"] == 6
                assert found["errors"] == ["there is no model 'none'; known: tiny"]
            else:
                assert (found["failed"], found["tokens"]) == (0, 30)
                assert 0 < found["first_token"]["p50"] <= found["total"]["p99"]
                assert plot_load(found).count("<rect") == 12
