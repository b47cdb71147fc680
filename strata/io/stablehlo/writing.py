"""StableHLO export: text that XLA, IREE and other compilers read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.backends import stablehlo_text
from strata.core import here, located
from strata.errors import OptionError, SymbolError, file_error
from strata.mir import Graph


@located
def export(program: Any, path: str | os.PathLike[str] | None = None, *, sizes: Mapping[str, int] | None = None) -> str:
    """Write a graph, or a module of blocks, as one StableHLO module, whose text is also returned.

    Its `main` takes the inputs, then the parameters, and gives the results. All sizes must be known: `sizes` gives
    those that are symbols. What only a run can find, such as an id out of range, is not checked.
    """
    if not isinstance(program, Graph) and (isinstance(program, (str, bytes)) or not hasattr(program, "lower")):
        raise OptionError(f"export: {type(program).__name__} is not a graph or module", code="O503")
    graph: Graph = program if isinstance(program, Graph) else program.lower()
    graph = graph.bind(sizes) if sizes else graph
    if graph.symbols():
        name = min(graph.symbols())
        raise SymbolError(f"export: StableHLO text is for known sizes, {name} is open", code="S157",
                          fix=f"export(graph, sizes={{{name!r}: 8}})")  # fmt: skip
    text = stablehlo_text(graph)
    if path is not None:
        try:
            Path(path).write_text(text, "utf-8")
        except OSError as error:
            raise file_error(path, error, code="F500", what="cannot be written", place=here()) from None
    return text
