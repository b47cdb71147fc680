"""Models in the disk cache: what a file declares, and its plans, so that a warm start does not read ONNX.

A stored plan has the compiled graph's plan, the sizes it is good for, and where its weights are: in the model's file,
or in the entry itself where reading the model made them. Entries are data: JSON, then bytes. One that does not make
sense counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from strata.cache import default_store, digest, version_of
from strata.config import logger
from strata.core import Dim, Symbol, parse_dim, symbols
from strata.io.onnx.comparisons import COMPARISONS
from strata.io.onnx.dtypes import NUMBER, in_graphs, numpy_dtype
from strata.io.onnx.file import ModelFile
from strata.io.onnx.frames import Guard
from strata.io.onnx.items import NOTHING, Labels, Maps, Nothing
from strata.io.onnx.plans import Declared, Finish, OnnxAbout, OnnxPlan, Port, Shapes
from strata.lir import SizeCheck, read_checks, size_checks, write_checks
from strata.mir import Graph
from strata.runtime import DAMAGED, CompiledGraph, Session, StoredArray, code_version, read_plan, write_plan

FORMAT = 4
MOST_BYTES = 16 << 20  # of arrays in an entry; a model that makes more while it is read is read again
Array = np.ndarray | StoredArray
NO_VALUE: Any = None  # of an output that is read: the plan has its number


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan, and what else was found out when it was made."""

    plan: OnnxPlan
    is_symbolic: bool
    why_not_symbolic: list[str]


def head_key(file: ModelFile) -> str | None:
    version = code_version()
    return None if version is None else digest("onnx head", str(FORMAT), file.digest, version, version_of("io"))


def read_head(key: str | None) -> Declared | None:
    return _read(key, _declared)


def _declared(payload: bytes) -> Declared:
    head = json.loads(payload)
    known = _known(head["symbols"])
    ports = [tuple(_port(row, known) for row in rows) for rows in head["ports"]]
    producer, domain, text, graph_text, version, properties = head["about"]
    inputs, optional, outputs = ports
    pairs = tuple((str(k), str(v)) for k, v in properties)
    said = OnnxAbout(
        str(producer), str(domain), str(text), str(graph_text), None if version is None else int(version), pairs
    )
    return Declared(head["name"], inputs, optional, outputs, said)


def write_head(file: ModelFile, declared: Declared) -> None:
    key = head_key(file)
    if key is None or key in default_store():
        return
    groups = (declared.inputs, declared.optional_inputs, declared.outputs)
    rows = [[_port_row(port) for port in group] for group in groups]
    about = astuple(declared.about)
    head = {"name": declared.name, "symbols": _symbols(_port_dims(groups)), "ports": rows, "about": about}
    default_store().put(key, json.dumps(head).encode(), {"kind": "onnx head", "name": declared.name})


def plan_key(file: ModelFile, session: Session, inputs: str) -> str | None:
    """Of the plan for inputs of some shapes; `inputs` says which, and the elements that may decide something."""
    key = session.plan_options()
    head = head_key(file)
    return None if head is None or key is None else digest("onnx plan", head, key, inputs)


def read_stored(key: str, file: ModelFile, session: Session, graph: Callable[[Shapes], Graph]) -> StoredPlan | None:
    """A plan from the store, ready to run. `graph` makes its graph, where somebody asks for it."""
    return _read(key, lambda payload: _Reader(payload, file).stored(session, graph))


def _read(key: str | None, read: Callable[[bytes], Any]) -> Any:
    payload = default_store().get(key) if key is not None else None
    if payload is None:
        return None
    try:
        return read(payload)
    except DAMAGED as error:
        logger.warning("a stored ONNX model cannot be read and is made again: %s", error)
        return None


