"""The compiler from scratch: graph, derivative, rewriting, plan, kernels, machine code, in one file that runs.

This retells how strata works with nothing but NumPy and llvmlite. Everything is smaller than in the package (one
element type, fixed sizes, scalar loops, one thread) but nothing is left out between a formula and native code. Read it
from top to bottom; `python docs/from_scratch.py` prints every stage of one program and checks it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np

# ------------------------------------------------------------------------------------------------------------ 1. graph
#
# A node is an op on other nodes. Nodes are interned: making one that exists gives the one that exists. So equality is
# identity, common subexpressions never exist, and a dict keyed by nodes is all the analysis machinery there is.


@dataclass(frozen=True, eq=False)
class Node:
    """A value: `op` on `inputs`, with a static `field` (a name, a number, an axis), and its shape."""

    op: str
    inputs: tuple[Node, ...]
    field: Any
    shape: tuple[int, ...]

    def __add__(self, other: Any) -> Node:
        return make("add", self, as_node(other, self.shape))

    def __mul__(self, other: Any) -> Node:
        return make("mul", self, as_node(other, self.shape))

    __radd__, __rmul__ = __add__, __mul__

    def __matmul__(self, other: Node) -> Node:
        """No op of its own: products of elements, summed. What a matrix product is will be found out in stage 5."""
        (m, _), (_, n) = self.shape, other.shape
        return (self.expand(2, n) * other.expand(0, m)).sum(1)

    def tanh(self) -> Node:
        return make("tanh", self)

    def sum(self, axis: int) -> Node:
        return make("sum", self, field=axis)

    def expand(self, axis: int, size: int) -> Node:
        """A new axis along which everything is equal."""
        return make("expand", self, field=(axis, size))


_interned: dict[Any, Node] = {}


def make(op: str, *inputs: Node, field: Any = None) -> Node:
    """The node, new or old. An op's shape rule is the only place that rejects its inputs."""
    key = (op, inputs, field)
    if key not in _interned:
        _interned[key] = Node(op, inputs, field, OPS[op].shape(field, *(x.shape for x in inputs)))
    return _interned[key]


def given(name: str, *shape: int) -> Node:
    return make("input", field=(name, shape))


def as_node(x: Any, shape: tuple[int, ...]) -> Node:
    return x if isinstance(x, Node) else make("const", field=(float(x), shape))


def topological(*roots: Node) -> list[Node]:
    """Every node behind the roots, inputs first."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in found:
            for x in node.inputs:
                visit(x)
            found[node] = None

    for root in roots:
        visit(root)
    return list(found)


def show_graph(*roots: Node) -> str:
    """One line a node: `%2 = add(%0, %1) : [4, 3]`."""
    names: dict[Node, str] = {}
    lines = []
    for node in topological(*roots):
        names[node] = node.field[0] if node.op == "input" else f"%{len(names)}"
        fields = "" if node.field is None or node.op == "input" else f" {{{node.field}}}"
        if node.op != "input":
            lines.append(
                f"  {names[node]} = {node.op}({', '.join(names[x] for x in node.inputs)}){fields} : {list(node.shape)}"
            )
    return "\n".join([*lines, f"  return {', '.join(names[r] for r in roots)}"])


# -------------------------------------------------------------------------------------------------------------- 2. ops
#
# An op is its rules, side by side: shape, meaning (NumPy, the oracle), derivative (made of ops), element (for kernels).


@dataclass(frozen=True)
class Op:
    shape: Callable[..., tuple[int, ...]]
    numpy: Callable[..., Any]  # (field, *arrays)
    vjp: Callable[..., tuple[Node, ...]]  # (node, cotangent) -> a cotangent for each input
    element: Callable[..., Any]  # (node, index, pull) -> an expression; pull(input, index) asks an input for an element


def same_shape(_: Any, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(shapes)) != 1:
        raise ValueError(f"shapes differ: {shapes}")
    return shapes[0]


def scalar(name: str) -> Callable[..., Any]:
    return lambda node, index, pull: Call(name, tuple(pull(x, index) for x in node.inputs))


def without(axis: int, items: tuple[Any, ...]) -> tuple[Any, ...]:
    return items[:axis] + items[axis + 1 :]


def sum_element(node: Node, index: tuple[str, ...], pull: Any) -> Any:
    axis = node.field
    name = f"k{len(index)}"  # no sum is inside another: stage 6 stores it first
    return Sum(name, node.inputs[0].shape[axis], pull(node.inputs[0], (*index[:axis], name, *index[axis:])))


OPS = {
    "input": Op(lambda f: f[1], None, None, None),  # type: ignore[arg-type]
    "const": Op(
        lambda f: f[1], lambda f: np.full(f[1], f[0], np.float32), lambda n, ct: (), lambda n, i, p: Number(n.field[0])
    ),
    "add": Op(same_shape, lambda f, x, y: x + y, lambda n, ct: (ct, ct), scalar("fadd")),
    "mul": Op(same_shape, lambda f, x, y: x * y, lambda n, ct: (ct * n.inputs[1], ct * n.inputs[0]), scalar("fmul")),
    "tanh": Op(same_shape, lambda f, x: np.tanh(x), lambda n, ct: (ct * (n * n * -1.0 + 1.0),), scalar("tanh")),
    "sum": Op(
        without, lambda axis, x: x.sum(axis),
        lambda n, ct: (ct.expand(n.field, n.inputs[0].shape[n.field]),), sum_element,
    ),
    "expand": Op(
        lambda f, s: (*s[: f[0]], f[1], *s[f[0] :]), lambda f, x: np.repeat(np.expand_dims(x, f[0]), f[1], f[0]),
        lambda n, ct: (ct.sum(n.field[0]),), lambda n, index, pull: pull(n.inputs[0], without(n.field[0], index)),
    ),
}  # fmt: skip


def evaluate(roots: list[Node], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The meaning of a graph; everything else is judged by it."""
    known: dict[Node, np.ndarray] = {}
    for node in topological(*roots):
        arrays = [known[x] for x in node.inputs]
        known[node] = feeds[node.field[0]] if node.op == "input" else OPS[node.op].numpy(node.field, *arrays)
    return [known[r] for r in roots]


