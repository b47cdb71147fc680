"""`strata serve`: models over HTTP, until a signal ends it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

from strata.cli import show
from strata.cli.parser import Mistake
from strata.cli.programs import kind_of
from strata.config import api_key, using

SWITCH_SECONDS: Final = 5e-4  # that a busy thread may keep the interpreter: a request goes through several threads


def serve(options: Namespace) -> None:
    """Load, listen, and answer until a signal comes; requests on their way are answered first."""
    _check_packages()
    from strata.serving import log_requests

    with using(**({"num_threads": options.threads} if options.threads else {})):
        with _without_collection():
            server, name = _started(options)
        _more_files()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            if options.log != "none":
                log_requests(options.log)
            _until_a_signal(server, name, options)
        finally:
            sys.setswitchinterval(interval)
            gc.unfreeze()


@contextmanager
def _without_collection() -> Iterator[None]:
    """What is made here stays: looking for garbage in it takes a tenth of the start, and time of requests later."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _started(options: Namespace) -> tuple[Any, str]:
    """A server whose models are loaded and compiled, and the name of the first of them."""
    from strata.models import Decoder, Encoder, load
    from strata.serving import Engine, Recorder, Server, Service, shared_memory

    http = _http_options(options)
    loaded: dict[str, Any] = {}
    for at, path in enumerate(options.models):
        kind_of(path)  # says what is wrong with the path in the words of the command line
        context = {} if options.context is None else {"context": options.context}
        model = load(path, device=options.device, **context)
        if not isinstance(model, Decoder | Encoder):
            raise Mistake(f"{path}: {type(model).__name__} neither generates nor embeds; strata run runs it on arrays")
        name = options.name if options.name and at == 0 else Path(path).resolve().stem
        if name in loaded:
            raise Mistake(f"{path}: there is a model {name!r} already")
        loaded[name] = model
    generators = [name for name, model in loaded.items() if isinstance(model, Decoder)]
    adapters = dict(_named(text) for text in options.adapter)
    if adapters and not generators:
        raise Mistake("--adapter: there is no model that generates")
    tokens = dict.fromkeys(generators, options.cache_tokens)
    if options.memory is not None and generators:
        taken = sum(map(_bytes_of, (*options.models, *adapters.values())))
        found = shared_memory(options.memory, taken, [loaded[name] for name in generators], bits=options.kv_bits)
        tokens = {name: min(n, options.cache_tokens or n) for name, n in zip(generators, found, strict=True)}
    for name in generators:
        loaded[name] = Engine(
            loaded[name], cache_tokens=tokens[name], max_requests=options.max_requests, queue=options.queue,
            adapters=adapters if name == generators[0] else None, exact=options.exact,
            prefix_cache=not options.no_prefix_cache, speculate=not options.no_speculation,
            kv_bits=options.kv_bits,
        )  # fmt: skip
    recorder = Recorder(options.record) if options.record else None
    service = Service(models=loaded, recorder=recorder, answer_tokens=options.answer_tokens)
    server = Server(service, host=options.host, port=options.port, options=http)
    for model in loaded.values():  # compiled before anybody asks
        if isinstance(model, Encoder):
            model.embed("ready")
        else:
            model.warm_up()
    return server, next(iter(loaded))


def _bytes_of(path: str) -> int:
    """Of a file, or of all files of a folder: what is mapped of a model, at most."""
    place = Path(path)
    return sum(p.stat().st_size for p in (place.rglob("*") if place.is_dir() else (place,)) if p.is_file())


def _check_packages() -> None:
    """What a plain install lacks, all at once and before a model is loaded."""
    missing = [name for name in ("uvicorn", "starlette", "tokenizers", "jinja2") if find_spec(name) is None]
    if missing:
        raise Mistake(f"serving needs {', '.join(missing)}: pip install 'strata[serve]'")


def _http_options(options: Namespace) -> Any:
    from strata.serving import HttpOptions

    keys = [*options.api_key, *(HttpOptions.read_keys(options.api_key_file) if options.api_key_file else ())]
    if options.api_key_file and not keys:
        raise Mistake(f"--api-key-file {options.api_key_file}: there is no key in it")
    known = api_key()
    return HttpOptions(
        api_keys=(*keys, *([known] if known else [])), allowed_hosts=tuple(options.allowed_host),
        cors_origins=tuple(options.cors_origin), max_body=options.max_body, max_connections=options.max_connections,
        read_timeout=options.timeout, drain=options.drain, certificate=options.tls_certificate,
        private_key=options.tls_key,
    )  # fmt: skip


def _until_a_signal(server: Any, name: str, options: Namespace) -> None:
    """Serve; the first signal asks to stop, the second one stops."""
    asked, ended = Event(), Event()

    def on_signal(*_: Any) -> None:
        if asked.is_set():
            server.abort()
            ended.wait(0.3)
            os._exit(0 if ended.is_set() else 130)
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    server.start()
    if options.json:
        show.as_json({"url": server.url, "model": name})
    else:
        print(f"{name} at {server.url}/v1 (Ctrl-C ends it)")
    sys.stdout.flush()
    while not asked.wait(3600):
        pass

    def close() -> None:
        server.close()
        ended.set()

    Thread(target=close, name="strata-close", daemon=True).start()
    while not ended.wait(3600):
        pass


def _more_files() -> None:
    """As many open files as the system allows this process: each connection is one."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _named(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not name or not equals or not folder:
        raise Mistake(f"--adapter {text}: NAME=FOLDER is needed")
    return name, folder
