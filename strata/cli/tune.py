"""`strata tune`: search for schedules of a model's kernels by measuring them; winners are kept in the disk cache."""

from __future__ import annotations

import time
from argparse import Namespace

from strata.cli import show
from strata.cli.arrays import read_sizes
from strata.cli.programs import graph_of


def tune(options: Namespace) -> None:
    """Compile with a search, and say what it chose. A compile with `tune="beam"` takes the same from the cache."""
    from strata.runtime import CompileOptions, Session

    graph = graph_of(options.model, options.device)
    binding = read_sizes(options.size)
    start = time.perf_counter()
    compiled = Session(options.device).compile(graph, CompileOptions(tune="beam", dim_binding=binding or None))
    seconds = time.perf_counter() - start
    found = [{"kernel": name, "schedule": kernel.schedule} for name, kernel in compiled.lir.kernels.items()]
    found += [{"kernel": s.name, "schedule": s.schedule} for s in compiled.lir.schedule if s.schedule]
    if options.json:
        show.as_json({"model": options.model, "device": options.device, "seconds": seconds, "kernels": found})
        return
    searched = [one for one in found if one["schedule"]]
    print(f"{len(searched)} of {len(found)} kernels have a schedule that was searched for, {show.duration(seconds)}")
    for one in searched:
        print(f"{one['kernel']}: {one['schedule']}")
