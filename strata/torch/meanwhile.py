"""Background compiles: torch runs a graph until its compiled program is ready, so that the first call does not wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any
from weakref import WeakSet

import torch
from torch import fx

from strata.core import call_in_children, new_lock
from strata.torch.attention import remember
from strata.torch.reports import GraphReport

Program = Callable[[list[Any]], Any]
SHOWN_AFTER = 1.0  # seconds of a compile before a terminal shows it


class _Compiles:
    """The thread that compiles, and who waits for it."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.open: WeakSet[Meanwhile] = WeakSet()
        self._pool: ThreadPoolExecutor | None = None
        call_in_children(self._forget)

    def _forget(self) -> None:
        """A forked child has none of the threads: what is not done begins again with the next call."""
        self._pool = None
        for one in list(self.open):
            one.future = None

    def submit(self, one: Meanwhile) -> None:
        with self.lock:
            if one.future is None:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, "strata-torch")
                self.open.add(one)
                one.future = self._pool.submit(copy_context().run, one.finish)

    def wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        for one in list(self.open):
            future = one.future
            if future is not None:
                with contextlib.suppress(TimeoutError):
                    future.result(None if end is None else max(0.0, end - time.monotonic()))
        return all(one.future is None or one.future.done() for one in list(self.open))


_COMPILES = _Compiles()


class Meanwhile:
    """Runs a graph in torch until its program is there, and the program from then on."""

    def __init__(self, gm: fx.GraphModule, make: Callable[[], Program], report: GraphReport) -> None:
        copied = fx.Graph()
        copied.output(copied.graph_copy(gm.graph, {}))
        for node in list(copied.nodes):
            remember(node)
        self._eager = fx.GraphModule(gm, copied)  # making the program may take the other one apart
        self._make, self._program = make, None
        self.report = report
        self.future: Future[None] | None = None
        _COMPILES.submit(self)

    _program: Program | None

    def finish(self) -> None:
        """Make the program; what goes wrong is told by the report, and torch goes on."""
        try:
            self._program = self._make()
        except Exception as error:  # noqa: BLE001 - nobody is there who could take it
            self.report.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        with _COMPILES.lock:
            _COMPILES.open.discard(self)

    def __call__(self, args: list[Any]) -> Any:
        program = self._program
        if program is not None:
            return program(args)
        if self.future is None:
            _COMPILES.submit(self)
        self.report.meanwhile += 1
        with torch.no_grad():
            results = self._eager(*args)
        args.clear()
        return list(results) if isinstance(results, (tuple, list)) else results


def wait(timeout: float | None = None) -> bool:
    """Wait until the compiles in the background are done; whether they are. `timeout` is in seconds."""
    return _COMPILES.wait(timeout)


@contextlib.contextmanager
def shown(ops: int) -> Iterator[None]:
    """Tell a terminal about a compile that takes long."""
    import threading

    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    status = console.status(f"strata compiles a graph of {ops} ops of torch")
    timer = threading.Timer(SHOWN_AFTER, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
