"""Named weights from any file, and a graph builder that declares them as parameters and checks their shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from strata import ops as functions
from strata.core import DType, as_dtype, dim_prod, f32, i64, read_text, u8
from strata.errors import FileError, file_error
from strata.io import GgufTensor, load_safetensors, packed_weights, release_pages, undecodable
from strata.mir import Graph, Value

ops: Any = functions  # functions are found by name, also where a module has the same one
Weights = Mapping[str, "np.ndarray | GgufTensor"]
MAX_ELEMENTS = 1 << 40  # of a weight that is missing and stood in for until all are known
SHOWN = 8  # tensors of wrong shapes that an error lists


def folder_weights(folder: Path) -> dict[str, np.ndarray | GgufTensor]:
    """The tensors of a folder; weights of a quantiser that its config.json names are blocks, and stay quantised."""
    tensors = _folder_tensors(folder)
    settings = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    quantiser = settings.get("quantization_config")
    if quantiser is None and isinstance(settings.get("text_config"), dict):
        quantiser = settings["text_config"].get("quantization_config")
    return tensors if quantiser is None else packed_weights(tensors, quantiser)


def _folder_tensors(folder: Path) -> dict[str, np.ndarray | GgufTensor]:
    """One safetensors file, or the shards that its index names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            raise FileError(f"{folder} holds {len(found)} safetensors files and no index of them", code="F141")
        return dict(load_safetensors(found[0]))
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise FileError(f"{index.name} has no weight_map", code="F141")
    if any(Path(name).name != name for name in places.values()):
        raise FileError(f"{index.name} names files outside its folder", code="F141")
    files = {name: load_safetensors(folder / name) for name in sorted(set(places.values()))}
    lost = next((n for n, file in places.items() if n not in files[file]), None)
    if lost is not None:
        raise FileError(f"{index.name} says {lost!r} is in {places[lost]}, which does not hold it", code="F141")
    return {name: files[file][name] for name, file in places.items()}


def model_text(path: Path) -> str:
    """The text of a file of a model."""
    try:
        return read_text(path)
    except OSError as error:
        raise file_error(path, error, code="F140", what="cannot be read") from None
    except ValueError as error:
        raise FileError(f"{path} cannot be read as text: {error}", code="F140") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        found = json.loads(model_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} cannot be read as JSON: {error}", code="F140") from None
    if not isinstance(found, dict):
        raise FileError(f"{path} is not a JSON object", code="F140")
    return found


def without_prefix(weights: Weights, prefixes: tuple[str, ...]) -> dict[str, np.ndarray | GgufTensor]:
    """The names without the first of the prefixes that they begin with."""
    found: dict[str, np.ndarray | GgufTensor] = {}
    for name, tensor in weights.items():
        short = next((name.removeprefix(p) for p in prefixes if name.startswith(p)), name)
        found[short] = tensor
    return found


def check_layers(what: str, layers: int, weights: Mapping[str, Any], prefix: str) -> None:
    """Refuse a configuration that asks for more layers than the weights have, before anything is made for them.

    `prefix` is how the names of a layer's weights begin, with its number left open.
    """
    number = re.compile(re.escape(prefix).replace(re.escape("{}"), r"(\d{1,9})"))
    held = {found[1] for found in map(number.match, weights) if found is not None}
    if layers > len(held):
        raise FileError(f"{what}: the configuration has {layers} layers, the weights have {len(held)}", code="F142")


