"""`strata chat`: talk with a language model. The KV cache keeps what was said: a turn reads only what is new."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.cli import show
from strata.cli.installed import SMOLLM, given_or_installed
from strata.cli.parser import Mistake
from strata.cli.text import load_model
from strata.config import using

if TYPE_CHECKING:
    from strata.models import PromptTokens

HELP = "/reset forgets what was said, /save FILE.json writes it, /help says this, /exit or Ctrl-D ends it"


class Conversation:
    """Messages, and the tokens of them that the model has read."""

    def __init__(self, model: Any, system: str | None, max_tokens: int, **sampling: Any) -> None:
        from strata.models import Sampler

        self.model, self.max_tokens, self.sampler = model, max_tokens, Sampler(**sampling)
        self.start = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        """Begin again, with the system's message only."""
        self.messages: list[dict[str, Any]] = list(self.start)
        self._held: list[int] = []
        self._state: Any = None
        self.prompt_tokens = self.read_tokens = self.made_tokens = 0

    def reply(self, text: str, images: Sequence[str] = ()) -> Iterator[str]:
        """The pieces of the answer to a message, which both become part of the conversation."""
        from strata.models import Speech

        parts = [*({"type": "image", "path": path} for path in images), {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": parts if images else text})
        read = self._read()
        ids = read.ids
        kept = self._held if self._state is not None and ids[: len(self._held)] == self._held != ids else []
        if not kept:
            self._state = self.model.start()
        self._state.seen = read.seen
        self.prompt_tokens, self.read_tokens, self.made_tokens = len(ids), len(ids) - len(kept), 0
        speech, pieces, made = Speech(self.model.tokenizer, ()), [], []
        room = min(self.max_tokens, self.model.context - len(ids))
        for token in self.model.tokens(ids, room, self.sampler, self.model.tokenizer.eos, self._state):
            made.append(token)
            self.made_tokens += 1
            piece = speech.push(token)
            if piece:
                pieces.append(piece)
                yield piece
        tail = speech.finish()
        if tail:
            pieces.append(tail)
            yield tail
        self._held = (ids + made)[: self._state.length]
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _read(self) -> PromptTokens:
        """The tokens of the conversation; the oldest turns go where the context has no room for an answer."""
        while True:
            read: PromptTokens = self.model.read_prompt(self.messages)
            first = len(self.start)
            if len(read.ids) + 16 <= self.model.context or len(self.messages) <= first + 1:
                return read
            del self.messages[first : first + 2]


def chat(options: Namespace) -> None:
    """Read messages and print answers until the input ends."""
    path = given_or_installed(options.model, SMOLLM, "MODEL")
    model = load_model(path, "generate", options.device, context=options.context)
    talk = Conversation(
        model, options.system, options.max_tokens, temperature=options.temperature, top_k=options.top_k,
        top_p=options.top_p, seed=options.seed,
    )  # fmt: skip
    images = list(options.image or ())
    if images and not model.sees:
        raise Mistake("chat: --image is for models that see, and this one does not")
    is_shown = not options.json and sys.stdin.isatty()
    if is_shown:
        print(f"{Path(path).name}, {model.context} tokens of context. {HELP}\n")
    with using(**({"num_threads": options.threads} if options.threads else {})):
        for line in _lines(is_shown):
            if line.startswith("/"):
                if not _command(talk, line, options.json):
                    return
            elif line.strip():
                _turn(talk, line, images, as_json=options.json, with_rate=is_shown)
                images = []  # they belong to the first message


def _lines(is_shown: bool) -> Iterator[str]:
    if is_shown:
        try:
            import readline  # noqa: F401 - arrow keys and history in `input`
        except ImportError:  # Windows
            pass
        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return
    else:
        yield from (line.rstrip("\n") for line in sys.stdin)


def _turn(talk: Conversation, line: str, images: Sequence[str] = (), *, as_json: bool, with_rate: bool) -> None:
    start, first, text = time.perf_counter(), 0.0, ""
    for piece in talk.reply(line, images):
        first = first or time.perf_counter() - start
        text += piece
        if not as_json:
            print(piece, end="", flush=True)
    seconds = time.perf_counter() - start
    if as_json:
        show.as_json({
            "message": line, "answer": text, "prompt_tokens": talk.prompt_tokens, "read_tokens": talk.read_tokens,
            "tokens": talk.made_tokens, "first_seconds": first, "seconds": seconds,
        }, lines=True)  # fmt: skip
        return
    print()
    if with_rate:
        rate = (talk.made_tokens - 1) / max(seconds - first, 1e-9)
        told = f"{talk.read_tokens} tokens read in {show.duration(first)}, {talk.made_tokens} made at {rate:.0f}/s"
        show.console(error=True).print(f"[dim]{told}[/dim]\n")


def _command(talk: Conversation, line: str, as_json: bool) -> bool:
    """Whether to go on."""
    word, _, rest = line.partition(" ")
    match word:
        case "/exit" | "/quit":
            return False
        case "/reset":
            talk.reset()
        case "/save":
            if not rest.strip():
                raise Mistake("/save: name a file, as in /save talk.json")
            show.write_json(rest.strip(), talk.messages)
        case _ if not as_json:
            print(HELP if word == "/help" else f"there is no {word}: {HELP}")
    return True
