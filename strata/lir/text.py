"""The plan as text: buffers, then steps.

    lir @score target host {
      buffer x : f32[4, 8] input x
      buffer %0 : f32[4] scratch 0..1
      buffer out0 : f32[4, 8] result 0
      run k0(x) -> %0  # reduce_max
      run k1(x, %0) -> out0  # subtract + exp
      return out0
    }

That is `lir.summary()`; last come the plans inside of loops and branches, `body 0 of step 3 { … }`. `str(lir)`, the
module, has after each step its phase and the nodes of the graph that it computes, then the kernels and the graph: all
that a plan is, `parse_module(show_module(lir))` being the same again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from textwrap import dedent, indent

import numpy as np

from strata.core import Symbol, Target, TensorType, parse_dim
from strata.errors import ParseError
from strata.kernel import Kernel, parse_kernel, show_kernel
from strata.lir.ir import PLAIN_MEMORY, Io, Lir, LirBuffer, MemoryPlanOptions, Step
from strata.lir.views import Spacing
from strata.mir import REGISTRY, Constant, Graph, Literal, Node, Parser, leaf_name, parse

# ---------------------------------------------------------------------------------------------------------------- print


def show(lir: Lir) -> str:
    """The plan of a graph, kernels by name."""
    texts = [_plan_text(lir, [f"{_step(s)}  # {s.label}" for s in lir.schedule]), *_bodies(lir, show)]
    return "\n".join(texts)


def show_module(lir: Lir) -> str:
    """The plan with everything it refers to."""
    nodes = lir.graph.nodes()
    arrays = {n.op.data: i for i, n in reversed(list(enumerate(nodes))) if isinstance(n.op, Constant)}
    sources = [
        f" node {arrays[Literal(lir.constants[int(b.key)])]}" if b.role == "constant" and b.key is not None else ""
        for b in lir.buffers
    ]
    numbers = _Numbers(nodes)
    steps = [f"{_step(s)}{_detail(s, numbers)}  # {s.label}" for s in lir.schedule]
    kernels = [show_kernel(k) for k in lir.kernels.values()]
    return "\n\n".join([_plan_text(lir, steps, sources), *kernels, str(lir.graph), *_bodies(lir, show_module)]) + "\n"


def _bodies(lir: Lir, text_of: Callable[[Lir], str]) -> list[str]:
    """The plans inside of steps."""
    return [
        f"body {i} of step {at} {{\n{indent(text_of(body).rstrip(), '  ')}\n}}"
        for at, step in enumerate(lir.schedule)
        for i, body in enumerate(step.bodies)
    ]


def _plan_text(lir: Lir, steps: Sequence[str], sources: Sequence[str] = ()) -> str:
    memory = "" if lir.memory == PLAIN_MEMORY else f" memory {lir.memory.mode} {lir.memory.alignment}"
    lines = [f"lir @{_name(lir.name)} target {lir.target}{memory} {{"]
    lines += [
        f"  {_buffer(b)}{source}" for b, source in zip(lir.buffers, sources or [""] * len(lir.buffers), strict=True)
    ]
    lines += [f"  {s}" for s in steps]
    lines.append(f"  return {_list(lir.io.outputs)}")
    return "\n".join([*lines, "}"])


def _name(text: str) -> str:
    """A name, quoted unless it is made of plain characters."""
    return text if re.fullmatch(r"[%\w./:-]+", text) else json.dumps(text)


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(_name, names))


def _buffer(b: LirBuffer) -> str:
    detail = f" {b.birth}..{b.death}" if b.role == "scratch" else f" {_name(str(b.key))}" if b.key is not None else ""
    shared = f" in {b.alias}" if b.alias is not None else ""
    return f"buffer {_name(b.name)} : {b.type} {b.role}{detail}{shared}"


def _step(s: Step) -> str:
    kind = "run" if s.kernel is not None else "module" if s.is_module else "host"
    starts = dict(s.updates)
    made = ", ".join(_name(o) + (f" from {_name(starts[o])}" if o in starts else "") for o in s.outputs)
    return f"{kind} {s.name}({_list(s.inputs)}) -> {made}"


class _Numbers:
    """The place of a node in the graph; of one that was read from a store, that of its like."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._places = {id(n): i for i, n in enumerate(nodes)}
        self._alike = {_kind(n): i for i, n in reversed(list(enumerate(nodes)))}

    def __call__(self, node: Node) -> int:
        place = self._places.get(id(node))
        return self._alike[_kind(node)] if place is None else place


def _kind(node: Node) -> tuple[object, ...]:
    return node.op, node.types, tuple(x.type for x in node.inputs)


