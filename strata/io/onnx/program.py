"""A parsed ONNX file: graph, opset versions, functions and tensors, checked before anything is built from it."""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
from onnx import defs, helper

from strata.core import Dim, SymExpr, require, show_bytes, sym
from strata.errors import FileError, UnknownNameError, file_error
from strata.io.onnx.checks import (
    form,
    require_defined,
    require_few_nodes,
    require_nodes_defined,
    require_single_names,
    require_single_names_in_function,
    require_unique,
    schema,
    subgraphs,
    walk,
)
from strata.io.onnx.dtypes import STRING, numpy_dtype, type_name
from strata.io.onnx.file import ModelFile
from strata.io.onnx.plans import Declared, OnnxAbout, Port
from strata.io.onnx.registry import ONNX_DOMAINS, Handler, lookup

NEWEST_OPSET = 28
MAX_ELEMENTS = 1 << 33


class OnnxProgram:
    """A model's protobuf with what reading it needs. `custom` maps op names ("domain::Op" or "Op") to readers."""

    def __init__(self, proto: Any, folder: Path | None = None, custom: Mapping[str, Handler] | None = None) -> None:
        if not proto.HasField("graph"):
            raise FileError("the model has no graph", code="F500")
        self.proto = proto
        self.folder = folder
        self.file = ""  # its name, where it has one
        self.custom = dict(custom or {})
        self.opsets = {_domain(o.domain): int(o.version) for o in proto.opset_import}
        if "" not in self.opsets and not proto.functions:
            self.opsets.setdefault("", 1 if proto.ir_version < 3 else defs.onnx_opset_version())
        self.opsets.setdefault("", defs.onnx_opset_version())
        if self.opsets[""] > max(NEWEST_OPSET, defs.onnx_opset_version()):
            raise FileError(f"the model uses opset {self.opsets['']}; {NEWEST_OPSET} is the newest known", code="F500")
        self.functions = {function_key(f): f for f in proto.functions}
        self.elements = sum(_elements(t.dims) for t in proto.graph.initializer)
        self.size = sum(_tensor_bytes(t) for t in proto.graph.initializer)
        self._files: dict[str, mmap.mmap] = {}
        self._symbols: dict[str, SymExpr] = {}
        self._is_ours = True  # no reader of the user's is needed
        self._require_known_ops()
        require_few_nodes(self.graph.node, self.functions.values(), self.function, function_key)
        self._require_forms()
        require_single_names(self.graph)
        require_unique((x.name for x in self.graph.output), "two outputs of the model")
        require_unique(map(function_key, proto.functions), "two functions of the model")
        for function in self.functions.values():
            require_single_names_in_function(function)
            require_nodes_defined(function.node, set(function.input))
        require_defined(self.graph)

    @property
    def graph(self) -> Any:
        return self.proto.graph

    # inputs and outputs

    def declared(self) -> Declared:
        """What the model says of its inputs and outputs."""
        graph = self.graph
        fixed = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        return Declared(
            graph.name,
            tuple(self._port(x) for x in graph.input if x.name not in fixed),
            tuple(self._port(x) for x in graph.input if x.name in fixed),
            tuple(self._port(x) for x in graph.output),
            self._about(),
        )

    def _about(self) -> OnnxAbout:
        """What the file says of itself. Text that is none counts as absent."""
        proto = self.proto
        props = [(p.key, p.value) for p in proto.metadata_props]
        return OnnxAbout(
            _text(proto.producer_name),
            _text(proto.domain),
            _text(proto.doc_string),
            _text(proto.graph.doc_string),
            int(proto.model_version) if proto.HasField("model_version") else None,
            tuple((k, v) for k, v in props if isinstance(k, str) and isinstance(v, str)),
        )

    def _port(self, proto: Any) -> Port:
        kind, tensor = proto.type.WhichOneof("value"), proto.type.tensor_type
        if kind != "tensor_type":
            kinds = {"sequence_type": "sequence", "map_type": "map"}
            inner = _innermost(proto.type)
            said = _said_dims(inner) if kind == "optional_type" else ()
            dtype = numpy_dtype(inner.elem_type) if inner.elem_type else None
            return Port(proto.name, kinds.get(kind, "optional"), dtype, None, type_name(proto.type), said)
        dtype = numpy_dtype(tensor.elem_type) if tensor.elem_type else None
        if not tensor.HasField("shape"):
            return Port(proto.name, "tensor", dtype, None, type_name(proto.type))
        dims = tuple(self._dim(d, f"{proto.name}_{i}") for i, d in enumerate(tensor.shape.dim))
        return Port(proto.name, "tensor", dtype, dims, type_name(proto.type), _said_dims(tensor))

    def _dim(self, proto: Any, fallback: str) -> Dim:
        if proto.HasField("dim_value") and proto.dim_value >= 0:
            return int(proto.dim_value)
        if not isinstance(proto.dim_param, str):
            raise FileError(f"input {fallback!r}: the name of a size is not text", code="F500")
        name = re.sub(r"\W", "_", proto.dim_param)
        if not name.strip("_"):  # nameless, or "?"
            name = re.sub(r"\W", "_", fallback)
        if not re.match(r"[A-Za-z_]", name) or name in ("min", "max"):
            name = f"n_{name}"
        return self._symbols.setdefault(name, sym(name))

    # ops

    def reader(self, node: Any, opsets: Mapping[str, int]) -> Handler | None:
        """The function that reads a node: the user's, ours, or None for a function of the model or of the standard."""
        domain = _domain(node.domain)
        own = self.custom.get(f"{domain}::{node.op_type}") or self.custom.get(node.op_type)
        if own is not None:
            return own
        if self.function(node) is not None:
            return None
        return lookup(domain, node.op_type, opsets.get(domain, self.opsets.get(domain, 1)))

    def function(self, node: Any) -> Any | None:
        """The model's own function that a node calls."""
        key = (_domain(node.domain), node.op_type)
        return self.functions.get((*key, getattr(node, "overload", ""))) or self.functions.get((*key, ""))

    def standard_function(self, node: Any, opsets: Mapping[str, int]) -> Any | None:
        """The body that the standard gives for an op, where it is a function and does not depend on types."""
        domain = _domain(node.domain)
        found = schema(node.op_type, opsets.get(domain, self.opsets.get(domain, 1)), domain)
        if found is None or not (found.has_function or found.has_context_dependent_function):
            return None
        return found

    def _require_text(self, nodes: Any) -> None:
        """Names must be text: protobuf hands over as bytes what is not."""
        ports = [*self.graph.input, *self.graph.output, *self.graph.initializer]
        names = [self.graph.name, *(x.name for x in ports), *(f.name for f in self.proto.functions), *self.opsets]
        for node in nodes:
            names += [node.op_type, node.domain, node.name, *node.input, *node.output]
            for graph in subgraphs(node):
                names += [x.name for x in (*graph.input, *graph.output, *graph.initializer)]
        if not all(isinstance(name, str) for name in names):
            raise FileError("a name in the model is not text", code="F500")

    def _require_known_ops(self) -> None:
        unknown: dict[str, list[str]] = {}
        for nodes, opsets in self._bodies():
            found = list(walk(nodes))
            self._require_text(found)
            for node in found:
                reader = self.reader(node, opsets)
                self._is_ours &= reader is None or reader.__module__.startswith("strata.")
                known = reader or self.function(node) or self.standard_function(node, opsets)
                if known is None:
                    domain = _domain(node.domain)
                    name = f"{domain}.{node.op_type}" if domain else node.op_type
                    unknown.setdefault(name, []).append(node.name or (node.output[0] if node.output else "?"))
        if unknown:
            listed = "; ".join(
                f"{op} ({', '.join(at[:8])}{', …' if len(at) > 8 else ''})" for op, at in sorted(unknown.items())
            )
            raise UnknownNameError(
                f"the model uses ops that strata does not know: {listed}",
                code="N500", fix="custom_ops={'Name': function} where function(node) gives values",
            )  # fmt: skip

    def _require_forms(self) -> None:
        """Nodes have what the standard says of their ops; those that the model or the user defines are theirs."""
        for nodes, opsets in self._bodies():
            for node in walk(nodes):
                domain = _domain(node.domain)
                is_custom = f"{domain}::{node.op_type}" in self.custom or node.op_type in self.custom
                if is_custom or self.function(node) is not None:
                    continue
                wanted = form(node.op_type, opsets.get(domain, self.opsets.get(domain, 1)), domain)
                if wanted is not None:
                    wanted.require(node)

    def _bodies(self) -> list[tuple[Any, Mapping[str, int]]]:
        """The nodes of the model and of its functions, with their opsets."""
        own = [(f.node, {**self.opsets, **opset_table(f)}) for f in self.functions.values()]
        return [(self.graph.node, self.opsets), *own]

    # tensors

    @property
    def decides_all(self) -> bool:
        """Whether the model's bytes alone decide what is read from it: no other file, and no reader of the user's."""
        external = any(t.data_location == onnx.TensorProto.EXTERNAL for t in self.graph.initializer)
        return self._is_ours and not external

    @property
    def has_read_others(self) -> bool:
        """Whether tensors were read from other files: the model's own bytes then do not say all."""
        return bool(self._files)

    def places(self, file: ModelFile) -> dict[int, int]:
        """Where in the model's file the elements of its tensors are, as far as they are found, by their hash."""
        found: dict[int, int] = {}
        end = 0  # tensors lie one after the other: those of nodes, then initializers
        for proto in (*_node_tensors(self.graph.node), *self.graph.initializer):
            if proto.HasField("raw_data") and (raw := proto.raw_data):
                at = file.find(raw, end)
                if at >= 0:
                    found[hash(raw)], end = at, at + len(raw)
        return found

    def tensor(self, proto: Any) -> np.ndarray:
        """A TensorProto as an array."""
        dtype = numpy_dtype(proto.data_type)
        shape = tuple(int(d) for d in proto.dims)
        count = 1
        for d in shape:
            count *= d
            if d < 0 or count > MAX_ELEMENTS:
                raise FileError(f"tensor {proto.name!r} has shape {list(shape)}", code="F501")
        if proto.data_location == onnx.TensorProto.EXTERNAL:
            return self._external(proto, dtype, shape, count)
        if proto.data_type == STRING:
            if len(proto.string_data) != count:
                raise FileError(
                    f"tensor {proto.name!r} has {len(proto.string_data)} strings for shape {list(shape)}", code="F501"
                )
            array = np.empty(count, object)
            array[:] = [s.decode("utf-8", "replace") for s in proto.string_data]
            return array.reshape(shape)
        if proto.HasField("raw_data"):
            return _from_bytes(proto.raw_data, dtype, shape, count, proto.name)
        given = max(len(proto.float_data), len(proto.int32_data), len(proto.int64_data), len(proto.double_data),
                    len(proto.uint64_data))  # fmt: skip
        needed = count if dtype.itemsize * 8 >= 8 and not _is_packed(dtype) else 0
        if given < needed:
            raise FileError(f"tensor {proto.name!r} has {given} numbers for shape {list(shape)}", code="F501")
        try:
            return np.asarray(onnx.numpy_helper.to_array(proto))
        except (ValueError, TypeError, KeyError) as error:
            raise FileError(f"tensor {proto.name!r} cannot be read: {error}", code="F501") from None

    def sparse(self, proto: Any) -> np.ndarray:
        """A SparseTensorProto as a dense array."""
        values, places = self.tensor(proto.values), self.tensor(proto.indices).astype(np.int64)
        shape = tuple(int(d) for d in proto.dims)
        if not shape or min(shape) < 0:
            raise FileError(f"sparse tensor {proto.values.name!r} has shape {list(shape)}", code="F501")
        size = math.prod(shape) * values.dtype.itemsize
        require(
            "max_folded_bytes",
            size,
            f"sparse tensor {proto.values.name!r} of shape {list(shape)} takes {show_bytes(size)}",
        )
        dense = np.zeros(shape, values.dtype)
        try:
            if places.ndim == 1:
                dense.reshape(-1)[places] = values
            else:
                dense[tuple(places.T)] = values
        except (IndexError, ValueError) as error:
            raise FileError(f"sparse tensor {proto.values.name!r}: {error}", code="F501") from None
        return dense

    def _external(self, proto: Any, dtype: np.dtype[Any], shape: tuple[int, ...], count: int) -> np.ndarray:
        entries = {e.key: e.value for e in proto.external_data}
        location = entries.get("location", "")
        offset = _whole(entries.get("offset", "0"), "offset", proto.name)
        length = _whole(entries["length"], "length", proto.name) if entries.get("length") else None
        data = self._open(location, proto.name)
        size = _byte_count(dtype, count)
        if length and length != size:  # 0 is what writers say who do not know
            raise FileError(f"tensor {proto.name!r}: its entry in {location!r} has {length} bytes, its shape "
                            f"{list(shape)} of {dtype} needs {size}", code="F502")  # fmt: skip
        if offset + size > len(data):
            raise FileError(f"tensor {proto.name!r} wants bytes {offset}..{offset + size} of {location!r}, "
                            f"which has {len(data)}", code="F502")  # fmt: skip
        return _from_bytes(memoryview(data)[offset : offset + size], dtype, shape, count, proto.name)

    def _open(self, location: str, tensor: str) -> mmap.mmap:
        """Map a file beside the model. Nothing outside the model's folder can be reached, by any kind of link."""
        if not isinstance(location, str):
            raise FileError(f"tensor {tensor!r}: the name of its file is not text", code="F503")
        if location in self._files:
            return self._files[location]
        parts = Path(location).parts
        if self.folder is None:
            raise FileError(f"tensor {tensor!r} is stored in {location!r}, but the model has no folder", code="F502")
        if not parts or os.path.isabs(location) or ".." in parts or "\\" in location or "\0" in location:
            raise FileError(f"tensor {tensor!r}: {location!r} is not a path below the model's folder", code="F503")
        path = self.folder
        for part in parts:
            path /= part
            if path.is_symlink():
                raise FileError(f"tensor {tensor!r}: {location!r} is a link, which may lead anywhere", code="F503")
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise file_error(location, error, code="F502", who=f"tensor {tensor!r}") from None
        try:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
                raise FileError(f"tensor {tensor!r}: {location!r} is not a plain file with one name", code="F503")
            data = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise FileError(f"tensor {tensor!r}: {location!r} is empty", code="F502") from None
        finally:
            os.close(handle)
        self._files[location] = data
        return data


