"""Untrusted grammars are compiled in a separate process first, with limits on its time and memory.

The library that follows grammars bounds most of what it does, but not all of it: schemas of a few hundred bytes, such
as `allOf` with twenty patterns, keep it busy for minutes, and nothing can stop it in a thread. The process can be
stopped. What it found out about a grammar is kept, so that one that comes again is not tried again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Lock, Timer
from typing import Final

from strata.core import Table
from strata.errors import RequestError
from strata.models import Grammar

SECONDS: Final = 2.0  # that a grammar may take
MOST_MEMORY: Final = 2 << 30  # bytes of the process
SHOWN: Final = 300  # letters of what is wrong with one
_PROGRAM: Final = """
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
except (ImportError, ValueError, OSError):
    pass
sys.path[:] = json.loads(sys.argv[2])
from llguidance import LLMatcher
print(flush=True)
for line in sys.stdin:
    is_wrong, told = LLMatcher.validate_grammar_with_warnings(json.loads(line))
    print(json.dumps(told[0][:2000] or "it is none" if is_wrong else ""), flush=True)
"""


class Untried(Exception):  # noqa: N818 - it is a step on the way
    """A grammar has to be tried before a request can be answered."""

    def __init__(self, grammar: Grammar) -> None:
        super().__init__("a grammar that was not tried yet")
        self.grammar = grammar


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a grammar, or nothing, and the seconds that it took to find out."""

    wrong: str
    seconds: float


class GrammarTrials:
    """What is known of grammars, and the process that finds it out: started when it is first needed."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._found: Table[bytes, str] = Table("grammars")  # what is wrong with them; nothing where all is well
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()

    def check(self, grammar: Grammar, *, tries: bool = True, field: str = "response_format") -> None:
        """Refuse a grammar that cannot be followed, or takes too long to compile; one that is not known is tried, or
        `Untried`. `field` is that of the request which asks for it."""
        found = "" if grammar.text == self._plain else self._found.get(_key(grammar))
        if found is None:
            if not tries:
                raise Untried(grammar)
            found = self.judge(grammar).wrong
        if found:
            error = RequestError(f"request: grammar: {found}", code="O620")
            error.field, error.reason = field, "invalid_value"
            raise error

    @cached_property
    def _plain(self) -> str:
        """A grammar that need not be tried."""
        return Grammar.json_object().text

    def judge(self, grammar: Grammar) -> Verdict:
        """Try a grammar, and say what is wrong with it. One at a time."""
        with self._lock:
            found, begun = self._found.get(_key(grammar)), time.monotonic()
            if found is None:
                process = self._process
                if process is None or process.poll() is not None:
                    self._end()
                    process = self._process = _started()
                begun = time.monotonic()
                found = self._tried(process, grammar.text)
                self._found.put(_key(grammar), found)
            return Verdict(found, time.monotonic() - begun)

    def _tried(self, process: subprocess.Popen[str], text: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        timer = Timer(self._seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(text) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            found: str = json.loads(answer)
            return next((line.strip() for line in found.splitlines() if line.strip()), "")[:SHOWN]
        self._end()
        return f"it takes more than {self._seconds:g} s or {MOST_MEMORY >> 30} GiB to compile"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()


def _key(grammar: Grammar) -> bytes:
    return hashlib.blake2b(grammar.text.encode(), digest_size=16).digest()


def _started() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PROGRAM, str(MOST_MEMORY), json.dumps(sys.path)]
    made = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        encoding="utf-8", start_new_session=True,
    )  # fmt: skip
    assert made.stdout is not None
    made.stdout.readline()  # it is ready
    return made