def _detail(s: Step, numbers: _Numbers) -> str:
    nodes = " ".join(str(numbers(n)) for n in s.nodes)
    views = (
        ""
        if s.views is None
        else " views " + "; ".join(f"{v.start} by {' | '.join(map(str, v.strides))}" for v in s.views)
    )
    schedule = f" schedule {s.schedule}" if s.schedule else ""
    return f" {s.phase} nodes {nodes}".rstrip() + schedule + views


# ----------------------------------------------------------------------------------------------------------------- read

_NAME = r'(?:"(?:[^"\\]|\\.)*"|[^\s,"()]+)'
_NAMES = rf"(?:{_NAME}(?:, {_NAME})*)?"
_MADE = rf"{_NAME}(?: from {_NAME})?"
_HEAD = re.compile(
    rf"lir @(?P<name>{_NAME}) target (?P<target>[\w-]+)(?: memory (?P<mode>[a-z]+) (?P<alignment>\d+))? \{{\Z"
)
_BUFFER = re.compile(
    rf"buffer (?P<name>{_NAME}) : (?P<type>\w+\[.*?\]) (?P<role>[a-z]+)(?: (?P<detail>{_NAME}))?"
    rf"(?: in (?P<alias>{_NAME}))?(?: node (?P<node>\d+))?\Z"
)
_STEP = re.compile(
    rf"(?P<kind>run|host|module) (?P<name>\w+)\((?P<inputs>{_NAMES})\) -> (?P<outputs>(?:{_MADE}(?:, {_MADE})*)?) "
    r"(?P<phase>[a-z]+) nodes ?(?P<nodes>[\d ]*?)(?: schedule (?P<schedule>.*?))?(?: views (?P<views>.*))?\Z"
)


def parse_module(text: str) -> Lir:
    """Reads what `show_module` prints; an error names the line."""
    sections = _sections(text)
    graph = parse(sections["mir"][0])
    kernels = [parse_kernel(k) for k in sections.get("kernel", [])]
    made = _PlanReader(sections["lir"][0], graph, {k.name: k for k in kernels}, _read_bodies(sections)).plan()
    made.verify()
    return made


_BODY = re.compile(r"body (\d+) of step (\d+) \{\Z")


def _read_bodies(sections: Mapping[str, list[str]]) -> dict[int, tuple[Lir, ...]]:
    """The plans inside of steps, by the number of the step."""
    found: dict[int, tuple[Lir, ...]] = {}
    for section in sections.get("body", []):
        head, _, rest = section.partition("\n")
        match = _BODY.match(head)
        at = int(match[2]) if match else -1
        if not match or int(match[1]) != len(found.get(at, ())):
            raise ParseError(f"plan text: expected `body 0 of step 3 {{`, found {head[:40]!r}", code="P122")
        found[at] = (*found.get(at, ()), parse_module(dedent(rest.removesuffix("}"))))
    return found