def write_stored(
    key: str, stored: StoredPlan, params: Mapping[str, np.ndarray], file: ModelFile, places: Mapping[int, int]
) -> dict[str, Array] | None:
    """Keep a plan. Its parameters, read from the file where they are in it; None where it is too large to be kept.

    `places` says where bytes with some hash may be in the file.
    """
    plan = stored.plan
    writer = _Writer()
    try:
        rows = {name: writer.place_row(x, places, file) or writer.row(x) for name, x in params.items()}
        head = {
            "format": FORMAT,
            "is symbolic": stored.is_symbolic,
            "why": stored.why_not_symbolic,
            "shapes": {name: [str(d) for d in shape] for name, shape in plan.shapes.items()},
            "guards": [[g.test.__name__, str(g.a), str(g.b), g.truth] for g in plan.guards],
            "assumed": {name: writer.row(x) for name, x in plan.assumed.items()},
            "outputs": [writer.template(x) for x in plan.outputs],
            "params": rows,
        }
    except TypeError:  # text, or an element type that graphs do not have
        return None
    dims = [d for shape in plan.shapes.values() for d in shape] + [d for g in plan.guards for d in (g.a, g.b)]
    code = b""
    if plan.compiled is not None:
        checks = size_checks(plan.compiled.source)
        sizes = [c for c in checks if isinstance(c, SizeCheck)]
        head |= write_checks(checks)
        dims += [d for c in sizes for d in (c.left, c.right)]
        code = write_plan(plan.compiled.lir) or b""
    if writer.size + len(code) > MOST_BYTES or any(g.test.__name__ not in COMPARISONS for g in plan.guards):
        return None
    head |= {"symbols": _symbols(dims), "plan": len(code)}
    payload = json.dumps(head).encode() + b"\n" + code + b"".join(writer.parts)
    if not default_store().put(key, payload, {"kind": "onnx plan"}):
        return None
    return {name: _from_file(row, file) if row[0] == "file" else params[name] for name, row in rows.items()}


def _from_file(row: list[Any], file: ModelFile) -> StoredArray:
    _, dtype, shape, at = row
    kind, size = numpy_dtype(dtype), tuple(shape)
    if at < 0 or at + kind.itemsize * int(np.prod(size, dtype=np.int64)) > file.size:
        raise ValueError("a weight lies outside the file")
    return file.array(at, kind, size)


