"""The import rule: a folder imports only from folders above it, and only what their `__init__` exports.

Imports inside functions count too: a cycle mended by a late import is still a cycle. Only `if TYPE_CHECKING:` is free.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import strata
from tests.source import statements

PACKAGE = Path(strata.__file__).parent

# From the bottom up; what shares a line is a sibling and does not see the others. "" is strata/__init__.py.
ORDER = (
    ("modules", "places"),
    ("errors",),
    ("kinds",),
    ("arguments",),
    ("config",),
    ("core",),
    ("cache", "distributed"),
    ("kernel",),
    ("mir",),
    ("ops",),
    ("hir", "transforms", "passes"),
    ("lir",),
    ("texts",),
    ("backends",),
    ("runtime",),
    ("tensor",),
    ("io",),
    ("nn",),
    ("models",),
    ("finetuning", "quantizing"),
    ("ort", "sentence_transformers", "torch"),
    ("serving", "viewer"),
    ("testing",),
    ("cli",),
    ("",),
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}

# Rooms: the folders and modules inside a folder, from the bottom up, by the same rule of order. What a room takes from
# another it takes from the module that has it, so that a program loads no more than it needs.
ROOMS = {
    "kernel": (
        *(("scalars",), ("ir", "algebra", "text", "nest", "schedule", "order")),
        ("interp", "nans", "verify", "runs", "rewrite", "loop_values"),
        ("one_hot_sum", "contraction"),
        *(("build", "access"), ("inline",), ("passes",), ("choose",), ("legal",), ("search",)),
    ),
    "ops": (
        *(("families",), ("base",), ("elementwise",), ("reduce",), ("indexing",), ("random",), ("linalg",), ("conv",)),
        *(("quant",), ("control",), ("nn",), ("signal",), ("render",)),
    ),
    "passes": (
        ("base",), ("match",), ("canonicalize",), ("expand",), ("quant",), ("layout",), ("fuse",), ("memory",),
        ("pipeline",),
    ),
    "runtime": (("report",), ("compile",), ("storage",), ("execute",), ("cache",)),
    "backends": (
        *(("resident",), ("base",), ("attention",), ("ordering",), ("recipe",), ("driver",), ("pool",), ("entry",)),
        *(("bodies",), ("checks",), ("loops",), ("offload",), ("reference",)),
        *(("llvm", "stablehlo", "triton", "wgsl"), ("planned",), ("texts", "registry")),
    ),
    "backends/llvm": (
        *(("ir",), ("math",), ("jit",), ("loops",), ("gemm",), ("conv", "attention", "quant", "fft", "linalg")),
        *(("natives",), ("executor",), ("codegen",), ("runtime",), ("backend",), ("control",)),
    ),
    "backends/triton": (("target",), ("schedules",), ("codegen",), ("launch",), ("tuning",), ("backend",)),
}  # fmt: skip
MODULES_A_FOLDER = 25


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import that can run."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for branch in tree.orelse:
            yield from imports(branch)
        return
    if isinstance(tree, ast.Import | ast.ImportFrom):
        yield tree
    if isinstance(tree, ast.expr):  # holds no statement
        return
    for child in ast.iter_child_nodes(tree):
        yield from imports(child)


def targets(node: ast.Import | ast.ImportFrom, module: str, *, is_package: bool) -> Iterator[tuple[str, str | None]]:
    """The strata modules that an import reaches, each with the name taken from it (None: the module itself)."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "strata":
                yield alias.name, None
        return
    source = node.module or ""
    if node.level:
        here = module.split(".") if is_package else module.split(".")[:-1]
        source = ".".join(here[: len(here) - node.level + 1] + ([source] if source else []))
    if source.split(".")[0] != "strata":
        return
    for alias in node.names:
        if source == "strata" and alias.name in LEVEL:
            yield f"strata.{alias.name}", None  # `from strata import errors` is `import strata.errors`
        else:
            yield source, alias.name


def exports(source: str) -> set[str]:
    """The names that an `__init__` binds or lists in `__all__`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.split(".")[0] for alias in aliases}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names |= {str(item.value) for item in ast.walk(value) if isinstance(item, ast.Constant)}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case _:
                pass
    return names


@cache
def exports_of(folder: str) -> set[str]:
    init = PACKAGE / folder / "__init__.py"
    names = exports(init.read_text(encoding="utf-8")) if init.exists() else set()
    if "__getattr__" in names:  # a folder that serves names from a registry lists them in `dir`
        names |= set(dir(importlib.import_module(f"strata.{folder}")))
    return names


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What breaks the rule in one module's source."""
    own = module.split(".")[1] if module != "strata" else ""
    if own not in LEVEL:
        return [f"{module}: strata/{own} has no place in the order"]
    found: list[str] = []
    for node in imports(ast.parse(source)):
        for target, name in targets(node, module, is_package=is_package):
            parts = target.split(".")
            folder = parts[1] if len(parts) > 1 else ""
            where = f"{module}:{node.lineno}"
            if folder == own:
                continue
            if folder not in LEVEL:
                found.append(f"{where}: strata.{folder} has no place in the order")
            elif LEVEL[folder] >= LEVEL[own]:
                found.append(f"{where}: {own or '__init__'} imports {target}, which is not above it")
            elif len(parts) > 2:
                found.append(f"{where}: reaches into {target}; take what strata.{folder} exports")
            elif name == "*":
                found.append(f"{where}: star import of {target}")
            elif name is not None and (PACKAGE / folder).is_dir() and name not in exports_of(folder):
                found.append(f"{where}: strata.{folder} does not export {name}")
    return found


