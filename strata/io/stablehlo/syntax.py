"""The text of StableHLO modules: functions, operations and regions, in the short forms and in MLIR's general one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from strata.core import DType, as_dtype
from strata.errors import ParseError, StrataError

TOKEN = re.compile(
    r"""\s+ | //[^\n]*
    | (?P<type>tensor<(?:[^<>]|<[^<>]*>)*> | ![\w.]+(?:<(?:[^<>]|<[^<>]*>)*>)?)
    | (?P<dense>dense(?:_resource)?<(?:"[^"]*"|[^>"])*>)
    | (?P<array>array<[^>]*>)
    | (?P<attribute>\#[\w.]+<(?:->|[^>])*>)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<value>%[\w.$-]+(?:\#\d+)?)
    | (?P<symbol>@(?:[\w.$-]+|"[^"]*"))
    | (?P<block>\^[\w.$-]+)
    | (?P<alias>\#[\w.]+)
    | (?P<number>-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?))
    | (?P<word>[A-Za-z_][\w.$]*)
    | (?P<sign>->|::|[-(){}\[\]<>,:=*+?])""",
    re.VERBOSE,
)
DTYPES = {
    "i1": "bool", "f8E4M3FN": "f8e4m3", "f8E5M2": "f8e5m2", "complex<f32>": "c64", "complex<f64>": "c128",
    "index": "i64",
    **{f"ui{n}": f"u{n}" for n in (4, 8, 16, 32, 64)}, **{f"si{n}": f"i{n}" for n in (4, 8, 16, 32, 64)},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HloType:
    """A tensor type as it is written: None is a size that the text leaves open."""

    dtype: DType
    shape: tuple[int | None, ...]

    @property
    def is_static(self) -> bool:
        return None not in self.shape


@dataclass(slots=True)
class HloOp:
    """One operation: names of what it reads and makes, attributes, regions, types of what it makes."""

    name: str
    line: int
    results: list[str] = field(default_factory=list)
    operands: list[str] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    regions: list[HloRegion] = field(default_factory=list)
    types: list[HloType | None] = field(default_factory=list)


@dataclass(slots=True)
class HloRegion:
    """Named arguments and operations; the last one returns."""

    arguments: list[tuple[str, HloType | None]]
    body: list[HloOp]


@dataclass(slots=True)
class HloFunction:
    """A function of a module."""

    name: str
    region: HloRegion


def parse_module(text: str) -> dict[str, HloFunction]:
    """The functions of a module, by name."""
    reader = HloReader(text)
    try:
        return reader.module()
    except StrataError:
        raise
    except (ValueError, IndexError, TypeError, RecursionError) as error:  # numbers, types and elements that do not fit
        reader.fail(f"{type(error).__name__}: {error}")


def read_type(text: str) -> HloType | None:
    """`tensor<?x4xf32>`; None is a type without elements, such as a token."""
    if not text.startswith("tensor<"):
        return None
    inner = text[7:-1].split(",", 1)[0].strip()
    *dims, kind = re.split(r"(?<=[\d?])x", inner)
    return HloType(element_type(kind), tuple(None if d == "?" else int(d) for d in dims))


def element_type(name: str) -> DType:
    return as_dtype(DTYPES.get(name, name))


def dense(text: str, kind: HloType) -> np.ndarray:
    """The elements of `dense<…>` under a static type."""
    if text.startswith("dense_resource"):
        raise ParseError(
            "constants that are kept outside of the text are not in it: print them with the module", code="P601"
        )
    inner, shape = text[len("dense<") : -1].strip(), tuple(d or 0 for d in kind.shape)
    if not inner:
        return np.zeros(shape, kind.dtype.np)
    if inner.startswith('"0x'):
        raw = bytes.fromhex(inner[3:-1])
        if kind.dtype.is_bool:
            bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
            flat = (
                bits[: int(np.prod(shape))].astype(bool)
                if len(raw) * 8 >= np.prod(shape)
                else np.frombuffer(raw, np.bool_)
            )
        else:
            flat = np.frombuffer(raw, kind.dtype.np)
        return np.broadcast_to(flat, shape).copy() if flat.size == 1 else flat.reshape(shape)
    if kind.dtype.is_complex:
        pairs = re.findall(r"\(\s*([^,()]+),\s*([^,()]+)\)", inner)
        part = np.dtype(np.float32 if kind.dtype.itemsize == 8 else np.float64)
        elements: list[Any] = [complex(_element(a, part), _element(b, part)) for a, b in pairs]
    else:
        elements = [_element(item, kind.dtype.np) for item in re.findall(r"[^\s,\[\]]+", inner)]
    flat = np.array(elements, kind.dtype.np)
    return np.full(shape, flat[0]) if flat.size == 1 else flat.reshape(shape)


def _element(text: str, dtype: np.dtype[Any]) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text.startswith(("0x", "-0x")) and dtype.kind not in "iub":
        return np.array(int(text, 16), f"u{dtype.itemsize}").view(dtype)[()]
    if dtype.kind in "iu" or dtype.kind == "b":
        return np.array(int(text, 0)).astype(dtype)[()]
    return np.float64(text)


class HloReader:
    """A cursor over tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(text):
            match = TOKEN.match(text, at)
            if match is None:
                self._fail_at(at, f"{text[at : at + 12]!r} is not a token of StableHLO")
            if match.lastgroup is not None:
                self.tokens.append((match.lastgroup, match[0], at))
            at = match.end()
        self._drop_places()
        self.at = 0

    def _drop_places(self) -> None:
        """Leave out `loc(…)`, which says where operations came from, and the names for such places."""
        kept: list[tuple[str, str, int]] = []
        i, tokens = 0, self.tokens
        while i < len(tokens):
            if tokens[i][:2] == ("word", "loc") and i + 1 < len(tokens) and tokens[i + 1][1] == "(":
                depth, i = 0, i + 1
                while i < len(tokens):
                    depth += {"(": 1, ")": -1}.get(tokens[i][1], 0) if tokens[i][0] == "sign" else 0
                    i += 1
                    if depth == 0:
                        break
                if len(kept) >= 2 and kept[-1][1] == "=" and kept[-2][0] == "alias":
                    del kept[-2:]
                continue
            kept.append(tokens[i])
            i += 1
        self.tokens = kept

    # cursor

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else "end"

    @property
    def token(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def peek(self, ahead: int = 1) -> str:
        return self.tokens[self.at + ahead][1] if self.at + ahead < len(self.tokens) else ""

    def next(self) -> str:
        text = self.token
        self.at += 1
        return text

    def accept(self, text: str) -> bool:
        if self.token == text and self.kind != "string":
            self.at += 1
            return True
        return False

    def take(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected {text!r}, found {self.token or 'the end'!r}")

    def fail(self, message: str) -> NoReturn:
        place = self.tokens[min(self.at, len(self.tokens) - 1)][2] if self.tokens else 0
        self._fail_at(place, message)

    def _fail_at(self, place: int, message: str) -> NoReturn:
        line = self.text.count("\n", 0, place) + 1
        raise ParseError(f"StableHLO, line {line}: {message}", code="P600")

    def line(self) -> int:
        place = self.tokens[min(self.at, len(self.tokens) - 1)][2] if self.tokens else 0
        return self.text.count("\n", 0, place) + 1

    def listed(self, close: str, read: Callable[[], Any]) -> list[Any]:
        found = []
        while not self.accept(close):
            found.append(read())
            self.accept(",")
            if self.kind == "end":
                self.fail(f"expected {close!r}, found the end")
        return found

    # modules and functions

    def module(self) -> dict[str, HloFunction]:
        found: dict[str, HloFunction] = {}
        is_wrapped = False
        if self.token == "module":
            self.next()
            if self.kind == "symbol":
                self.next()
            if self.accept("attributes"):
                self.dictionary()
            self.take("{")
            is_wrapped = True
        while self.kind != "end" and self.token != "}":
            if self.kind == "alias":
                self.next()
                self.take("=")
                self.attribute()
                continue
            made = self.function()
            found[made.name] = made
        if is_wrapped:
            self.take("}")
        if not found:
            self.fail("there is no function")
        return found

    def function(self) -> HloFunction:
        if self.next() != "func.func":
            self.at -= 1
            self.fail(f"expected a function, found {self.token!r}")
        while self.kind == "word":  # public, private
            self.next()
        name = self.next().lstrip("@").strip('"')
        self.take("(")
        arguments = self.listed(")", self.argument)
        if self.accept("->"):
            self.result_types()
        if self.accept("attributes"):
            self.dictionary()
        return HloFunction(name, HloRegion(arguments, self.body()))

    def argument(self) -> tuple[str, HloType | None]:
        name = self.next()
        self.take(":")
        kind = read_type(self.next())
        if self.token == "{":
            self.dictionary()
        return name, kind

    def result_types(self) -> list[HloType | None]:
        if not self.accept("("):
            return [self.type()]
        return self.listed(")", self.type_and_dictionary)

    def type(self) -> HloType | None:
        if self.kind != "type":
            self.fail(f"expected a type, found {self.token!r}")
        return read_type(self.next())

    def type_and_dictionary(self) -> HloType | None:
        kind = self.type()
        if self.token == "{":
            self.dictionary()
        return kind

    def body(self) -> list[HloOp]:
        self.take("{")
        found = []
        while not self.accept("}"):
            if self.kind == "end":
                self.fail("a body does not end")
            found.append(self.operation())
        return found

    def region(self) -> HloRegion:
        """`{ ^bb0(%a: tensor<f32>): … }`"""
        self.take("{")
        arguments: list[tuple[str, HloType | None]] = []
        if self.kind == "block":
            self.next()
            if self.accept("("):
                arguments = self.listed(")", self.argument)
            self.take(":")
        self.at -= 1  # `body` takes a brace: the token before its operations stands for it
        self.tokens[self.at] = ("sign", "{", self.tokens[self.at][2])
        return HloRegion(arguments, self.body())

    # operations

    def operation(self) -> HloOp:
        line, results = self.line(), list[str]()
        while self.kind == "value":
            name = self.next()
            if self.accept(":"):
                results += [f"{name}#{i}" for i in range(int(self.next()))]
            else:
                results.append(name)
            if not self.accept(","):
                self.take("=")
                break
        if self.kind == "string":
            made = HloOp(self.next().strip('"'), line)
            self.general(made)
        else:
            if self.kind != "word":
                self.fail(f"expected an operation, found {self.token!r}")
            made = HloOp(self.next(), line)
            self.short(made)
        made.results = results
        return made

    def general(self, made: HloOp) -> None:
        """`(%a, %b) <{…}> ({…}) {…} : (types) -> types`"""
        self.take("(")
        made.operands = self.listed(")", self.next)
        if self.accept("<"):
            made.attributes |= self.dictionary()
            self.take(">")
        if self.accept("("):
            made.regions = self.listed(")", self.region)
        if self.token == "{":
            made.attributes |= self.dictionary()
        self.take(":")
        self.function_type(made)

    def function_type(self, made: HloOp) -> None:
        self.take("(")
        self.listed(")", self.type)
        self.take("->")
        made.types = self.result_types()

    def short(self, made: HloOp) -> None:
        """The form that an operation is printed in: values, words, names with values, then types."""
        name = made.name.rpartition(".")[2]
        if name == "reduce":
            self.reduce(made)
            return
        if name == "while":
            self.loop(made)
            return
        while True:
            match self.kind:
                case "value":
                    made.operands.append(self.next())
                case "symbol" | "string":
                    made.words.append(self.next().lstrip("@").strip('"'))
                case "dense":
                    made.attributes["value"] = self.next()
                case "word" if self.peek() == "=":
                    key = self.next()
                    self.next()
                    made.attributes[key] = self.pair()
                case "word":
                    made.words.append(self.next())
                case "sign" if self.token == ",":
                    self.next()
                case "sign" if self.token == "(":
                    self.next()
                    self.inside(made)
                case "sign" if self.token == "[":
                    made.attributes["ranges"] = self.ranges()
                case "sign" if self.token == "{":
                    made.attributes |= self.dictionary()
                case "sign" if self.token == ":":
                    self.next()
                    self.types(made)
                    return
                case _:
                    return

    def inside(self, made: HloOp) -> None:
        """Values and named settings in parentheses."""
        while not self.accept(")"):
            if self.kind == "value":
                made.operands.append(self.next())
            elif self.kind == "word" and self.peek() == "=":
                key = self.next()
                self.next()
                made.attributes[key] = self.pair()
            elif not self.accept(","):
                self.fail(f"{made.name}: found {self.token!r}")

    def pair(self) -> Any:
        """A value, or two joined by `x` (and `->`), as axes of two operands are."""
        found = [self.attribute()]
        while (
            self.token == "x"
            or self.token == "->"
            or (self.kind == "word" and self.token.startswith("x") and self.token == "x")
        ):
            self.next()
            found.append(self.attribute())
        return found[0] if len(found) == 1 else found

    def ranges(self) -> list[tuple[int, int, int]]:
        self.take("[")

        def one() -> tuple[int, int, int]:
            found = [int(self.next())]
            while self.accept(":"):
                found.append(int(self.next()))
            return found[0], found[1], found[2] if len(found) > 2 else 1

        return self.listed("]", one)

    def types(self, made: HloOp) -> None:
        if self.token == "(":
            self.function_type(made)
            return
        found = [self.type()]
        while self.token == "," and self.tokens[self.at + 1][0] == "type":
            self.next()
            found.append(self.type())
        made.types = self.result_types() if self.accept("->") else found

    def reduce(self, made: HloOp) -> None:
        """`(%x init: %c), (%y init: %d) applies add across dimensions = [1] : types`, or with a reducer's body."""
        starts: list[str] = []
        while self.accept("(") or (self.token == "," and self.peek() == "(" and self.accept(",") and self.accept("(")):
            made.operands.append(self.next())
            self.take("init")
            self.take(":")
            starts.append(self.next())
            self.take(")")
        made.operands += starts
        if self.accept("applies"):
            made.words.append(self.next())
        self.take("across")
        self.take("dimensions")
        self.take("=")
        made.attributes["dimensions"] = self.attribute()
        if self.token == "{":
            made.attributes |= self.dictionary()
        self.take(":")
        self.types(made)
        if self.accept("reducer"):
            pairs: list[list[tuple[str, HloType | None]]] = []
            while self.accept("("):
                pairs.append(self.listed(")", self.argument))
            made.regions = [HloRegion([p[0] for p in pairs] + [p[1] for p in pairs], self.body())]

    def loop(self, made: HloOp) -> None:
        """`(%a = %x, …) : types cond {…} do {…}`"""
        self.take("(")
        names: list[tuple[str, HloType | None]] = []
        while not self.accept(")"):
            names.append((self.next(), None))
            self.take("=")
            made.operands.append(self.next())
            self.accept(",")
        if self.accept(":"):
            self.types(made)
        if self.accept("attributes"):
            self.dictionary()
        self.take("cond")
        cond = HloRegion(names, self.body())
        self.take("do")
        made.regions = [cond, HloRegion(names, self.body())]

    # attributes

    def dictionary(self) -> dict[str, Any]:
        self.take("{")
        found: dict[str, Any] = {}
        while not self.accept("}"):
            key = self.next().strip('"')
            found[key] = self.pair() if self.accept("=") else True
            self.accept(",")
            if self.kind == "end":
                self.fail("attributes do not end")
        return found

    def attribute(self) -> Any:
        kind, text = self.kind, self.token
        match kind:
            case "sign" if text == "[":
                self.next()
                return self.listed("]", self.attribute)
            case "sign" if text == "{":
                return self.dictionary()
            case "number":
                self.next()
                value: Any = float(text) if re.search(r"[.eE]", text) and not text.startswith("0x") else int(text, 0)
                self.typed()
                return value
            case "array":
                self.next()
                items = text[len("array<") : -1].partition(":")[2]
                return [_plain(item) for item in items.split(",") if item.strip()]
            case "dense":
                self.next()
                self.take(":")
                held = read_type(self.next())
                if held is None:
                    self.fail("elements without a type")
                return dense(text, held).tolist()
            case "attribute":
                self.next()
                return described(text)
            case "string":
                self.next()
                self.typed()
                return text[1:-1]
            case "symbol":
                self.next()
                return text.lstrip("@").strip('"')
            case "word" | "alias" | "type":
                self.next()
                return {"true": True, "false": False}.get(text, text)
        return self.fail(f"{text!r} is not an attribute")

    def typed(self) -> None:
        """The type after a number."""
        if self.token == ":" and self.tokens[self.at + 1][0] == "word":  # not that of a result
            self.next()
            self.next()


def _plain(text: str) -> Any:
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    return float(text) if re.search(r"[.eE]", text) else int(text)


def described(text: str) -> Any:
    """`#stablehlo.gather<offset_dims = [1], …>` by name, `#stablehlo<comparison_direction LT>` as its last word."""
    inner = text[text.index("<") + 1 : -1].strip()
    if "=" not in inner or "->" in inner:
        return inner.split()[-1] if "->" not in inner else inner
    found: dict[str, Any] = {}
    for key, value in re.findall(r"(\w+)\s*=\s*(\[[^\]]*\]|[\w.]+)", inner):
        if value.startswith("["):
            found[key] = [int(v) for v in re.findall(r"-?\d+", value)]
        else:
            found[key] = int(value) if value.lstrip("-").isdigit() else value
    return found


def axes_of(text: Any) -> Sequence[str]:
    """`[b, f, 0, 1]` as a list of its parts."""
    return text if isinstance(text, list) else re.findall(r"\w+", str(text))
