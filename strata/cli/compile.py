"""`strata compile`: a bundle with machine code for several instruction sets, and the weights."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from typing import Any

from strata.cli import show
from strata.cli.arrays import read_mapping, read_sizes
from strata.cli.parser import Mistake
from strata.cli.programs import kind_of, open_program


def compile_(options: Namespace) -> None:
    """Compile and write."""
    if not options.output.endswith(".strata"):
        raise Mistake(f"--output {options.output}: a bundle is named X.strata")
    start = time.perf_counter()
    compiled = _compiled(options)
    compiled.save(options.output, weights=not options.no_weights, levels=options.level)
    seconds, size = time.perf_counter() - start, os.path.getsize(options.output)
    if options.json:
        show.as_json({"output": options.output, "signature": compiled.signature, "bytes": size, "seconds": seconds})
    else:
        print(f"{options.output}: {show.size(size)} in {show.duration(seconds)}")
        print(repr(compiled))


def _compiled(options: Namespace) -> Any:
    kind = kind_of(options.model)
    if kind == "bundle":
        raise Mistake(f"{options.model} is a bundle already")
    if options.size and kind != "onnx":
        raise Mistake(f"--size: {options.model} is not an ONNX model")
    program = open_program(options.model, options.device)
    if kind == "graph":
        if options.params:
            program.set_params(read_mapping(options.params))
        elif program.params and not options.no_weights:
            raise Mistake(f"{options.model} has parameters: --params gives their values, --no-weights leaves them out")
        return program.source
    if kind == "exported":
        return program.source
    if kind == "onnx":
        return program.source.compiled(read_sizes(options.size))
    return program.source.graph