def check_shapes(what: str, weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights of other shapes than the configuration asks for."""
    builder = WeightBuilder(what, weights)
    for name, shape in shapes.items():
        builder.tensor(name, shape)
    builder.check()


# rows of several weights one after the other, by the first of them: for as long as a graph has them
_JOINED: WeakKeyDictionary[GgufTensor, tuple[tuple[GgufTensor, ...], ref[np.ndarray]]] = WeakKeyDictionary()


def _joined_rows(tensors: Sequence[GgufTensor]) -> np.ndarray:
    """The rows of quantised weights one after the other; the same memory for all graphs of a model."""
    first, others = tensors[0], tuple(tensors[1:])
    known, held = _JOINED.get(first, ((), None))
    rows = held() if held is not None and known == others else None
    if rows is None:
        rows = np.concatenate([t.data for t in tensors])
        _JOINED[first] = others, ref(rows)
        ends = np.cumsum([len(t.data) for t in tensors])
        for tensor, part in zip(tensors, np.split(rows, ends[:-1]), strict=True):
            if not release_pages(tensor.data):
                tensor.move(part)  # it would be in memory twice
    return rows


class WeightBuilder:
    """A graph under construction whose parameters are weights by name.

    Weights in 16 bits are widened when they are bound; quantised ones stay as their blocks, and matmuls read those.
    """

    def __init__(self, name: str, weights: Weights) -> None:
        self.graph = Graph(name)
        self.weights = weights
        self.bound: dict[str, np.ndarray] = {}
        self.watched: dict[str, Value] | None = None  # what each matmul is given, where someone wants to know
        self.changes: Mapping[str, Any] = {}  # low-rank changes of matmuls, kept apart from the weights
        self.is_fed = False  # weights are inputs, which may differ from run to run
        self._known: dict[str, Value] = {}
        self._wrong: list[str] = []

    def has(self, name: str) -> bool:
        return name in self.weights

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray | GgufTensor:
        """A weight. One that is missing or of another shape than the configuration asks for is noted, see `check`."""
        found = self.weights.get(name)
        if found is not None and tuple(found.shape) == shape:
            return found
        if found is None:
            wrong = f"the weights have no {name!r} : f32{list(shape)}"
        else:
            kind = found.kind if isinstance(found, GgufTensor) else as_dtype(found.dtype).name
            wrong = f"{name!r} is {kind}{list(found.shape)}, the configuration asks for {list(shape)}"
        if wrong not in self._wrong:
            self._wrong.append(wrong)
        if prod(shape) > MAX_ELEMENTS:
            self.check()
        return np.broadcast_to(np.float32(0), shape)

    def check(self) -> None:
        """Refuse weights that are not those of the configuration, naming all of them."""
        if self._wrong:
            shown, more = self._wrong[:SHOWN], len(self._wrong) - SHOWN
            rest = f"; and {more} more" if more > 0 else ""
            raise FileError(f"{self.graph.name}: {'; '.join(shown)}{rest}", code="F142")

    def param(self, name: str, shape: tuple[int, ...]) -> Value:
        """A weight as an f32 value."""
        if name not in self._known:
            found = self.tensor(name, shape)
            if isinstance(found, GgufTensor) and not found.is_plain:
                codes = self._codes(name, found)
                rows = int(np.prod(shape[:-1]))
                wide = ops.dequant_weights(codes, scheme=found.scheme, k=shape[-1], n=rows)  # [K, N]
                if found.order is not None:
                    wide = ops.take(wide, np.argsort(found.order), axis=0)
                value = ops.reshape(ops.transpose(wide, (1, 0)), shape)
            else:
                array = found.data if isinstance(found, GgufTensor) else found
                self.bound[name] = array
                value = ops.cast(self._declared(name, shape, as_dtype(array.dtype)), f32)
            self._known[name] = value
        return self._known[name]

    def _declared(self, name: str, shape: tuple[int, ...], dtype: DType) -> Value:
        return (self.graph.input if self.is_fed else self.graph.param)(name, shape, dtype)

    def _codes(self, name: str, tensor: GgufTensor) -> Value:
        key = f"{name}#codes"
        if key not in self._known:
            if tensor.scheme is None:
                raise undecodable(f"{self.graph.name}: {name!r}", tensor.kind)
            raw = tensor.data.reshape(-1)
            self.bound[name] = raw
            self._known[key] = self._declared(name, raw.shape, u8)
        return self._known[key]

    def linear(
        self, x: Value, name: str, n: int, k: int, *, bias: bool | None = None, transposed: bool = True
    ) -> Value:
        """x · Wᵀ + b. W is [n, k], or [k, n] where `transposed` is False; a bias is added where there is one."""
        self._watch(x, name)
        shape = (n, k) if transposed else (k, n)
        found = self.tensor(f"{name}.weight", shape)
        if isinstance(found, GgufTensor) and not found.is_plain and transposed:
            y = ops.dequant_matmul(
                self._ordered(x, name, found), self._codes(f"{name}.weight", found), scheme=found.scheme
            )
        else:
            w = self.param(f"{name}.weight", shape)
            y = ops.matmul(x, ops.transpose(w, (1, 0)) if transposed else w)
        y = self.changed(x, y, name)
        if bias is None:
            bias = self.has(f"{name}.bias")
        return y + self.param(f"{name}.bias", (n,)) if bias else y

    def grouped(self, x: Value, ids: Value, name: str, shape: tuple[int, int, int]) -> Value:
        """Rows of x, each times one of E matrices [in, out]; those of GGUF files are [out, in], read where they are."""
        count, k, n = shape
        found = self.weights.get(name)
        if not isinstance(found, GgufTensor):
            return ops.grouped_matmul(x, self.param(name, shape), ids)
        if found.is_plain:
            return ops.grouped_matmul(x, ops.swapaxes(self.param(name, (count, n, k)), 1, 2), ids)
        blocks = self.tensor(name, (count, n, k))
        assert isinstance(blocks, GgufTensor)
        if blocks.order is not None:
            x = ops.take_along_axis(x, ops.take(self._order_of(name, blocks.order), ids, axis=0), axis=-1)
        return ops.dequant_grouped_matmul(x, self._codes(name, blocks), ids, scheme=blocks.scheme, n=n)

    def _watch(self, x: Value, *names: str) -> None:
        if self.watched is not None:
            self.watched |= dict.fromkeys(names, x)

    def _ordered(self, x: Value, name: str, tensor: GgufTensor) -> Value:
        """x in the order of the weight's columns, where groups of columns were chosen by their size."""
        return x if tensor.order is None else ops.take(x, self._order_of(name, tensor.order), axis=-1)

    def _order_of(self, name: str, order: np.ndarray) -> Value:
        key = f"{name}.order"
        if key not in self._known:
            self.bound[key] = order
            self._known[key] = self.graph.param(key, order.shape, i64)
        return self._known[key]

    def changed(self, x: Value, y: Value, name: str) -> Value:
        """A matmul with the low-rank change that belongs to it, if there is one."""
        change = self.changes.get(name)
        if change is None:
            return y
        parts = []
        for part, array in (("A", change.a), ("B", change.b.astype(np.float32) * np.float32(change.scale))):
            key = f"{name}.lora_{part}"
            self.bound[key] = array.astype(np.float32)
            parts.append(self.graph.param(key, array.shape, f32))
        down, up = (ops.transpose(w, (1, 0)) for w in parts)
        return y + ops.matmul(ops.matmul(x, down), up)

    def linears(self, x: Value, names: list[str], ns: tuple[int, ...], k: int) -> list[Value]:
        """Several matmuls with one x. Quantised weights of one kind are laid one after the other and read as one."""
        self._watch(x, *names)
        found = [self.tensor(f"{name}.weight", (n, k)) for name, n in zip(names, ns, strict=True)]
        packed = [t for t in found if isinstance(t, GgufTensor) and not t.is_plain]
        joinable = len(packed) == len(found) and len({t.kind for t in packed}) == 1
        joinable = joinable and all(t.order is None for t in packed)
        if not joinable or any(self.has(f"{name}.bias") for name in names):
            return [self.linear(x, name, n, k) for name, n in zip(names, ns, strict=True)]
        joined = GgufTensor("+".join(names), packed[0].kind, (sum(ns), k), _joined_rows(packed))
        y = ops.dequant_matmul(x, self._codes(joined.name, joined), scheme=joined.scheme)
        starts = [sum(ns[:i]) for i in range(len(ns))]
        return [
            self.changed(x, ops.narrow(y, -1, start, n), name) for start, n, name in zip(starts, ns, names, strict=True)
        ]

    def embedding(self, ids: Value, name: str, rows: int, width: int) -> Value:
        """Rows of a table, decoded one by one where the table is quantised."""
        found = self.tensor(name, (rows, width))
        if not (isinstance(found, GgufTensor) and not found.is_plain):
            array = found.data if isinstance(found, GgufTensor) else found
            if name not in self._known:
                self.bound[name] = array
                self._known[name] = self.graph.param(name, (rows, width), as_dtype(array.dtype))
            return ops.cast(ops.take(self._known[name], ids, axis=0), f32)
        codes = ops.reshape(self._codes(name, found), (rows, found.data.shape[-1]))
        picked = ops.take(codes, ids, axis=0)  # [.., bytes of a row]
        wide = ops.dequant_weights(picked, scheme=found.scheme, k=width, n=dim_prod(ids.shape))
        return ops.reshape(ops.transpose(wide, (1, 0)), (*ids.shape, width))

    def layer_norm(self, x: Value, name: str, width: int, eps: float) -> Value:
        gamma = self.param(f"{name}.weight", (width,))
        beta = self.param(f"{name}.bias", (width,)) if self.has(f"{name}.bias") else None
        return ops.layer_norm(x, gamma, beta, eps=eps)
