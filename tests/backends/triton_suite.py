"""The shipped suite on Triton kernels without a GPU, as commands. `triton` has to be installed (1 GB, so that no extra
of the tests brings it); no GPU, driver or torch is needed.

    TRITON_INTERPRET=1 python -m tests.backends.triton_suite interpret          every sample of every op: 3 minutes
    TRITON_INTERPRET=1 python -m tests.backends.triton_suite interpret --every 9 --first 4
    python -m tests.backends.triton_suite compile --gpu sm_90                   every kernel of the suite: 15 minutes
    python -m tests.backends.triton_suite compile --gpu gfx942 --every 40 softmax matmul

`interpret` runs whole plans through Triton's interpreter and compares with the oracle. `compile` makes binaries, and
says how many registers and bytes of stack (spills) the kernels of NVIDIA GPUs take.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
import time
from collections.abc import Iterator

import strata.ops  # noqa: F401 - fills the registry
from strata.backends import register_backend
from strata.backends.triton.backend import PlannedBackend, interpreted
from strata.backends.triton.codegen.render import TritonProgram, render
from strata.backends.triton.launch.compile import binary_of, compiled
from strata.backends.triton.target import Gpu
from strata.errors import StrataError
from strata.runtime import CompilePipeline
from strata.testing.backend_suite import SampleCase, cases, run_case
from strata.testing.check import build, single_op_graph, type_of


def chosen(names: list[str], every: int, first: int) -> Iterator[SampleCase]:
    wanted = (c for c in cases() if not names or c.op.name in names or c.name in names)
    for at, case in enumerate(wanted):
        if at % every == first:
            yield case


def interpret(found: Iterator[SampleCase]) -> int:
    """Runs cases in the interpreter; gives how many fail."""
    register_backend("triton_interpreter", interpreted())
    total, bad, start = 0, 0, time.monotonic()
    for case in found:
        total += 1
        try:
            run_case("triton_interpreter", case)
        except (StrataError, AssertionError) as error:
            bad += 1
            print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"{total} samples in Triton's interpreter, {bad} wrong, {time.monotonic() - start:.0f} s")
    return bad if total else 1


def programs(case: SampleCase) -> Iterator[TritonProgram]:
    """Of the plan of a case."""
    graph = single_op_graph(build(case.op, case.sample), [type_of(a) for a in case.arrays()])
    for kernel in CompilePipeline("triton_planned").compile(graph).lir.kernels.values():
        yield from render(kernel).programs


def compile_all(found: Iterator[SampleCase], gpu: Gpu) -> int:
    """Compiles the kernels of cases, each text once; gives how many fail."""
    register_backend("triton_planned", PlannedBackend(gpu))
    seen: set[str] = set()
    bad, spilled, most, start = 0, 0, 0, time.monotonic()
    for case in found:
        for program in programs(case):
            if program.text() in seen:
                continue
            seen.add(program.text())
            try:
                made = compiled(program, gpu)
                binary = binary_of(made, program, gpu)
            except StrataError as error:
                bad += 1
                print(f"{case.name}: {error}: {error.__cause__}", file=sys.stderr)
                continue
            if gpu.overlaps and not waits_first(made.asm["ptx"]):
                bad += 1
                print(f"{case.name}: {program.name} uses memory before it waits for the launch before", file=sys.stderr)
            if gpu.kind == "cuda":
                registers, stack = usage(binary.code)
                most = max(most, registers)
                spilled += stack > 0
                if stack:
                    print(f"{case.name}: {program.name}: {registers} registers, {stack} bytes of stack")
    print(
        f"{len(seen)} programs for {gpu}, {bad} rejected, {time.monotonic() - start:.0f} s"
        + (f"; at most {most} registers, {spilled} with a stack" if gpu.kind == "cuda" else "")
    )
    return bad if seen else 1


_USES = re.compile(r"^\s*(?:@!?%p\d+ )?(?:ld|st|cp|red|atom|prefetch|tensormap)\.(?!param)\S*", re.MULTILINE)


def waits_first(ptx: str) -> bool:
    """Whether a launch that is brought up early waits before it lets another one begin, and before it uses memory."""
    places = [ptx.find(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents")]
    first = _USES.search(ptx)
    return 0 < places[0] < places[1] and (first is None or places[1] < first.start())


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, as the section `.nv.info` says."""
    at, size, count, names_at = (
        struct.unpack_from(kind, cubin, place)[0] for kind, place in (("<Q", 40), ("<H", 58), ("<H", 60), ("<H", 62))
    )
    heads = [struct.unpack_from("<IIQQQQIIQQ", cubin, at + n * size) for n in range(count)]
    texts = heads[names_at][4]
    found = {0x2F: 0, 0x11: 0}  # registers of a function, the size of its frame
    for head in heads:
        if cubin[texts + head[0] : cubin.index(b"\0", texts + head[0])] != b".nv.info":
            continue
        place, end = head[4], head[4] + head[5]
        while place + 4 <= end:
            form, what, length = struct.unpack_from("<BBH", cubin, place)
            if form == 4 and what in found:
                found[what] = max(found[what], struct.unpack_from("<I", cubin, place + 8)[0])
            place += 4 + (length if form == 4 else 0)
    return found[0x2F], found[0x11]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("what", choices=["interpret", "compile"])
    parser.add_argument("--gpu", default="sm_90")
    parser.add_argument("--every", type=int, default=1, help="of every so many cases, one")
    parser.add_argument("--first", type=int, default=0, help="which one")
    parser.add_argument("names", nargs="*", help="ops or cases; all of them by default")
    given = parser.parse_intermixed_args()
    found = chosen(given.names, given.every, given.first)
    bad = interpret(found) if given.what == "interpret" else compile_all(found, Gpu.named(given.gpu))
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
