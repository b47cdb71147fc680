"""Requests and answers of all protocols as plain data, with the models behind them; the server puts HTTP around it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Final

from strata.core import Table
from strata.errors import OptionError, RequestError
from strata.models import Decoder, Encoder, ToolStyle, style_of, tool_grammar, with_tools
from strata.serving.api import ollama
from strata.serving.api.answers import TextAnswer
from strata.serving.api.embeddings import Gone, embed, rerank
from strata.serving.api.errors import Refused
from strata.serving.api.fields import shown, wrong
from strata.serving.api.pictures import with_pictures
from strata.serving.api.requests import (
    TO_THE_END,
    ChatRequest,
    EmbeddingRequest,
    RerankRequest,
    TextRequest,
    parse_chat,
    parse_embedding,
    parse_rerank,
    parse_text,
)
from strata.serving.api.responses import ResponseAnswer, ResponseRequest, parse_response
from strata.serving.courtesy import Courtesy
from strata.serving.engine import Engine
from strata.serving.generation import Generation
from strata.serving.limits import Limits
from strata.serving.metrics import Metrics
from strata.serving.record import Record, Recorder
from strata.serving.trial import GrammarTrials

TEXTS_AT_ONCE: Final = 2048  # of an embedding
MOST_REMEMBERED_BYTES: Final = 64 << 20  # of responses that others may go on from
MOST_VECTOR_JOBS: Final = 256
TEXT_PATHS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/api/chat", "/api/generate")
VECTOR_PATHS: Final = ("/v1/embeddings", "/v1/rerank", "/api/embed", "/api/embeddings")
PATHS: Final = (*TEXT_PATHS, *VECTOR_PATHS)


class TextJob:
    """A request for texts on its way."""

    def __init__(
        self, answer: Any, generations: Sequence[Generation], stream: bool, done: Callable[[Any], None]
    ) -> None:
        self.answer, self.generations, self.stream = answer, generations, stream
        self._done: Callable[[Any], None] | None = done

    @property
    def is_done(self) -> bool:
        return all(g.is_done for g in self.generations)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this, in another thread, whenever there is more."""
        for generation in self.generations:
            generation.listen(listener)
        if not self.generations:
            listener()

    def parts(self) -> list[dict[str, Any]]:
        """What is new, for a stream."""
        done = self.is_done
        found: list[dict[str, Any]] = self.answer.parts()
        if done:
            self._finish()
        return found

    def whole(self) -> dict[str, Any]:
        """The answer, when all is done."""
        made: dict[str, Any] = self.answer.whole()
        self._finish(made)
        return made

    def _finish(self, made: dict[str, Any] | None = None) -> None:
        done, self._done = self._done, None
        if done is not None and not any(g.error for g in self.generations):
            done(self.answer.whole() if made is None else made)

    def wait(self) -> None:
        for generation in self.generations:
            generation.wait()

    def cancel(self) -> None:
        """Nobody waits for it any longer; what is done stays as it is."""
        for generation in self.generations:
            generation.cancel()

    def describe(self) -> dict[str, Any]:
        """What a log says about it."""
        return {
            "prompt_tokens": sum(len(g.prompt_ids) for g in self.generations),
            "tokens": sum(len(g.tokens) for g in self.generations),
            "finish": ",".join(dict.fromkeys(str(g.finish_reason) for g in self.generations)),
        }


class VectorJob:
    """A request for vectors or scores on its way."""

    stream = False

    def __init__(self, future: Future[dict[str, Any]], gone: list[bool]) -> None:
        self._future, self._gone = future, gone

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def listen(self, listener: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: listener())

    def parts(self) -> list[dict[str, Any]]:
        return []

    def whole(self) -> dict[str, Any]:
        return self._future.result()

    def wait(self) -> None:
        self._future.exception()

    def cancel(self) -> None:
        self._gone.append(True)
        self._future.cancel()

    def describe(self) -> dict[str, Any]:
        return {}


Job = TextJob | VectorJob


