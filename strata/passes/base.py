"""What a pass is: a frozen value with a name and options, that maps a graph to a graph.

`str(pass)` is how the command line spells it, `fold{limit=4096}`, and `parse_passes` reads that back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from strata.core import Target, TensorType
from strata.errors import DTypeError, OptionError, ParseError, ShapeError, UnknownNameError, VerifyError
from strata.kinds import shown
from strata.mir import Graph, Op, Value, as_tuple, field_symbols, near, origin_of, verify
from strata.modules import LateTable


@dataclass(frozen=True)
class PassContext:
    """What passes may ask: the target, what the backend takes as it is, and whether inexact rules are allowed.

    `claims` names forms of convolutions that the backend has kernels for; None stands for all of them.
    """

    target: Target | None = None
    takes: Callable[..., bool] = field(default=lambda op, types=(): True)  # of an op, and the types it is applied to
    claims: frozenset[str] | None = None
    exact: bool = True
    verify_each: bool = True

    def claimed(self, name: str) -> bool:
        return self.claims is None or name in self.claims


@dataclass(frozen=True)
class Pass:
    """Base of all passes. Fields are options."""

    name: ClassVar[str] = "?"
    keeps_signature: ClassVar[bool] = True  # else it does not run on graphs inside of ops
    seeks: ClassVar[frozenset[str]] = frozenset()  # ops without which it does nothing; none: any graph

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        raise NotImplementedError

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        options = ", ".join(f"{k}={v}" for k, v in given.items())
        return f"{self.name}{{{options}}}" if options else self.name


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass did: nodes before and after, and seconds."""

    name: str
    before: int
    after: int
    seconds: float
    changed: bool


def run_passes(passes: Sequence[Pass], graph: Graph, ctx: PassContext) -> tuple[Graph, list[PassRecord]]:
    """Run passes in order; each result is verified, and must keep the types of the results."""
    records: list[PassRecord] = []
    for one in passes:
        start = time.perf_counter()
        before = len(graph.nodes())
        idle = one.seeks and not any(node.op.name in one.seeks for node in graph.nodes())
        made = graph if idle else _applied(one, graph, ctx)
        if ctx.verify_each and made is not graph:
            verify(made, after=one.name)
            check_results(one, graph, made)
        seconds = time.perf_counter() - start
        records.append(PassRecord(str(one), before, len(made.nodes()), seconds, made is not graph))
        graph = made
    return _inside(passes, graph, ctx, records), records


def _inside(passes: Sequence[Pass], graph: Graph, ctx: PassContext, records: list[PassRecord]) -> Graph:
    """The same passes on bodies of loops and on branches, which run as the rest of the program does."""
    holders = [node.op for node in graph.nodes() if node.op.nested()]
    if not holders:
        return graph
    start = time.perf_counter()
    kept = [one for one in passes if one.keeps_signature]
    count = [0, 0]

    def change(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        op, graphs = value.node.op, []
        for nested in op.nested():
            opened = nested.opened()
            made, _ = run_passes(kept, opened, ctx)
            graphs.append(nested.graph if made is opened else nested.closed(made))
            count[0] += len(opened.nodes())
            count[1] += len(made.nodes())
        if all(made is nested.graph for made, nested in zip(graphs, op.nested(), strict=True)):
            return None
        return as_tuple(op.with_nested(graphs)(*inputs))

    made = rewrite(graph, change, "bodies")
    names = " + ".join(dict.fromkeys(op.name for op in holders))
    records.append(PassRecord(f"all in {names}", count[0], count[1], time.perf_counter() - start, made is not graph))
    return made


def _applied(one: Pass, graph: Graph, ctx: PassContext) -> Graph:
    """What a pass makes of a graph. An op that does not take what the pass gives it is the pass's mistake."""
    try:
        return one.run(graph, ctx)
    except (DTypeError, ShapeError) as error:
        if error.applied is None or not _sizes_are_known(*error.applied):
            raise  # of a size that is a symbol, the op says that it wants a number
        raise VerifyError(
            f"pass {one.name} applied an op to what it does not take in @{graph.name}: {error.summary}",
            code="V304", place=error.place, operands=error.operands,
        ) from error  # fmt: skip


def _sizes_are_known(op: Op, types: Sequence[TensorType]) -> bool:
    return all(t.is_static for t in types) and not field_symbols(tuple(op.static_fields().values()))


def check_results(one: Pass, before: Graph, after: Graph) -> None:
    for i, (a, b) in enumerate(zip(before.results, after.results, strict=True)):
        if a.type != b.type:
            raise VerifyError(
                f"pass {one.name} changed result {i} of @{before.name} from {a.type} to {b.type}", code="V301"
            )


def rewrite(graph: Graph, change: Callable[[Value, tuple[Value, ...]], Sequence[Value] | None], made_by: str) -> Graph:
    """Rebuild a graph from its leaves: `change(output 0 of a node, its new inputs)` gives new outputs, or None."""
    table: dict[Value, Value] = {}
    touched = False
    for node in graph.nodes():
        inputs = tuple(table.get(x, x) for x in node.inputs)
        with origin_of(node, made_by=made_by):
            outs = change(Value(node, 0), inputs)
            if outs is None and inputs != node.inputs:
                made = node.op(*inputs)
                outs = made if isinstance(made, tuple) else (made,)
        if outs is None:
            continue
        if not isinstance(outs, (tuple, list)) or len(outs) != len(node.types):
            raise OptionError(f"rewrite: {made_by} gives the outputs of a node or None, got {shown(outs)}", code="O140")
        for old, new in zip(node.outputs, outs, strict=True):
            if new != old:
                table[old] = new
                touched = True
    if not touched:
        return graph
    return with_results(graph, [table.get(x, x) for x in graph.results])


def with_results(graph: Graph, results: Sequence[Value]) -> Graph:
    """The same inputs and parameters with other results."""
    made = Graph(graph.name)
    made.scope, made.inputs, made.params = graph.scope, graph.inputs, graph.params
    made.results = tuple(results)
    return made


PASSES: LateTable[type[Pass]] = LateTable()


def register(cls: type[Pass]) -> type[Pass]:
    """Make a pass known to the command line by its name."""
    PASSES[cls.name] = cls
    return cls


_SPELLED = re.compile(r"\s*([a-z][a-z_0-9]*)\s*(?:\{([^}]*)\})?\s*(?:,|\Z)")


def parse_passes(text: str) -> list[Pass]:
    """`fold{limit=64}, decompose` as passes."""
    found: list[tuple[type[Pass], str]] = []
    at = 0
    while at < len(text):
        match = _SPELLED.match(text, at)
        if not match:
            raise ParseError(f"passes: cannot read {text[at:]!r}", code="P120")
        name, options = match.groups()
        if name not in PASSES:
            raise UnknownNameError(f"no pass is named {name!r}{near(name, PASSES)}", code="N120")
        found.append((PASSES[name], options or ""))
        at = match.end()
    return [_with_options(cls, options) for cls, options in found]


def _with_options(cls: type[Pass], text: str) -> Pass:
    known = {f.name: f for f in fields(cls)}
    given: dict[str, Any] = {}
    for part in (p for p in text.split(",") if p.strip()):
        key, _, value = (x.strip() for x in part.partition("="))
        if key not in known:
            raise OptionError(f"pass {cls.name} has no option {key!r}{near(key, known)}", code="O140")
        given[key] = _option(value)
    return cls(**given)


def _option(text: str) -> Any:
    words: dict[str, Any] = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text