class _Writer:
    """Arrays as rows of JSON: equal elements as one, the rest as bytes after it."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def row(self, array: np.ndarray) -> list[Any]:
        if not in_graphs(array.dtype):
            raise TypeError("an element type of the host")
        kind, shape = NUMBER[array.dtype], list(array.shape)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        width = array.dtype.itemsize
        if array.size > 1 and (flat.reshape(-1, width) == flat[:width]).all():
            return ["full", kind, shape, flat[:width].tobytes().hex()]
        self.parts.append(flat.tobytes())
        self.size += flat.size
        return ["here", kind, shape, self.size - flat.size]

    def place_row(self, array: np.ndarray, places: Mapping[int, int], file: ModelFile) -> list[Any] | None:
        """A row that points into the file, where the bytes are really there."""
        data = np.ascontiguousarray(array).tobytes()
        at = places.get(hash(data))
        if at is None:
            return None
        row = ["file", NUMBER[array.dtype], list(array.shape), at]
        return row if np.asarray(_from_file(row, file)).tobytes() == data else None

    def template(self, item: Any) -> Any:
        if isinstance(item, list):
            return {"list": [self.template(x) for x in item]}
        if isinstance(item, np.ndarray):
            return {"array": self.row(item)}
        if isinstance(item, Finish):
            made = item.item
            rest = {"labels": made.table.tolist()} if isinstance(made, Labels) else {"keys": list(made.keys)}
            return {"at": item.at, **rest}
        return None if isinstance(item, Nothing) else item


class _Reader:
    def __init__(self, payload: bytes, file: ModelFile) -> None:
        line, _, self._rest = payload.partition(b"\n")
        self.head: dict[str, Any] = json.loads(line)
        if self.head["format"] != FORMAT:
            raise ValueError("another format")
        self._file = file
        self._known = _known(self.head["symbols"])
        self._equal: dict[tuple[Any, Any], np.ndarray] = {}

    def stored(self, session: Session, graph: Callable[[Shapes], Graph]) -> StoredPlan:
        head = self.head
        shapes = {name: tuple(self._dim(d) for d in shape) for name, shape in head["shapes"].items()}
        guards = tuple(Guard(COMPARISONS[t], self._dim(a), self._dim(b), bool(ok)) for t, a, b, ok in head["guards"])
        assumed = {name: np.asarray(self._array(row)) for name, row in head["assumed"].items()}
        outputs = [self._template(x) for x in head["outputs"]]
        plan = OnnxPlan(self._compiled(session, lambda: graph(shapes)), outputs, shapes, guards, assumed)
        return StoredPlan(plan, head["is symbolic"] is True, [str(x) for x in head["why"]])

    def _compiled(self, session: Session, graph: Callable[[], Graph]) -> CompiledGraph | None:
        size = self.head["plan"]
        if not size:
            return None
        lir = read_plan(self._rest[:size], None, graph)
        compiled = session.compile_stored(lir, read_checks(self.head, self._known), graph)
        for name, row in self.head["params"].items():
            compiled.set_param(name, self._param(row))
        return compiled

    def _param(self, row: Sequence[Any]) -> Array:
        """An array that nobody writes to: those of equal elements are parts of one, as long as the longest so far."""
        if row[0] != "full":
            return self._array(row)
        _, number, dims, data = row
        count = int(np.prod(dims, dtype=np.int64))
        known = self._equal.get((number, data))
        if known is None or known.size < count:
            known = self._equal[number, data] = np.asarray(self._array(["full", number, [count], data]))
            known.flags.writeable = False
        return known[:count].reshape(dims)

    def _dim(self, text: str) -> Dim:
        return parse_dim(text, self._known)

    def _array(self, row: Sequence[Any]) -> Array:
        if row[0] == "file":
            return _from_file(list(row), self._file)
        where, number, dims, data = row
        kind, shape = numpy_dtype(number), tuple(dims)
        if where == "full":
            return np.full(shape, np.frombuffer(bytes.fromhex(data), kind)[0], kind)
        size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        part = np.frombuffer(self._rest, np.uint8, size, self.head["plan"] + data)
        return part.copy().view(kind).reshape(shape)

    def _template(self, item: Any) -> Any:
        if isinstance(item, dict) and "at" in item:
            made: Labels | Maps = Maps(NO_VALUE, tuple(item.get("keys", ())))
            if "labels" in item:
                made = Labels(NO_VALUE, np.array([str(x) for x in item["labels"]], object))
            return Finish(int(item["at"]), made)
        if isinstance(item, dict):
            return (
                [self._template(x) for x in item["list"]] if "list" in item else np.asarray(self._array(item["array"]))
            )
        return NOTHING if item is None else int(item)


# ------------------------------------------------------------------------------------------------------ sizes and ports


def _symbols(dims: Iterable[Dim]) -> dict[str, list[int | None]]:
    found: dict[str, Symbol] = {}
    for d in dims:
        found |= symbols(d)
    return {s.name: [s.lo, s.hi] for s in found.values()}


def _known(rows: Mapping[str, Sequence[Any]]) -> dict[str, Symbol]:
    return {name: Symbol(name, lo, hi) for name, (lo, hi) in rows.items()}


def _port_dims(groups: Iterable[Iterable[Port]]) -> Iterator[Dim]:
    return (d for group in groups for port in group for d in port.shape or ())


def _port_row(port: Port) -> list[Any]:
    shape = None if port.shape is None else [str(d) for d in port.shape]
    return [port.name, port.kind, None if port.dtype is None else NUMBER[port.dtype], shape, port.type_name, port.dims]


def _port(row: Sequence[Any], known: Mapping[str, Symbol]) -> Port:
    name, kind, number, shape, type_name, said = row
    dims = None if shape is None else tuple(parse_dim(d, known) for d in shape)
    return Port(str(name), str(kind), None if number is None else numpy_dtype(number), dims, type_name, tuple(said))
