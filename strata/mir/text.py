"""MIR as text, and back: `parse(show(g)) == g`.

    mir @score(x: f32[B, 8], param w: f32[8, 2]) -> f32[B, 2] where B in 1..64 {
      %0 = matmul(x, w) : f32[B, 2]
      %1 = softmax(%0) {axis = 1} : f32[B, 2]
      return %1
    }

Field values describe themselves: 3, 0.5, True, None, "text", (1, 2), f32, <S + 1>, dense(f32[2], [1.0, 2.0]), or a
nested `mir @body(...) ... { ... }`. Types in the text are claims that are checked against the ops' shape rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import numpy as np

from strata.config import config
from strata.core import DType, Symbol, SymExpr, TensorType, as_dtype, located, over_budget, parse_dim
from strata.errors import BudgetError, ParseError, StrataError, VerifyError
from strata.kinds import counted
from strata.mir.fields import require_fields
from strata.mir.graph import Graph
from strata.mir.ir import REGISTRY, Leaf, Node, Op, Registry, Value, make_node
from strata.mir.leaves import Input, Literal, Param, leaf_name
from strata.mir.origin import origin

T = TypeVar("T")
_SIMPLE_NAME = re.compile(r"[A-Za-z_][\w.]*\Z")
MAX_DIGITS = 24  # of a whole number
LEAST, MOST = -(1 << 63), (1 << 64) - 1
# what ops raise for fields of the right kinds that do not fit each other or the inputs
FIELD_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
SHOWN = 200  # characters of a line that an error shows
INLINE_LIMIT = 16  # constants with more elements are printed as hexadecimal bytes


# ---------------------------------------------------------------------------------------------------------------- print


def show(graph: Graph, indent: str = "") -> str:
    """The text of a graph."""
    return "\n".join(_graph_lines(graph, indent))


def _graph_lines(graph: Graph, indent: str) -> list[str]:
    names: dict[Value, str] = {}
    header: list[str] = []
    for x in (*graph.inputs, *graph.params):
        names[x] = show_name(leaf_name(x))
        header.append(f"{'param ' if isinstance(x.node.op, Param) else ''}{names[x]}: {x.type}")
    results = ", ".join(str(x.type) for x in graph.results)
    lines = [f"{indent}mir @{show_name(graph.name)}({', '.join(header)}) -> {results}{show_where(graph.symbols())} {{"]
    counter = 0
    for node in graph.nodes():
        if isinstance(node.op, (Input, Param)):
            continue
        fresh = []
        for value in node.outputs:
            names[value] = f"%{counter}"
            fresh.append(names[value])
            counter += 1
        lines += _node_lines(node, fresh, names, indent + "  ")
    lines.append(f"{indent}  return {', '.join(names[x] for x in graph.results)}")
    lines.append(f"{indent}}}")
    return lines


def show_where(symbols: Mapping[str, Symbol]) -> str:
    """The bounds of symbols, as the end of a header."""
    if not symbols:
        return ""
    parts = [f"{s.name} in {s.lo}..{'' if s.hi is None else s.hi}" for _, s in sorted(symbols.items())]
    return f" where {', '.join(parts)}"


def _node_lines(node: Node, fresh: list[str], names: Mapping[Value, str], indent: str) -> list[str]:
    inputs = ", ".join(names[x] for x in node.inputs)
    types = ", ".join(map(str, node.types))
    fields = dict(node.op.static_fields())
    text = f"{indent}{', '.join(fresh)} = {node.op.name}({inputs})"
    if not fields:
        return [f"{text} : {types}"]
    shown = ", ".join(f"{k} = {show_field(v, indent)}" for k, v in fields.items())
    return f"{text} {{{shown}}} : {types}".split("\n")


def show_field(value: Any, indent: str = "") -> str:
    """One field value as text."""
    match value:
        case bool() | None:
            return str(value)
        case int():
            return str(value)
        case float():
            return repr(float(value))
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        case bytes():
            return f'bytes"{value.hex()}"'
        case DType():
            return value.name
        case SymExpr():
            return f"<{value}>"
        case TensorType():
            return str(value)
        case tuple():
            inner = ", ".join(show_field(v, indent) for v in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        case Literal():
            return _show_literal(value)
        case Graph():
            return show(value, indent + "  ").lstrip()
    if hasattr(value, "to_text"):  # registered values such as quantisation schemes
        return f'{type(value).__name__}"{value.to_text()}"'
    raise VerifyError(f"a field of type {type(value).__name__} has no text form", code="V114")


def _show_literal(literal: Literal) -> str:
    array = literal.array
    kind = TensorType(as_dtype(array.dtype), array.shape)
    if array.size > INLINE_LIMIT or array.dtype.kind == "c" or not kind.dtype.np.isbuiltin:
        return f"dense({kind}, 0x{array.tobytes().hex()})"
    items = [_show_item(x) for x in array.reshape(-1).tolist()]
    return f"dense({kind}, [{', '.join(items)}])"


def _show_item(x: Any) -> str:
    if isinstance(x, float) and not math.isfinite(x):
        return repr(x)
    return repr(x)


def show_name(text: str) -> str:
    """A name, quoted unless it is a simple one."""
    return text if _SIMPLE_NAME.match(text) else show_field(text)


# ---------------------------------------------------------------------------------------------------------------- parse

_TOKEN = re.compile(
    r"""\s*(?:\#[^\n]*\n?\s*)*(?:
      (?P<hex>0x[0-9a-fA-F]*) |
      (?P<number>-?(?:\d+\.(?!\.)\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\d+|inf\b|nan\b)) |
      (?P<string>"(?:[^"\\]|\\.)*") |
      (?P<value>%\d+) |
      (?P<name>[A-Za-z_][\w.]*) |
      (?P<dim><[^>]*>) |
      (?P<mark>->|\.\.|[@(){}\[\],=:])
    )""",
    re.VERBOSE,
)

VALUE_TYPES: dict[str, Any] = {}  # class name -> from_text, for field values with a `to_text`


@located
def parse(text: str, registry: Registry = REGISTRY) -> Graph:
    """Read one graph; the error names the line."""
    parser = Parser(text, registry)
    return parser.whole(parser.graph)


class Parser:
    """A cursor over tokens that builds graphs."""

    def __init__(self, text: str, registry: Registry) -> None:
        self.text, self.registry, self.at = text, registry, 0
        self.depth = 0  # graphs around the place that is read
        self.token, self.kind, self.start = "", "", 0
        self.advance()

    def advance(self) -> str:
        taken = self.token
        rest = re.compile(r"(?:\s|\#[^\n]*(?:\n|\Z))*").match(self.text, self.at)
        self.at = rest.end() if rest else self.at
        if self.at >= len(self.text):
            self.token, self.kind, self.start = "", "end", self.at
            return taken
        match = _TOKEN.match(self.text, self.at)
        if not match:
            self.fail(f"cannot read {self.text[self.at : self.at + 20]!r}", self.at)
        assert match is not None
        assert match.lastgroup is not None
        self.token, self.kind, self.start = match.group(match.lastgroup), match.lastgroup, self.at
        self.at = match.end()
        return taken

    def whole(self, read: Callable[[], T]) -> T:
        """What `read` finds in the text, after which nothing may follow."""
        try:
            made = read()
            self.end()
        except RecursionError:
            self.fail("values are nested too deeply here")
        return made

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Raise for the line of the current token, or of a position."""
        line = self.line(at)
        source = self.text.split("\n")[line - 1].strip()
        shown = source if len(source) <= SHOWN else f"{source[:SHOWN]} …"
        raise ParseError(f"line {line}: {message}", code="P111", operands=(shown,))

    def line(self, at: int | None = None) -> int:
        """The number of the line of the current token, or of a position."""
        return self.text.count("\n", 0, self.start if at is None else at) + 1

    def whole_number(self, digits: str) -> int:
        if len(digits) > MAX_DIGITS or not LEAST <= int(digits) <= MOST:
            self.fail(f"{digits[:MAX_DIGITS]} is not a whole number of 64 bits")
        return int(digits)

    def take(self, token: str) -> str:
        if self.token != token:
            self.fail(f"expected {token!r}, found {self.token or 'the end'!r}")
        return self.advance()

    def accept(self, token: str) -> bool:
        if self.token == token and self.kind != "string":
            self.advance()
            return True
        return False

    def end(self) -> None:
        if self.kind != "end":
            self.fail(f"nothing may follow a graph, found {self.token!r}")

    def identifier(self) -> str:
        if self.kind == "string":
            return _unquote(self.advance())
        if self.kind != "name":
            self.fail(f"expected a name, found {self.token or 'the end'!r}")
        return self.advance()

    def graph(self) -> Graph:
        begin, symbols = self.start, self._symbols_ahead()
        self.depth += 1
        if self.depth > config().max_depth:
            raise over_budget("max_depth", self.depth, f"line {self.line()}: {self.depth} graphs inside each other")
        self.take("mir")
        self.take("@")
        graph = Graph(self.identifier())
        names = self.leaves(graph, symbols)
        self.take("->")
        claims = self.types(symbols)
        self.skip_where()
        self.take("{")
        while not self.accept("return"):
            self.statement(names, symbols)
        results = self.several(lambda: self.operand(names))
        self.take("}")
        for i, (claim, value) in enumerate(zip(claims, results, strict=False)):
            if claim != value.type:
                self.fail(f"result {i}: text says {claim}, the graph gives {value.type}", begin)
        if len(claims) != len(results):
            self.fail(f"text declares {counted(len(claims), 'result')}, returns {len(results)}", begin)
        self.depth -= 1
        return graph.outputs(*results)

    def leaves(self, made: Any, symbols: Mapping[str, Symbol]) -> dict[str, Any]:
        """Declare the inputs and parameters of a header on `made`, by name."""
        found: dict[str, Any] = {}

        def leaf() -> None:
            is_param = self.token == "param" and self.text[self.at : self.at + 1] != ":"
            if is_param:
                self.advance()
            name = self.identifier()
            self.take(":")
            found[name] = (made.param if is_param else made.input)(name, self.type(symbols))

        self.take("(")
        self.until(")", leaf)
        return found

    def until(self, close: str, read: Callable[[], T]) -> list[T]:
        """Items with commas between them, up to a closing token."""
        items: list[T] = []
        while not self.accept(close):
            items.append(read())
            if self.token != close:
                self.take(",")
        return items

    def several(self, read: Callable[[], T]) -> list[T]:
        """One item or more, with commas between them."""
        items = [read()]
        while self.accept(","):
            items.append(read())
        return items

    def types(self, symbols: Mapping[str, Symbol]) -> list[TensorType]:
        return self.several(lambda: self.type(symbols))

    def skip_where(self) -> None:
        """Pass over the bounds that `_symbols_ahead` has read."""
        if self.accept("where"):
            while self.token != "{" and self.kind != "end":
                self.advance()

    def _symbols_ahead(self) -> dict[str, Symbol]:
        """Bounds stand at the end of the header but are needed for its types."""
        end = self.text.find("{", self.start)
        head = self.text[self.start : end if end >= 0 else None]
        _, _, clause = head.partition(" where ")
        found: dict[str, Symbol] = {}
        for match in re.finditer(r"([A-Za-z_][\w.]*) in (\d+)\.\.(\d*)", clause):
            name, lo, hi = match.groups()
            low, high = self.whole_number(lo), self.whole_number(hi) if hi else None
            if high is not None and high < low:
                self.fail(f"size {name}: bounds {low}..{high} are not an interval of sizes")
            found[name] = Symbol(name, low, high)
        return found

    def type(self, symbols: Mapping[str, Symbol]) -> TensorType:
        begin = self.start
        name = self.identifier()
        if self.token != "[":
            self.fail(f"expected '[', found {self.token or 'the end'!r}")
        close = self.text.find("]", self.at)
        if close < 0:
            self.fail("'[' has no ']'", begin)
        inside = self.text[self.at : close]
        self.at = close + 1
        self.advance()
        try:
            return TensorType(as_dtype(name), tuple(parse_dim(p, symbols) for p in _split(inside)))
        except BudgetError:
            raise
        except StrataError as error:
            self.fail(error.summary, begin)

    def operand(self, names: Mapping[str, Value]) -> Value:
        begin = self.start
        name = self.advance() if self.kind == "value" else self.identifier()
        if name not in names:
            self.fail(f"{name} is not defined before it is used", begin)
        return names[name]

    def statement(self, names: dict[str, Value], symbols: Mapping[str, Symbol]) -> None:
        begin = self.start
        if self.kind != "value":
            self.fail(f"expected '%number = op(...)' or 'return', found {self.token or 'the end'!r}")
        targets = [self.advance()]
        while self.accept(","):
            targets.append(self.advance())
        self.take("=")
        op_name = self.identifier()
        self.take("(")
        inputs = self.until(")", lambda: self.operand(names))
        fields = self.fields(symbols)
        self.take(":")
        claims = self.types(symbols)
        node = self._make(op_name, fields, inputs, begin)
        if tuple(claims) != node.types:
            given = ", ".join(map(str, claims))
            self.fail(f"{targets[0]}: text says {given}, {op_name} gives {', '.join(map(str, node.types))}", begin)
        if len(targets) != len(node.types):
            self.fail(f"{op_name} has {counted(len(node.types), 'result')}, the text names {len(targets)}", begin)
        for target, value in zip(targets, node.outputs, strict=True):
            names[target] = value

    def _make(self, name: str, fields: dict[str, Any], inputs: list[Value], begin: int) -> Node:
        try:
            kind = self.registry[name]
            require_fields(kind, fields)
            op: Op = kind(**fields)
            with origin(made_by="parse"):
                return make_node(op, inputs)
        except BudgetError:
            raise
        except StrataError as error:
            self.fail(error.summary, begin)
        except FIELD_ERRORS as error:
            self.fail(f"{name}: {str(error).rpartition('__init__() ')[2]}", begin)

    def fields(self, symbols: Mapping[str, Symbol]) -> dict[str, Any]:
        """`{name = value, …}`, or nothing."""

        def pair() -> tuple[str, Any]:
            key = self.identifier()
            self.take("=")
            return key, self.field(symbols)

        return dict(self.until("}", pair)) if self.accept("{") else {}

    def field(self, symbols: Mapping[str, Symbol]) -> Any:
        match self.kind:
            case "number":
                token = self.advance()
                return self.whole_number(token) if re.fullmatch(r"-?\d+", token) else float(token)
            case "string":
                return _unquote(self.advance())
            case "dim":
                return parse_dim(self.advance()[1:-1], symbols)
            case "name":
                return self._named_field(symbols)
        if not self.accept("("):
            self.fail(f"{self.token!r} is not a field value")
        return tuple(self.until(")", lambda: self.field(symbols)))

    def _named_field(self, symbols: Mapping[str, Symbol]) -> Any:
        if self.token == "mir":
            return self.graph()
        if self.token in VALUE_TYPES:
            from_text = VALUE_TYPES[self.advance()]
            return from_text(_unquote(self.advance()))
        word = self.token
        if word in ("True", "False", "None"):
            self.advance()
            return {"True": True, "False": False, "None": None}[word]
        if word in ("inf", "nan"):
            return float(self.advance())
        if word == "dense":
            return self._literal(symbols)
        if word == "complex":
            self.advance()
            self.take("(")
            real = float(self.advance())
            self.take(",")
            imaginary = float(self.advance())
            self.take(")")
            return complex(real, imaginary)
        if self.text[self.at : self.at + 1] == "[":
            return self.type(symbols)
        return as_dtype(self.advance())

    def _literal(self, symbols: Mapping[str, Symbol]) -> Literal:
        self.take("dense")
        self.take("(")
        kind = self.type(symbols)
        self.take(",")
        if self.kind == "hex":
            data = bytes.fromhex(self.advance()[2:])
            if len(data) != kind.size * kind.dtype.itemsize:
                self.fail(f"dense: {kind} has {kind.size * kind.dtype.itemsize} bytes, the text has {len(data)}")
            array = np.frombuffer(data, kind.dtype.np).reshape(kind.static_shape)
        else:
            self.take("[")
            items = self.until("]", lambda: self.field(symbols))
            if len(items) != kind.size:
                self.fail(f"dense: {kind} has {kind.size} elements, the text has {len(items)}")
            try:
                array = np.array(items, kind.dtype.np).reshape(kind.static_shape)
            except (ValueError, TypeError, OverflowError) as error:
                self.fail(f"dense: {kind}: {error}")
        self.take(")")
        return Literal(array)


def _unquote(token: str) -> str:
    return re.sub(r"\\(.)", lambda m: "\n" if m.group(1) == "n" else m.group(1), token[1:-1])


def _split(text: str) -> list[str]:
    """Split at top-level commas: `min(S, 4), 8` has two parts."""
    parts: list[str] = []
    depth, begin = 0, 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    parts.append(text[begin:])
    return [p.strip() for p in parts if p.strip()]


def is_leaf(node: Node) -> bool:
    return isinstance(node.op, Leaf)