class Service:
    """Requests and answers of the OpenAI API as plain data; the server puts HTTP around it.

    `generator` generates text and `embedder` computes embeddings, both under `name`; `models` are more of either kind
    by name. At least one is given. `answer_tokens` end an answer whose request sets no limit; without it the model or
    its context ends it.
    """

    def __init__(
        self, generator: Engine | Decoder | None = None, embedder: Encoder | None = None, *, name: str = "strata",
        models: Mapping[str, Engine | Decoder | Encoder] | None = None, recorder: Recorder | None = None,
        answer_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.engines: dict[str, Engine] = {}
        self.embedders: dict[str, Encoder] = {}
        for key, model in [(name, generator), (name, embedder), *(models or {}).items()]:
            if isinstance(model, Encoder):
                self.embedders[key] = model
            elif model is not None:
                self.engines[key] = Engine(model) if isinstance(model, Decoder) else model
        if not self.engines and not self.embedders:
            raise OptionError("serve: there is no model", code="O622")
        if answer_tokens is not None and answer_tokens < 1:
            raise OptionError(f"serve: answer_tokens {answer_tokens} is not a positive number", code="O605")
        self.answer_tokens = answer_tokens
        self.name = next(iter(self.engines), None) or next(iter(self.embedders))
        self.recorder, self.created = recorder, int(time.time())
        self.metrics = self.engine.metrics if self.engine is not None else Metrics()
        self.courtesy = Courtesy()
        for engine in self.engines.values():
            engine.metrics, engine.courtesy = self.metrics, self.courtesy
        self.limits = Limits(max_batch=TEXTS_AT_ONCE)
        self.trials = GrammarTrials()
        self._settings = copy_context()  # such as the number of threads
        self._vectors = ThreadPoolExecutor(1, "strata-vectors")
        self._vector_jobs = 0
        self._remembered: Table[str, tuple[str, int, dict[str, Any]]] = Table("responses")
        self._lock = Lock()

    # ---------------------------------------------------------------------------------------------------------- models

    @property
    def engine(self) -> Engine | None:
        """The engine that answers where no model is named."""
        return next(iter(self.engines.values()), None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give as their model: the served ones, and their adapters."""
        adapters = [a for engine in self.engines.values() for a in engine.adapters]
        return tuple(dict.fromkeys((*self.engines, *self.embedders, *adapters)))

    def _find(self, model: str | None) -> tuple[str, str | None]:
        """The served model that a request names, and the adapter."""
        if model is None or model in self.engines or model in self.embedders:
            return model or "", None
        plain = model.removesuffix(":latest")
        if plain in self.engines or plain in self.embedders:
            return plain, None
        for name, engine in self.engines.items():
            if plain in engine.adapters:
                return name, plain
        told = f"there is no model {model!r}; known: {', '.join(self.names)}"
        raise Refused(404, told, field="model", code="model_not_found")

    # ------------------------------------------------------------------------------------------------------------ jobs

    def answer(self, path: str, body: Any, *, client: str = "") -> dict[str, Any]:
        """The whole answer to a request, streamed or not."""
        job = self.start(path, body, client=client)
        try:
            job.wait()
            return job.whole()
        finally:
            job.cancel()  # where an earlier one failed; those that are done stay as they are

    def start(self, path: str, body: Any, *, client: str = "", tries: bool = True) -> Job:
        """Read a request and put it on its way. This tokenises and fills in templates: call it off the event loop.

        Its grammar is tried first if it is not known; unless `tries`, that is `Untried`.
        """
        return self._settings.copy().run(self._start, path, body, client, tries)

    def _start(self, path: str, body: Any, client: str, tries: bool) -> Job:
        if path not in PATHS:
            raise Refused(404, f"POST {path} is not served; known: {', '.join(PATHS)}", code="unknown_url")
        done = self._recording(path, body)
        match path:
            case "/v1/completions":
                return self._text_job(parse_text(body), client, done, tries)
            case "/v1/chat/completions":
                return self._text_job(parse_chat(body), client, done, tries)
            case "/v1/responses":
                return self._response_job(body, client, done, tries)
            case "/api/chat" | "/api/generate":
                asked = ollama.parse_chat(body) if path == "/api/chat" else ollama.parse_generate(body)
                if asked.done is not None:
                    self._find(asked.inner.model)
                    told = asked.inner.model or self.name
                    return TextJob(ollama.OllamaAnswer(asked, [], told, None), [], asked.inner.stream, done)
                name, generations, style = self._submitted(asked.inner, client, tries)
                answer = ollama.OllamaAnswer(asked, generations, asked.inner.model or name, style)
                return TextJob(answer, generations, asked.inner.stream, done)
            case "/v1/embeddings":
                return self._vector_job(parse_embedding(body), done)
            case "/v1/rerank":
                return self._vector_job(parse_rerank(body), done)
            case "/api/embed":
                return self._vector_job(ollama.parse_embed(body), done, _as_ollama)
            case _:
                return self._vector_job(ollama.parse_embedding(body), done, _as_old_ollama)

    def _recording(self, path: str, body: Any) -> Callable[[dict[str, Any]], None]:
        start = time.perf_counter()

        def done(answer: dict[str, Any]) -> None:
            if self.recorder is not None:
                self.recorder.write(Record(path, body, answer, round(time.perf_counter() - start, 6)))

        return done

    # ------------------------------------------------------------------------------------------------------ generation

    def _text_job(
        self, request: TextRequest | ChatRequest, client: str, done: Callable[[Any], None], tries: bool
    ) -> TextJob:
        name, generations, style = self._submitted(request, client, tries)
        tokenizer = self.engines[name].model.tokenizer
        answer = TextAnswer(request, generations, tokenizer, request.model or name, style)
        return TextJob(answer, generations, request.stream, done)

    def _submitted(
        self, request: TextRequest | ChatRequest, client: str, tries: bool
    ) -> tuple[str, list[Generation], ToolStyle | None]:
        """All that a request asks for is on its way, or nothing of it."""
        name, adapter = self._find(request.model)
        name = name or next(iter(self.engines), "")
        engine = self.engines.get(name)
        if engine is None:
            raise Refused(
                404,
                f"{name or self.name} makes no texts; /v1/embeddings gives vectors",
                field="model",
                code="unsupported_model",
            )
        options = request.options
        odd = next((t for t, _ in options.logit_bias if t >= engine.model.config.vocab), None)
        if odd is not None:
            raise wrong(
                f"logit_bias: token {odd} does not exist: the model has {engine.model.config.vocab}", "logit_bias"
            )
        if adapter is not None and options.adapter is None:
            options = replace(options, adapter=adapter)
        if options.adapter is not None and options.adapter not in engine.adapters:
            known = ", ".join(engine.adapters) or "none"
            raise wrong(f"there is no adapter {shown(options.adapter)}; known: {known}", "adapter")
        if self.answer_tokens is not None and options.max_tokens == TO_THE_END:
            options = replace(options, max_tokens=self.answer_tokens)
        style: ToolStyle | None = None
        more: dict[str, Any] = {"grammar": request.format.grammar(), "client": client}
        prompts: list[Any] = []
        if isinstance(request, ChatRequest):
            messages: Sequence[dict[str, Any]] = request.messages
            if any(isinstance(m["content"], list) for m in messages):
                if not engine.model.sees:
                    raise wrong("messages: this model does not see images", "messages", "unsupported_parameter")
                messages = with_pictures(messages)
            if request.uses_tools:
                style = style_of(engine.model.tokenizer.template)
                form = request.format
                schema = {"type": "object"} if form.kind == "json_object" else form.schema
                grammar = tool_grammar(request.tools, request.tool_choice, style, engine.model.tokenizer, schema=schema)
                more |= {"grammar": grammar, "show_special": True}
                if style.described:
                    messages = with_tools(messages, request.tools, style)
                else:
                    more["tools"] = [t.described() for t in request.tools]
            prompts = [[{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]]
        else:
            prompts = list(request.prompts)
            if request.echo and options.logprobs is not None:
                more["prompt_logprobs"] = options.logprobs
            elif request.echo and not options.max_tokens:
                more["prompt_logprobs"] = 0
        if more["grammar"] is not None:
            asked_by = "response_format" if style is None else "tools"
            self.trials.check(more["grammar"], tries=tries, field=asked_by)
        made: list[Generation] = []
        try:
            for prompt in prompts:
                for choice in range(request.choices):
                    made.append(engine.submit(prompt, **options.arguments(choice), **more))
        except Exception as error:
            for generation in made:
                generation.cancel()
            if isinstance(error, RequestError) and error.field is None:
                error.field = request.source
            raise
        return name, made, style

    # ------------------------------------------------------------------------------------------------------- responses

    def _response_job(self, body: Any, client: str, done: Callable[[Any], None], tries: bool) -> TextJob:
        previous = body.get("previous_response_id") if isinstance(body, Mapping) else None
        request = parse_response(body, self.remembered(str(previous), client) if previous is not None else None)
        name, generations, style = self._submitted(request.chat, client, tries)
        tokenizer = self.engines[name].model.tokenizer
        answer = ResponseAnswer(request, generations, tokenizer, request.chat.model or name, style)

        def finished(made: dict[str, Any]) -> None:
            if request.stores:
                self._remember(answer, request, client)
            done(made)

        return TextJob(answer, generations, request.chat.stream, finished)

    def _remember(self, answer: ResponseAnswer, request: ResponseRequest, client: str) -> None:
        found = answer.remembered
        size = len(json.dumps(found))
        with self._lock:
            self._remembered.put(found["response"]["id"], (client, size, found))
            while sum(n for _, n, _ in self._remembered.values()) > MOST_REMEMBERED_BYTES:
                self._remembered.pop_next()

    def remembered(self, number: str, client: str) -> dict[str, Any] | None:
        """A response that the same client was given before."""
        found = self._remembered.get(number)
        return found[2] if found is not None and found[0] == client else None

    def forget(self, number: str, client: str) -> bool:
        """Forget a response; False where the client has none of this number."""
        with self._lock:
            found = self._remembered.get(number)
            return found is not None and found[0] == client and self._remembered.pop(number) is not None

    # ------------------------------------------------------------------------------------------------------ embeddings

    def _vector_job(
        self, request: EmbeddingRequest | RerankRequest, done: Callable[[Any], None],
        shape: Callable[[dict[str, Any]], dict[str, Any]] = lambda x: x,
    ) -> VectorJob:  # fmt: skip
        name, _ = self._find(request.model)
        name = name or next(iter(self.embedders), "")
        encoder = self.embedders.get(name)
        if encoder is None:
            raise Refused(
                404, f"{name or self.name} gives no vectors; serve an encoder", field="model", code="unsupported_model"
            )
        texts = request.texts if isinstance(request, EmbeddingRequest) else request.documents
        self.limits.check_batch(len(texts))
        with self._lock:
            if self._vector_jobs >= MOST_VECTOR_JOBS:
                told = f"{self._vector_jobs} requests for vectors wait already"
                raise Refused(429, told, kind="rate_limit_error", code="rate_limit_exceeded",
                              headers={"Retry-After": "1"})  # fmt: skip
            self._vector_jobs += 1
        gone: list[bool] = []
        settings = self._settings.copy()

        def work() -> dict[str, Any]:
            start = time.perf_counter()
            if gone:
                raise Gone
            if isinstance(request, EmbeddingRequest):
                made = settings.run(embed, encoder, request, request.model or name, lambda: bool(gone))
            else:
                made = settings.run(rerank, encoder, request, request.model or name, lambda: bool(gone))
            self.metrics.count("embedded_texts", len(texts))
            self.metrics.observe("embedding_milliseconds", (time.perf_counter() - start) * 1e3)
            made = shape(made)
            done(made)
            return made

        def leave(_: Any) -> None:
            with self._lock:
                self._vector_jobs -= 1

        future = self._vectors.submit(work)
        future.add_done_callback(leave)
        return VectorJob(future, gone)

    # ------------------------------------------------------------------------------------------------------ what it has

    def describe(self, name: str) -> dict[str, Any]:
        """A model in the list of models."""
        found: dict[str, Any] = {"id": name, "object": "model", "created": self.created, "owned_by": "strata"}
        if name in self.engines:
            found["max_model_len"] = self.engines[name].model.context
        return found

    def about(self, name: str) -> dict[str, Any]:
        """What a list of models for clients of Ollama says about one."""
        engine = self.engines.get(name)
        model = self.embedders.get(name) if engine is None else engine.model
        found: dict[str, Any] = {"created": datetime.fromtimestamp(self.created, UTC).isoformat()}
        if model is not None:
            found["family"] = model.config.family
        if model is not None and model.source is not None:
            found["format"] = "gguf" if model.source.suffix == ".gguf" else "safetensors"
            files = [model.source] if model.source.is_file() else model.source.glob("*.safetensors")
            found["bytes"] = sum(file.stat().st_size for file in files)
        return found

    def load(self) -> dict[str, Any]:
        """What the models have to do now, for a page that shows it."""
        return {"models": {name: engine.load for name, engine in self.engines.items()},
                "vectors": self._vector_jobs, **self.metrics.snapshot()}  # fmt: skip

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted."""
        return not any(engine.is_closing for engine in self.engines.values())

    @property
    def retry_after(self) -> int:
        """Seconds after which a request that found the queue full may find room."""
        found = self.metrics.snapshot()["histograms"].get("request_milliseconds")
        return 1 if found is None else int(min(max(found["p50"] / 1000, 1), 60))

    def begin(self) -> None:
        """Run the engines in threads of their own."""
        for engine in self.engines.values():
            engine.start()

    def close(self, *, drain: bool = True) -> None:
        """Accept no more, and end when all is answered, or at once."""
        for engine in self.engines.values():
            engine.close(drain=drain)
        self._vectors.shutdown(wait=drain, cancel_futures=not drain)
        self.trials.close()
        if self.recorder is not None:
            self.recorder.close()


def _as_old_ollama(made: dict[str, Any]) -> dict[str, Any]:
    return {"embedding": made["data"][0]["embedding"]}


def _as_ollama(made: dict[str, Any]) -> dict[str, Any]:
    return {"model": made["model"], "embeddings": [d["embedding"] for d in made["data"]],
            "prompt_eval_count": made["usage"]["prompt_tokens"]}  # fmt: skip
