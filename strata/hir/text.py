"""Modules as text, and back: `parse(show(m)) == m`.

    hir @ffn(x: f32[4, 8], param w: f32[8, 16], param b: f32[16]) -> f32[4, 16] fusion direct {
      h0 = linear(x, w, b) {act = "gelu"} : f32[4, 16] as "up"
      h1 = mir.exp(h0) : f32[4, 16]
      return h1
    }

A label is printed when it is not the block's own. `h3.1` is the second result of h3.
"""

from __future__ import annotations

import re
from typing import Any

from strata.core import Symbol
from strata.errors import BudgetError, StrataError
from strata.hir.build import HirModule
from strata.hir.ir import BLOCKS, Block, HirNode, HirValue, ParamLeaf, Verbatim
from strata.mir import (
    FIELD_ERRORS,
    REGISTRY,
    Op,
    Parser,
    Registry,
    near,
    require_fields,
    show_field,
    show_name,
    show_where,
)

_ID = re.compile(r"h\d+(\.\d+)?\Z")


def show(module: HirModule) -> str:
    """The text of a module."""
    leaves = [node for node in module.nodes if node.is_leaf]
    header = ", ".join(
        f"{'param ' if isinstance(n.block, ParamLeaf) else ''}{_leaf(n.id)}: {n.types[0]}" for n in leaves
    )
    results = ", ".join(str(x.type) for x in module.results)
    symbols: dict[str, Symbol] = {}
    for n in leaves:
        symbols |= n.types[0].symbols()
    head = f"hir @{show_name(module.name)}({header}) -> {results} fusion {module.fusion}{show_where(symbols)} {{"
    lines = [f"  {_line(node)}" for node in module.nodes if not node.is_leaf]
    return "\n".join([head, *lines, f"  return {', '.join(map(_operand, module.results))}", "}"])


def _leaf(name: str) -> str:
    return show_field(name) if _ID.match(name) else show_name(name)


def _operand(x: HirValue) -> str:
    return _leaf(x.text) if x.node.is_leaf else x.text


def _line(node: HirNode) -> str:
    made = node.block
    fields = made.op.static_fields() if isinstance(made, Verbatim) else made.static_fields()
    name = f"mir.{made.op.name}" if isinstance(made, Verbatim) else made.name
    shown = ", ".join(f"{k} = {show_field(v, '  ')}" for k, v in fields.items())
    text = f"{node.id} = {name}({', '.join(map(_operand, node.inputs))})"
    text += f" {{{shown}}}" if fields else ""
    text += f" : {', '.join(map(str, node.types))}"
    return text if node.label == made.label else f"{text} as {show_field(node.label)}"


def parse(text: str, registry: Registry = REGISTRY) -> HirModule:
    """Read one module; the error names the line."""
    parser = ModuleParser(text, registry)
    return parser.whole(parser.module)


class ModuleParser(Parser):
    """A cursor over tokens that builds modules."""

    def module(self) -> HirModule:
        symbols = self._symbols_ahead()
        self.take("hir")
        self.take("@")
        made = HirModule(self.identifier())
        leaves: dict[str, HirValue] = self.leaves(made, symbols)
        nodes: dict[str, HirValue] = {}
        self.take("->")
        claims = self.types(symbols)
        self.take("fusion")
        made.fusion = self.identifier()
        self.skip_where()
        self.take("{")
        while not self.accept("return"):
            self.block_statement(made, leaves, nodes, symbols)
        results = self.several(lambda: self.block_operand(leaves, nodes))
        self.take("}")
        if claims != [x.type for x in results]:
            self.fail(f"text says the results are {claims}, the module gives {[x.type for x in results]}")
        made.outputs(*results)
        return made

    def block_operand(self, leaves: dict[str, HirValue], nodes: dict[str, HirValue]) -> HirValue:
        table = nodes if self.kind == "name" and _ID.match(self.token) else leaves
        name = self.identifier()
        if name not in table:
            self.fail(f"{name} is not defined before it is used")
        return table[name]

    def block_statement(
        self, made: HirModule, leaves: dict[str, HirValue], nodes: dict[str, HirValue], symbols: dict[str, Symbol]
    ) -> None:
        start = self.start
        target = self.identifier()
        self.take("=")
        name = self.identifier()
        self.take("(")
        inputs = self.until(")", lambda: self.block_operand(leaves, nodes))
        fields = self.fields(symbols)
        self.take(":")
        claims = self.types(symbols)
        label = self.identifier() if self.accept("as") else None
        results = self._apply(made, self._block(name, fields, start), inputs, label, start)
        node = results[0].node
        if node.id != target:
            self.fail(f"expected {node.id}, found {target!r}: nodes are numbered in order", start)
        if tuple(claims) != node.types:
            self.fail(f"{target}: text says {claims}, {name} gives {list(node.types)}", start)
        nodes.update({x.text: x for x in results})

    def _block(self, name: str, fields: dict[str, Any], start: int) -> Block:
        is_op = name.startswith("mir.")
        if not is_op and name not in BLOCKS:
            self.fail(f"no block is named {name!r}{near(name, BLOCKS)}", start)
        try:
            kind = self.registry[name[4:]] if is_op else BLOCKS[name]
            require_fields(kind, fields)
            made = kind(**fields)
            return Verbatim(made) if isinstance(made, Op) else made
        except BudgetError:
            raise
        except StrataError as error:
            self.fail(error.summary, start)
        except FIELD_ERRORS as error:
            self.fail(f"{name}: {error}", start)

    def _apply(
        self, made: HirModule, what: Block, inputs: list[HirValue], label: str | None, start: int
    ) -> tuple[HirValue, ...]:
        try:
            result = made.apply(what, *inputs, label=label)
        except BudgetError:
            raise
        except StrataError as error:
            self.fail(error.summary, start)
        except FIELD_ERRORS as error:
            self.fail(f"{what.name}: {error}", start)
        return result if isinstance(result, tuple) else (result,)