def _text(found: Any) -> str:
    return found if isinstance(found, str) else ""


def _whole(text: Any, what: str, tensor: str) -> int:
    """A place in a file: digits, and no more of them than any file has bytes."""
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,19}", text):
        raise FileError(f"tensor {tensor!r}: {what} {text!r} is not a whole number of bytes", code="F502")
    return int(text)


def read_program(source: Any, custom: Mapping[str, Handler] | None = None) -> OnnxProgram:
    """A program from a file or a ModelProto."""
    if not isinstance(source, ModelFile):
        return OnnxProgram(source, None, custom)
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(source.read())
    except (DecodeError, EncodeError, ValueError, RecursionError) as error:
        raise FileError(f"not an ONNX model: {error}", code="F500") from None
    program = OnnxProgram(proto, source.folder, custom)
    program.file = source.name
    return program


def _elements(dims: Any) -> int:
    count = 1
    for d in dims:
        count = min(count * max(int(d), 0), MAX_ELEMENTS)
    return count


def _tensor_bytes(proto: Any) -> int:
    """What a tensor's elements take; those of a type that does not exist take nothing."""
    try:
        return _byte_count(numpy_dtype(proto.data_type), _elements(proto.dims))
    except FileError:
        return 0


def _domain(name: str) -> str:
    return "" if name in ONNX_DOMAINS else name


