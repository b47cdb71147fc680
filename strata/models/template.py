"""Chat templates: sandboxed Jinja, with budgets for steps, bytes and time.

The sandbox keeps a template from Python's insides, not from a loop of ten thousand millions or a text of gigabytes.
Here every loop counts its steps, whatever makes a text or a list is looked at before and charged after, and the clock
is read between steps.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import partial, wraps
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from strata.config import config
from strata.core import Table, over_budget
from strata.errors import FileError, OptionError, StrataError

MAX_BITS = 1 << 16  # of a number
ENTRY = 64  # bytes of a list for each of its entries, with what stands for it in a text
PIECE = 64  # bytes of a text that another is split into, beside its characters
WIDTHS = ("center", "indent", "wordwrap", "truncate", "batch", "slice", "tojson", "round")  # filters that take sizes
GLANCES = ("length", "count", "first", "last")  # filters that do not walk over what they are given
SPLITS = ("split", "rsplit", "splitlines")
PADS = ("center", "ljust", "rjust", "zfill")


class _Meter:
    """What one use of a template has taken."""

    def __init__(self) -> None:
        self.limits = config()
        self.steps = 0
        self.bytes = 0
        self.end = time.thread_time() + self.limits.max_template_seconds

    def step(self) -> None:
        self.steps += 1
        if self.steps > self.limits.max_steps:
            raise over_budget("max_steps", self.steps, f"the chat template takes {self.steps} steps")
        self.look_at_the_clock()

    def look_at_the_clock(self) -> None:
        if time.thread_time() > self.end:
            seconds = self.limits.max_template_seconds
            raise over_budget("max_template_seconds", seconds, f"the chat template takes more than {seconds:g} s")

    def foresee(self, size: int) -> None:
        """Refuse something of so many bytes before it is made."""
        if self.bytes + size > self.limits.max_template_bytes:
            told = f"the chat template makes texts of {self.bytes + size} bytes"
            raise over_budget("max_template_bytes", self.bytes + size, told)

    def made(self, value: Any) -> Any:
        """Charge for something that was made."""
        size = self.measure(value)
        self.foresee(size)
        self.bytes += size
        return value

    def measure(self, value: Any) -> int:
        """The bytes of a value as text, about; counting stops where the budget ends."""
        total, left, most = 0, [value], self.limits.max_template_bytes
        self.look_at_the_clock()
        while left and total <= most:
            x = left.pop()
            if isinstance(x, (str, bytes)):
                total += len(x)
            elif isinstance(x, int):
                if x.bit_length() > MAX_BITS:
                    raise FileError(f"the chat template makes a number of {x.bit_length()} bits", code="F155")
                total += 1
            elif isinstance(x, Mapping):
                total += ENTRY * len(x)
                left += [*x.keys(), *x.values()]
            elif isinstance(x, (list, tuple, set, frozenset)):
                total += ENTRY * len(x)
                if total <= most:
                    left += x
            else:
                total += 1
        return total


_METER: ContextVar[_Meter] = ContextVar("meter")


class _Counted(NodeTransformer):
    """Loops, lists and joined texts become calls of the environment, which counts them."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        fixed = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _counted("each", node.iter, nodes.Const(fixed))
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _counted("whole", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _counted("whole", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _counted("whole", node) if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _counted("joined", *node.nodes)


def _counted(name: str, *given: Any) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(given), [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%", "-", "/", "//"))

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_shown, extensions=extensions)
        self.fixed: dict[str, int] = {}  # characters of each macro that are not computed
        del self.globals["lipsum"]
        self.filters["tojson"] = _json  # the one of Jinja writes <, > and & as escapes, for web pages
        self.filters = {name: self._filter(name, call) for name, call in self.filters.items()}

    @property
    def meter(self) -> _Meter:
        """Of this use of the template, beside which there may be others."""
        return _METER.get()

    def each(self, items: Any, fixed: int) -> Iterator[Any]:
        """The items of a loop, whose body has so many characters of its own."""
        for item in items:
            self.meter.step()
            self.meter.foresee(fixed)
            self.meter.bytes += fixed
            yield item

    def whole(self, value: Any) -> Any:
        """A list, tuple or dict that the template writes down."""
        self.meter.step()
        return self.meter.made(value)

    def joined(self, *parts: Any) -> str:
        self.meter.foresee(sum(map(self.meter.measure, parts)))
        text: str = self.meter.made("".join(map(str, parts)))
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.meter.step()
        if operator == "*":
            for x, count in ((left, right), (right, left)):
                if isinstance(x, (str, bytes, list, tuple)) and isinstance(count, int):
                    self.meter.foresee(self.meter.measure(x) * max(count, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_BITS:
                raise FileError(f"the chat template makes a number of {left.bit_length() * right} bits", code="F155")
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._format(str(left), right if isinstance(right, tuple) else (right,))
        elif operator == "+":
            self.meter.foresee(self.meter.measure(left) + self.meter.measure(right))
        return self.meter.made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.meter.step()
        if isinstance(obj, Macro):
            self.meter.foresee(self.fixed.get(obj.name, 0))
            self.meter.bytes += self.fixed.get(obj.name, 0)
        inner = getattr(obj, "__wrapped__", obj)
        owner, name = getattr(inner, "__self__", None), getattr(inner, "__name__", "")
        if isinstance(owner, (str, bytes)):
            args = self._method(str(owner), name, args, kwargs)
        found = super().call(context, obj, *args, **kwargs)
        return found if owner is self else self.meter.made(found)

    def _method(self, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Look at a method of a text before it runs."""
        numbers = [x for x in args if isinstance(x, int)]
        if name in PADS:
            self.meter.foresee(max(numbers, default=0))
        elif name == "expandtabs":
            self.meter.foresee(len(text) + text.count("\t") * max([*numbers, kwargs.get("tabsize", 8)], default=8))
        elif name in ("format", "format_map"):
            self._format(text, (*args, *kwargs.values()))
        elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
            self.meter.foresee(len(text) + text.count(args[0]) * len(args[1]))
        elif name == "join" and args:
            args = (list(args[0]), *args[1:])
            self.meter.foresee(self.meter.measure(args[0]) + len(text) * len(args[0]))
        elif name in SPLITS:
            separator = args[0] if args and isinstance(args[0], str) and args[0] else None
            count = text.count(separator) if separator else sum(map(str.isspace, text))
            self.meter.foresee(len(text) + PIECE * (count + 1))
        return args

    def _format(self, text: str, args: Iterable[Any]) -> None:
        """Look at a format before it is filled in: its numbers are widths, and so are arguments if it says so."""
        given = list(args)
        widths = [int(n) for n in re.findall(r"\d{1,18}", text)]
        if re.search(r"%[^%a-z]*\*|\{[^{}]*\{", text):
            widths += [abs(x) for x in given if isinstance(x, int)]
        self.meter.foresee(len(text) + sum(widths) + self.meter.measure(given))

    def _filter(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            meter = self.meter
            meter.step()
            if name in GLANCES:
                return meter.made(call(*args, **kwargs))
            given: list[Any] = [
                x for x in (*args, *kwargs.values()) if isinstance(x, (str, bytes, int, list, tuple, dict))
            ]
            meter.foresee(sum(map(meter.measure, given)))
            if name in WIDTHS:
                texts = 1 + max((x.count("\n") for x in given if isinstance(x, str)), default=0)
                meter.foresee(texts * max((x for x in given if isinstance(x, int)), default=0))
            elif name == "format" and given and isinstance(given[0], str):
                self._format(given[0], (*args[1:], *kwargs.values()))
            elif name == "replace" and len(given) > 2 and all(isinstance(x, str) for x in given[:3]):
                meter.foresee(len(given[0]) + given[0].count(given[1]) * len(given[2]))
            elif name == "join" and len(args) > 1:
                args = (args[0], list(args[1]), *args[2:])
                between = max((len(x) for x in given if isinstance(x, str)), default=0)
                meter.foresee(meter.measure(args[1]) + between * len(args[1]))
            elif name in ("list", "wordcount", "unique", "sort", "reverse"):
                meter.foresee(sum(PIECE * len(x) for x in given if isinstance(x, str)))
            return meter.made(call(*args, **kwargs))

        return counted


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


@pass_context
def _shown(context: Any, value: Any) -> Any:
    """What a template prints is charged, too."""
    return context.environment.meter.made(value)


def _compiled(source: str) -> Template:
    """A template, which any number of threads may use."""
    environment = _Environment()
    tree = environment.parse(source)
    for macro in tree.find_all(nodes.Macro):
        fixed = sum(len(data.data) for data in macro.find_all(nodes.TemplateData))
        environment.fixed[macro.name] = max(fixed, environment.fixed.get(macro.name, 0))
    code = environment.compile(_Counted().visit(tree))
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().astimezone().strftime(layout[:64])
    return environment.template_class.from_code(environment, code, dict(environment.globals))


def _refuse(message: str) -> None:
    raise OptionError(f"the chat template says: {message}", code="O262")


_TEMPLATES: Table[str, Template] = Table("chat templates")


def fill_template(source: str, values: Mapping[str, Any]) -> str:
    """The text that a template makes of values. It is compiled once."""
    meter = _Meter()
    before = _METER.set(meter)
    try:
        template = _TEMPLATES.get_or_make(source, partial(_compiled, source))
        pieces: list[str] = []
        for piece in template.generate(**values):
            meter.step()
            pieces.append(piece)
        return "".join(pieces)
    except StrataError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it computes
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise FileError(f"the chat template cannot be filled in: {reason[:200]}", code="F155") from None
    finally:
        _METER.reset(before)
