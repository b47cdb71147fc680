"""Generated source of any backend as text, whether or not its toolchain is installed."""

from __future__ import annotations

from strata.core import Target
from strata.errors import LowerError
from strata.mir import Constant, Graph, Input, Param


def stablehlo_text(graph: Graph) -> str:
    """A graph of known sizes as one StableHLO module: inputs, then parameters in, results out."""
    from strata.backends.stablehlo.emit import is_native, write_graph
    from strata.passes import PassContext, default_passes, run_passes

    ctx = PassContext(Target.named("baseline"), lambda op, _types=(): is_native(op), frozenset())
    made, _ = run_passes(default_passes(ctx), graph, ctx)
    leaves = (Input, Param, Constant)
    missing = dict.fromkeys(n.op.called for n in made.nodes() if not isinstance(n.op, leaves) and not is_native(n.op))
    if missing:
        raise LowerError(f"export: StableHLO has no counterpart of {', '.join(missing)}", code="L501")
    return write_graph(made)


def module_text(bytecode: bytes) -> str:
    """The text of a StableHLO module in MLIR bytecode, decoded by jaxlib."""
    from strata.backends.stablehlo.adapter import decoded

    return decoded(bytecode)