def function_key(function: Any) -> tuple[str, str, str]:
    """What sets a function of a model apart."""
    return _domain(function.domain), function.name, getattr(function, "overload", "")


def _innermost(proto: Any) -> Any:
    """The tensor type inside sequences, optionals and maps."""
    while (kind := proto.WhichOneof("value")) in ("sequence_type", "optional_type", "map_type"):
        held = getattr(proto, kind)
        proto = held.value_type if kind == "map_type" else held.elem_type
    return proto.tensor_type


def _said_dims(tensor: Any) -> tuple[int | str | None, ...]:
    """Sizes as the file names them; a negative number is not a size."""
    return tuple(
        (d.dim_value if d.dim_value >= 0 else None) if d.HasField("dim_value") else d.dim_param or None
        for d in tensor.shape.dim
    )


def opset_table(function: Any) -> dict[str, int]:
    return {_domain(o.domain): int(o.version) for o in function.opset_import}


def _node_tensors(nodes: Any) -> Iterator[Any]:
    return (a.t for node in walk(nodes) for a in node.attribute if a.HasField("t"))


def inputs_of(node: Any) -> list[str]:
    """The names that a node reads, those that its subgraphs take from around them among them."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        if attribute.HasField("g"):
            names += sorted(outer_names(attribute.g))
    return names


def outer_names(graph: Any, depth: int = 0) -> set[str]:
    """Names that a subgraph takes from around it."""
    require("max_depth", depth, f"subgraphs are nested {depth} deep")
    own = {x.name for x in graph.input} | {t.name for t in graph.initializer}
    own |= {t.values.name for t in graph.sparse_initializer}
    needed: set[str] = set()
    for node in graph.node:
        needed |= {name for name in node.input if name} - own
        for attribute in node.attribute:
            if attribute.HasField("g"):
                needed |= outer_names(attribute.g, depth + 1) - own
        own |= set(node.output)
    return needed | ({x.name for x in graph.output} - own)


def expand_standard(schema: Any, node: Any, input_types: list[Any], version: int) -> Any:
    """The body of a standard function for one node, as a FunctionProto."""
    function = onnx.FunctionProto()
    if schema.has_function:
        known = [v for v in schema.function_opset_versions if v <= version]
        body = schema.get_function_with_opset_version(known[-1]) if known else schema.function_body.SerializeToString()
        function.ParseFromString(body)
        return function
    known = [v for v in schema.context_dependent_function_opset_versions if v <= version]
    wanted = known[-1] if known else schema.context_dependent_function_opset_versions[-1]
    types = [t.SerializeToString() if t is not None else onnx.TypeProto().SerializeToString() for t in input_types]
    body = schema.get_context_dependent_function_with_opset_version(wanted, node.SerializeToString(), types)
    function.ParseFromString(body)
    return function


def tensor_type(number: int, shape: Any) -> Any:
    dims = [d if isinstance(d, int) else str(d) for d in shape]
    return helper.make_tensor_type_proto(number, dims)


_PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


def _is_packed(dtype: np.dtype[Any]) -> bool:
    return dtype.name in _PACKED_BITS


def _byte_count(dtype: np.dtype[Any], count: int) -> int:
    if _is_packed(dtype):
        return -(-count * _PACKED_BITS[dtype.name] // 8)
    return count * dtype.itemsize


def _from_bytes(data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], count: int, name: str) -> np.ndarray:
    if dtype.hasobject:
        raise FileError(f"tensor {name!r} has strings, which cannot be stored as raw bytes", code="F501")
    if len(data) != _byte_count(dtype, count):
        needed = _byte_count(dtype, count)
        raise FileError(f"tensor {name!r} has {len(data)} bytes, its shape {list(shape)} needs {needed}", code="F501")
    if not _is_packed(dtype):
        array = np.frombuffer(data, dtype.newbyteorder("<") if dtype.kind in "iufc" and dtype.num < 24 else dtype)
        return array.astype(dtype, copy=False).reshape(shape)
    bits = _PACKED_BITS[dtype.name]
    per_byte, mask = 8 // bits, (1 << bits) - 1
    packed = np.frombuffer(data, np.uint8)
    codes = np.stack([(packed >> (bits * i)) & mask for i in range(per_byte)], -1).reshape(-1)[:count]
    if dtype.name in ("int4", "int2"):
        half = 1 << (bits - 1)
        return ((codes.astype(np.int8) ^ half) - half).astype(dtype).reshape(shape)
    if dtype.name == "float4_e2m1fn":
        return codes.view(dtype).reshape(shape)
    return codes.astype(dtype).reshape(shape)