# ------------------------------------------------------------------------------------------------------ 3. derivatives
#
# Reverse mode: walk the graph backwards and let each op say what its inputs' cotangents are. The result is a graph.


def gradient(loss: Node, wrt: list[Node]) -> list[Node]:
    cotangents: dict[Node, Node] = {loss: as_node(1.0, loss.shape)}
    for node in reversed(topological(loss)):
        if node.op == "input" or node not in cotangents:
            continue
        for x, ct in zip(node.inputs, OPS[node.op].vjp(node, cotangents[node]), strict=True):
            cotangents[x] = cotangents[x] + ct if x in cotangents else ct
    return [cotangents[x] for x in wrt]


# ------------------------------------------------------------------------------------------------------------ 4. passes
#
# A rule looks at a node and gives a better one, or None to decline. A pass rebuilds the graph with its rules.


def times_one(node: Node) -> Node | None:
    """x · 1 is x: derivatives are full of these."""
    if node.op == "mul":
        for x, y in (node.inputs, node.inputs[::-1]):
            if y.op == "const" and y.field[0] == 1.0:
                return x
    return None


def expanded_constant(node: Node) -> Node | None:
    """A constant along a new axis is a larger constant."""
    if node.op == "expand" and node.inputs[0].op == "const":
        return make("const", field=(node.inputs[0].field[0], node.shape))
    return None


def simplify(roots: list[Node]) -> list[Node]:
    table: dict[Node, Node] = {}
    for node in topological(*roots):
        made = make(node.op, *(table[x] for x in node.inputs), field=node.field)
        while better := times_one(made) or expanded_constant(made):
            made = better
        table[node] = made
    return [table[r] for r in roots]


# ----------------------------------------------------------------------------------------------------------- 5. kernels
#
# A kernel is one expression: the element of a stored value at an index, over elements of other stored values. It is
# made by pulling: each op puts its inputs' elements into its own. Fusion is nothing but not stopping. `expand`
# vanishes, being index arithmetic, and a matrix product appears by itself: sum k : a[i, k] * b[k, j].


@dataclass(frozen=True)
class Number:
    value: float

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True)
class Load:
    buffer: Node
    index: tuple[str, ...]

    def __str__(self) -> str:
        return f"{_buffer_name(self.buffer)}[{', '.join(self.index)}]"


@dataclass(frozen=True)
class Call:
    function: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        sign = {"fadd": "+", "fmul": "*"}.get(self.function)
        return f"({self.args[0]} {sign} {self.args[1]})" if sign else f"{self.function}({self.args[0]})"


@dataclass(frozen=True)
class Sum:
    axis: str
    extent: int
    body: Any

    def __str__(self) -> str:
        return f"(sum {self.axis} in {self.extent} : {self.body})"


def _buffer_name(node: Node) -> str:
    return node.field[0] if node.op == "input" else f"t{list(_interned.values()).index(node)}"


def kernel(root: Node, stored: set[Node]) -> Any:
    """The element of a stored value at index (i0, i1, …)."""

    def pull(node: Node, index: tuple[str, ...]) -> Any:
        if node.op == "input" or (node in stored and node is not root):
            return Load(node, index)
        return OPS[node.op].element(node, index, pull)

    return pull(root, tuple(f"i{n}" for n in range(len(root.shape))))