def modules() -> list[tuple[Path, str, bool]]:
    found: list[tuple[Path, str, bool]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append((path, ".".join(("strata", *(parts[:-1] if is_package else parts))), is_package))
    return found


def test_every_import_keeps_the_order() -> None:
    found = [v for path, name, pkg in modules() for v in violations(path.read_text("utf-8"), name, is_package=pkg)]
    assert not found, "\n" + "\n".join(found)


def room_violations(source: str, module: str, folder: str, order: tuple[tuple[str, ...], ...]) -> list[str]:
    """What breaks the order of the rooms of a folder in one of its modules."""
    level = {name: i for i, names in enumerate(order) for name in names}
    prefix = f"strata.{folder.replace('/', '.')}."
    own = module.removeprefix(prefix).split(".")[0]
    if own not in level:
        return [f"{module}: strata/{folder}/{own} has no place in the order"]
    found: list[str] = []
    for node in imports(ast.parse(source)):
        for target, name in targets(node, module, is_package=False):
            reached = f"{target}.{name}." if f"{target}." == prefix else f"{target}."
            room = reached.removeprefix(prefix).split(".")[0]
            if not reached.startswith(prefix) or room == own:
                continue
            if room not in level:
                found.append(f"{module}:{node.lineno}: takes {room} from the folder itself; name its module")
            elif level[room] > level[own] or (level[room] == level[own] and is_folder(folder, room)):
                found.append(f"{module}:{node.lineno}: {own} imports {room}, which is not above it")
    return found


def is_folder(folder: str, room: str) -> bool:
    return (PACKAGE / folder / room).is_dir()


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_keep_their_order(folder: str) -> None:
    inside = f"strata.{folder.replace('/', '.')}."
    found = [
        v
        for path, name, _ in modules()
        if name.startswith(inside)
        for v in room_violations(path.read_text("utf-8"), name, folder, ROOMS[folder])
    ]
    assert not found, "\n" + "\n".join(found)


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for path, name, _ in modules():
        for node in statements(path.read_text("utf-8")):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert not (shared := {name: found for name, found in homes.items() if len(found) > 1}), shared


def test_rooms_are_small_and_say_what_they_hold() -> None:
    for folder in {path.parent for path, _, _ in modules()}:
        held = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(held) <= MODULES_A_FOLDER, f"{folder.relative_to(PACKAGE)} has {len(held)} modules"
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))), folder


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("strata.core.dims", "from strata.mir import Graph", "not above it"),
        ("strata.passes.fuse", "from strata.hir import Module", "not above it"),
        ("strata.passes.fuse", "def f():\n    from strata.transforms import vjp", "not above it"),
        ("strata.mir.ir", "from strata.core.dtypes import f32", "reaches into"),
        ("strata.mir.ir", "import strata.core.dtypes", "reaches into"),
        ("strata.mir.ir", "from ..core.dtypes import f32", "reaches into"),
        ("strata.mir.ir", "from strata.core import dims_of_nothing", "does not export"),
        ("strata.mir.ir", "from strata.core import *", "star import"),
        ("strata.mir.ir", "from strata import lir", "not above it"),
        ("strata.cli.main", "import strata", "not above it"),
        ("strata.helpers", "", "no place"),
        ("strata.mir.ir", "if TYPE_CHECKING:\n    pass\nelse:\n    from strata.lir import Plan", "not above it"),
    ],
)
def test_the_rule_sees(module: str, source: str, complaint: str) -> None:
    (found,) = violations(source, module)
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("strata.core.types", "from strata.core.dtypes import f32"),
        ("strata.core.types", "from .dtypes import f32"),
        (
            "strata.mir.ir",
            "from strata.core import f32\nfrom strata.errors import ShapeError\nfrom strata import config",
        ),
        ("strata.core.dims", "if TYPE_CHECKING:\n    from strata.mir import Graph"),
        ("strata", "from strata.core import f32"),
        ("strata.mir.ir", "import numpy as np\nfrom stratagem import x"),
    ],
)
def test_the_rule_allows(module: str, source: str) -> None:
    assert violations(source, module) == []
