"""`strata serve`: models over HTTP, until a signal ends it."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from pathlib import Path
from threading import Event
from typing import Any

from strata.cli import show
from strata.cli.parser import Mistake
from strata.cli.programs import kind_of
from strata.config import using


def serve(options: Namespace) -> None:
    """Load, listen, and answer until a signal comes; requests on their way are answered first."""
    from strata.models import Decoder, Encoder, load
    from strata.serving import Engine, Recorder, Server, Service

    generator: Any = None
    embedder: Any = None
    for path in options.models:
        kind_of(path)  # says what is wrong with the path in the words of the command line
        context = {} if options.context is None else {"context": options.context}
        model = load(path, device=options.device, **context)
        if isinstance(model, Decoder) and generator is None:
            generator = model
        elif isinstance(model, Encoder) and embedder is None:
            embedder = model
        elif isinstance(model, Decoder | Encoder):
            raise Mistake(
                f"{path}: there is a model of its kind already; one that generates and one that embeds can be"
            )
        else:
            raise Mistake(f"{path}: {type(model).__name__} neither generates nor embeds; strata run runs it on arrays")
    adapters = dict(_named(text) for text in options.adapter)
    if adapters and generator is None:
        raise Mistake("--adapter: there is no model that generates")
    with using(**({"num_threads": options.threads} if options.threads else {})):
        engine = None
        if generator is not None:
            engine = Engine(
                generator, cache_tokens=options.cache_tokens, max_requests=options.max_requests,
                max_tokens=max(512, options.max_requests + 64), queue=options.queue, adapters=adapters,
                exact=options.exact,
            )  # fmt: skip
            engine.model.graph_for(every=False, layout="paged")  # compiled before anybody asks
        if embedder is not None:
            embedder.embed("ready")
        recorder = Recorder(options.record) if options.record else None
        name = options.name or Path(options.models[0]).stem
        server = Server(Service(engine, embedder, name=name, recorder=recorder), host=options.host, port=options.port)
        ended = Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        with server:
            if options.json:
                show.as_json({"url": server.url, "model": name})
            else:
                print(f"{name} at {server.url}/v1 (Ctrl-C ends it)")
            sys.stdout.flush()
            ended.wait()


def _named(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not name or not equals or not folder:
        raise Mistake(f"--adapter {text}: NAME=FOLDER is needed")
    return name, folder