# -------------------------------------------------------------------------------------------------------------- 6. plan
#
# What is stored: the results, and what would be computed again and again otherwise: a value with a sum in it that an
# `expand` repeats, or that several others read. Stored values in between share one arena, by their lifetimes.


def choose_stored(roots: list[Node]) -> set[Node]:
    nodes = topological(*roots)
    readers: dict[Node, list[Node]] = {n: [r for r in nodes if n in r.inputs] for n in nodes}
    costly: set[Node] = set()
    stored = set(roots)
    for node in nodes:  # inputs first: a stored value is cheap to read
        if node.op == "sum" or any(x in costly and x not in stored for x in node.inputs):
            costly.add(node)
        is_repeated = any(r.op in ("expand", "sum") for r in readers[node]) or len(readers[node]) > 1
        if node in costly and is_repeated:
            stored.add(node)
    return {n for n in stored if n.op != "input"}


@dataclass(frozen=True)
class Plan:
    steps: list[tuple[Node, Any]]  # a stored value and its kernel, in order
    offsets: dict[Node, int]  # of values in the arena, in bytes
    arena: int
    roots: list[Node]

    def __str__(self) -> str:
        lines = []
        for node, body in self.steps:
            place = "result" if node in self.roots else f"arena + {self.offsets[node]}"
            axes = ", ".join(f"i{n} in {size}" for n, size in enumerate(node.shape))
            lines.append(f"  {_buffer_name(node)} ({place}) for {axes or 'one element'}:\n    {body}")
        return "\n".join([*lines, f"  arena of {self.arena} bytes"])


