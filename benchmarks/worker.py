"""The process of one contender. It reads a line of JSON, does what it says, answers with a line, and waits again.

{"make": workload, "result": path}   build the workload if it has a form of it, run it once, save its first result
{"burst": seconds}                   call it for so long; answer with the seconds of each call
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

MOST = 2000  # calls in a burst
WARM = 0.003  # seconds of calls before the clock counts: threads wake up, caches fill


def main(contender: str, threads: int) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    _die_with_parent()

    from benchmarks.contenders import first_array, limit_cores, make_run, takers
    from benchmarks.measure import peak_memory
    from benchmarks.registry import load_workloads

    limit_cores(contender, threads)
    workloads = load_workloads()
    run: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any]
        try:
            if "make" in order:
                run = None  # the one before gives its memory back
                case = workloads[order["make"]].make()
                answer = {
                    "tolerance": case.tolerance,
                    "flops": case.flops,
                    "bytes": case.bytes,
                    "has_form": contender in takers(case),
                }
                if not answer["has_form"]:
                    print(json.dumps(answer), file=out, flush=True)
                    continue
                start = time.perf_counter()
                run = make_run(contender, case, threads)
                result = run()
                ready = time.perf_counter() - start
                _save(order["result"], first_array(result))
                answer |= {"ready": ready, "rss_mb": peak_memory()}
            else:
                answer = {"times": burst(run, order["burst"])}
        except Exception as error:  # noqa: BLE001 - whatever a contender cannot do is told, not fatal
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), file=out, flush=True)


def burst(run: Any, seconds: float) -> list[float]:
    """Times of calls one after the other, for so many seconds, three at least where they are short."""
    clock = time.perf_counter
    begin = clock()
    run()
    while clock() - begin < WARM:
        run()
    times: list[float] = []
    begin = clock()
    while len(times) < MOST:
        start = clock()
        run()
        end = clock()
        times.append(end - start)
        if end - begin >= seconds:
            break
    return times


def _save(path: str, array: Any) -> None:
    import numpy as np

    np.save(path, array)


def _die_with_parent() -> None:
    """A worker that is stopped when its parent is killed must not stay behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
