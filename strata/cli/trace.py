"""`strata trace`: a file that Perfetto and Chrome show as a timeline."""

from __future__ import annotations

from argparse import Namespace

from strata.cli import show
from strata.cli.programs import open_program
from strata.cli.run import prepare
from strata.config import using


def trace(options: Namespace) -> None:
    """Compile and run under a trace."""
    from strata.runtime import trace as tracing

    with using(**({"num_threads": options.threads} if options.threads else {})), tracing(options.output) as tracer:
        program = open_program(options.model, options.device)
        feeds, _ = prepare(program, options)
        for _ in range(options.repeat):
            program.run(feeds)
    if options.json:
        show.as_json({"file": options.output, "events": len(tracer.events)})
        return
    print(f"{len(tracer.events)} events in {options.output}: `strata view {options.output}` makes a page of it;")
    print("https://ui.perfetto.dev and chrome://tracing open it, too")