def make_plan(roots: list[Node]) -> Plan:
    stored = choose_stored(roots)
    order = [n for n in topological(*roots) if n in stored]
    steps = [(n, kernel(n, stored)) for n in order]
    reads = {n: {load.buffer for load in loads(body)} for n, body in steps}
    death = {n: max((at for at, m in enumerate(order) if n in reads[m]), default=len(order)) for n in order}
    offsets: dict[Node, int] = {}
    arena = 0
    for at, node in enumerate(order):
        if node in roots:
            continue
        size = -(-4 * int(np.prod(node.shape)) // 64) * 64
        living = sorted(
            (offsets[m], offsets[m] + -(-4 * int(np.prod(m.shape)) // 64) * 64) for m in offsets if death[m] >= at
        )
        place = 0
        for begin, end in living:  # the first gap that is large enough
            if begin - place >= size:
                break
            place = max(place, end)
        offsets[node] = place
        arena = max(arena, place + size)
    return Plan(steps, offsets, arena, roots)


def loads(body: Any) -> list[Load]:
    if isinstance(body, Load):
        return [body]
    parts = body.args if isinstance(body, Call) else (body.body,) if isinstance(body, Sum) else ()
    return [load for part in parts for load in loads(part)]


# ------------------------------------------------------------------------------------------------------ 7. machine code
#
# Kernels become LLVM IR as text: a loop for each axis of the output, and one for each sum, which adds in a fixed order.


class Emitter:
    """Writes one function: `run(ptr table)`, where the table holds a pointer for each buffer."""

    def __init__(self, slots: dict[Node, int]) -> None:
        self.slots, self.lines, self.count = slots, [], 0

    def value(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {text}")
        return f"%v{self.count}"

    def loop(self, extent: int, body: Callable[[str, str], str], start: str = "0.0") -> str:
        """`body(i, total)` gives the new total; the last one is the result."""
        self.count += 1
        n, before = self.count, f"%before{self.count}"
        self.lines += [f"  br label {before}", f"before{n}:", f"  br label %head{n}", f"head{n}:"]
        at = len(self.lines)
        new = body(f"%i{n}", f"%total{n}")
        phis = [f"  %i{n} = phi i64 [ 0, {before} ], [ %next{n}, %tail{n} ]",
                f"  %total{n} = phi float [ {start}, {before} ], [ {new}, %tail{n} ]"]  # fmt: skip
        self.lines[at:at] = phis
        self.lines += [f"  br label %tail{n}", f"tail{n}:", f"  %next{n} = add i64 %i{n}, 1"]
        self.lines += [f"  %more{n} = icmp slt i64 %next{n}, {extent}"]
        self.lines += [f"  br i1 %more{n}, label %head{n}, label %done{n}", f"done{n}:"]
        return new

    def address(self, buffer: Node, index: tuple[str, ...]) -> str:
        base = self.value(f"load ptr, ptr {self.value(f'getelementptr ptr, ptr %table, i64 {self.slots[buffer]}')}")
        flat = "0"
        for size, i in zip(buffer.shape, index, strict=True):
            flat = self.value(f"add i64 {self.value(f'mul i64 {flat}, {size}')}, {i}")
        return self.value(f"getelementptr float, ptr {base}, i64 {flat}")

    def expression(self, e: Any, axes: dict[str, str]) -> str:
        match e:
            case Number(value):
                return f"0x{np.float64(np.float32(value)).view(np.uint64):016X}"  # LLVM writes floats as f64 bits
            case Load(buffer, index):
                return self.value(f"load float, ptr {self.address(buffer, tuple(axes[i] for i in index))}")
            case Call("tanh", (x,)):
                return self.value(f"call float @tanhf(float {self.expression(x, axes)})")
            case Call(function, args):
                return self.value(f"{function} float {', '.join(self.expression(a, axes) for a in args)}")
            case Sum(axis, extent, body):
                return self.loop(
                    extent,
                    lambda i, total: self.value(f"fadd float {total}, {self.expression(body, axes | {axis: i})}"),
                )
        raise AssertionError(e)

    def step(self, node: Node, body: Any) -> None:
        def nest(n: int, axes: dict[str, str]) -> str:
            if n < len(node.shape):
                return self.loop(node.shape[n], lambda i, _: nest(n + 1, axes | {f"i{n}": i}))
            result = self.expression(body, axes)
            self.lines.append(
                f"  store float {result}, ptr {self.address(node, tuple(axes[f'i{k}'] for k in range(len(axes))))}"
            )
            return "0.0"

        nest(0, {})

    def text(self) -> str:
        return "\n".join(
            ["declare float @tanhf(float)", "define void @run(ptr %table) {", "entry:", *self.lines, "  ret void", "}"]
        )


class Compiled:
    """Native code for a plan. Calling it is one native call, however many kernels there are."""

    def __init__(self, roots: list[Node]) -> None:
        self.plan = make_plan(simplify(roots))
        self.inputs = [n for n in topological(*self.plan.roots) if n.op == "input"]
        buffers = [*self.inputs, *(n for n, _ in self.plan.steps)]
        self.slots = {n: i for i, n in enumerate(buffers)}
        emitter = Emitter(self.slots)
        for node, body in self.plan.steps:
            emitter.step(node, body)
        self.text = emitter.text()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(cpu=llvm.get_host_cpu_name(), opt=3)
        module = llvm.parse_assembly(self.text)
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._engine.get_function_address("run"))

    def __call__(self, **feeds: np.ndarray) -> list[np.ndarray]:
        arena = np.empty(self.plan.arena + 64, np.uint8)
        results = {n: np.empty(n.shape, np.float32) for n in self.plan.roots}
        table = np.empty(len(self.slots), np.int64)
        kept = [np.ascontiguousarray(feeds[n.field[0]], np.float32) for n in self.inputs]  # alive while the code runs
        for node, slot in self.slots.items():
            if node.op == "input":
                table[slot] = kept[slot].ctypes.data
            else:
                table[slot] = (
                    results[node].ctypes.data if node in results else arena.ctypes.data + self.plan.offsets[node]
                )
        self._run(table.ctypes.data)
        return [results[r] for r in self.plan.roots]


# ---------------------------------------------------------------------------------------------------------- all of it


def main() -> None:
    x, w, b, v = given("x", 8, 5), given("w", 5, 16), given("b", 16), given("v", 16, 3)
    hidden = (x @ w + b.expand(0, 8)).tanh()
    loss = (hidden @ v).tanh().sum(1).sum(0)
    print("graph\n" + show_graph(loss))
    roots = [loss, *gradient(loss, [w, b])]
    before, after = (len(topological(*found)) for found in (roots, simplify(roots)))
    print(f"\nwith its derivative for w and b: {before} nodes, simplified {after}")
    compiled = Compiled(roots)
    print("\nplan\n" + str(compiled.plan))
    print(f"\nmachine code from {len(compiled.text.splitlines())} lines of LLVM IR")

    rng = np.random.default_rng(0)
    feeds = {n.field[0]: rng.standard_normal(n.shape).astype(np.float32) for n in (x, w, b, v)}
    for ours, meant in zip(compiled(**feeds), evaluate(roots, feeds), strict=True):
        np.testing.assert_allclose(ours, meant, rtol=2e-5, atol=2e-5)
    wide = {name: a.astype(np.float64) for name, a in feeds.items()}  # finite differences want f64
    step = np.zeros_like(wide["b"])
    step[3] = 1e-5
    up, down = (evaluate([loss], wide | {"b": wide["b"] + s})[0] for s in (step, -step))
    slope = compiled(**feeds)[2][3]
    np.testing.assert_allclose(slope, (up - down) / 2e-5, rtol=1e-4)
    print(f"\nagrees with NumPy; d loss / d b[3] = {slope:.5f}, by finite differences {(up - down) / 2e-5:.5f}")


if __name__ == "__main__":
    main()