def _sections(text: str) -> dict[str, list[str]]:
    """The parts of a module by their first word; a part ends with a line that is a closing brace alone."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if lines or line.strip():
            lines.append(line)
        if line == "}":
            found.setdefault(lines[0].split()[0], []).append("\n".join(lines))
            lines = []
    if lines or len(found.get("lir", [])) != 1 or len(found.get("mir", [])) != 1:
        raise ParseError(
            "a plan's text has one `lir`, its kernels and one `mir`, each ending in a line `}`", code="P122",
            fix="str(plan), which has them all; plan.summary() shows the steps only",
        )  # fmt: skip
    return found


class _PlanReader:
    def __init__(
        self, text: str, graph: Graph, kernels: Mapping[str, Kernel], bodies: Mapping[int, tuple[Lir, ...]]
    ) -> None:
        self.lines = text.splitlines()
        self.graph, self.kernels, self.bodies = graph, kernels, bodies
        self.nodes = graph.nodes()
        self.symbols: Mapping[str, Symbol] = graph.symbols()
        self.constants: list[np.ndarray] = []
        self.at = 0

    def fail(self, reason: str) -> ParseError:
        return ParseError(
            f"plan text, line {self.at + 1}: {reason}", code="P122", operands=(self.lines[self.at].strip(),)
        )

    def plan(self) -> Lir:
        head = _HEAD.match(self.lines[0])
        if not head:
            raise self.fail("expected `lir @name target cpu {`")
        buffers: list[LirBuffer] = []
        steps: list[Step] = []
        outputs: tuple[str, ...] = ()
        for at, raw in enumerate(self.lines[1:-1], 1):
            self.at = at
            line = raw.split("  # ")[0].strip()
            if line.startswith("buffer "):
                buffers.append(self._buffer(line))
            elif line.startswith("return "):
                outputs = _names(line[len("return ") :])
            elif line:
                steps.append(self._step(line, len(steps)))
        io = Io(self._bound(buffers, "input"), self._bound(buffers, "param"), outputs)
        made, memory = Target.of_plan(head["target"]), PLAIN_MEMORY
        if head["mode"]:
            self.at = 0
            memory = MemoryPlanOptions(head["mode"], self._number(head["alignment"]))
        return Lir(self.graph, made, tuple(buffers), tuple(steps), io, tuple(self.constants), memory=memory)

    def _buffer(self, line: str) -> LirBuffer:
        match = _BUFFER.match(line)
        if not match:
            raise self.fail("expected `buffer name : type role`")
        kind: TensorType = Parser(match["type"], REGISTRY).type(self.symbols)
        role, detail = match["role"], match["detail"]
        if role == "scratch":
            birth, _, death = (detail or "").partition("..")
            lives = self._number(birth), self._number(death)
            return LirBuffer(_plain(match["name"]), kind, role, None, *lives, match["alias"])
        numbered = role in ("result", "constant")
        key = self._number(detail or "") if numbered else None if detail is None else _plain(detail)
        if role == "constant":
            if key != len(self.constants):
                raise self.fail(f"constant {key} comes where constant {len(self.constants)} is expected")
            self.constants.append(self._array(match["node"] or "", kind))
        return LirBuffer(_plain(match["name"]), kind, role, key)

    def _number(self, text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
            raise self.fail(f"expected a number, found {text[:40]!r}")
        return int(text)

    def _array(self, number: str, kind: TensorType) -> np.ndarray:
        op = self._node(number).op if number else None
        if not isinstance(op, Constant) or op.infer() != kind:
            raise self.fail(f"node {number or '?'} of the graph is not a constant {kind}")
        return op.data.array

    def _step(self, line: str, at: int) -> Step:
        match = _STEP.match(line)
        if not match:
            raise self.fail("expected a buffer, a step or return")
        nodes = tuple(self._node(n) for n in match["nodes"].split())
        kernel = self.kernels.get(match["name"]) if match["kind"] == "run" else None
        if match["kind"] == "run" and kernel is None:
            raise self.fail(f"the text has no kernel {match['name']}")
        views = None if match["views"] is None else tuple(self._view(v) for v in match["views"].split("; ") if v)
        label = self.lines[self.at].partition("  # ")[2]
        made = re.findall(rf"({_NAME})(?: from ({_NAME}))?", match["outputs"])
        outputs = tuple(_plain(name) for name, _ in made)
        updates = tuple((_plain(name), _plain(start)) for name, start in made if start)
        inputs = _names(match["inputs"])
        return Step(
            match["name"],
            inputs,
            outputs,
            label,
            kernel,
            nodes,
            match["phase"],
            updates,
            views,
            match["kind"] == "module",
            self.bodies.get(at, ()),
            match["schedule"] or "",
        )

    def _node(self, number: str) -> Node:
        at = self._number(number)
        if not 0 <= at < len(self.nodes):
            raise self.fail(f"the graph has no node {number}")
        return self.nodes[at]

    def _view(self, text: str) -> Spacing:
        start, by, strides = text.partition(" by ")
        if not by:
            raise self.fail("expected `start by strides`")
        parts = [s for s in strides.split(" | ") if s]
        return Spacing(parse_dim(start, self.symbols), tuple(parse_dim(s, self.symbols) for s in parts))

    def _bound(self, buffers: Sequence[LirBuffer], role: str) -> tuple[tuple[str, str], ...]:
        by_key = {b.key: b.name for b in buffers if b.role == role}
        leaves = self.graph.inputs if role == "input" else self.graph.params
        lost = next((leaf_name(x) for x in leaves if leaf_name(x) not in by_key), None)
        if lost is not None:
            raise self.fail(f"no buffer is the {role} {lost!r}")
        return tuple((leaf_name(x), by_key[leaf_name(x)]) for x in leaves)


def _names(text: str) -> tuple[str, ...]:
    return tuple(_plain(name) for name in re.findall(_NAME, text))


def _plain(name: str) -> str:
    if not name.startswith('"'):
        return name
    try:
        made = str(json.loads(name))
        made.encode()  # half of a surrogate pair has no bytes
        return made
    except ValueError:
        raise ParseError(f"plan text: {name[:40]} is not a quoted name", code="P122") from None
