"""GGUF files, versions 1 to 3: metadata and tensors, mapped, with quantised weights left as the bytes they are.

Every count, length, offset and type is checked before it is used, so that a malformed file is a FileError and never a
runaway allocation. Split files are read as one.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from strata.arguments import own_checks
from strata.core import DType, as_dtype, bf16, f16, f32, f64, i8, i16, i32, i64
from strata.errors import FileError
from strata.io.mapped import PathLike, map_file, path_of, replace_file, typed_view
from strata.kinds import with_article
from strata.ops import gguf_blocks, schemes

MAGIC: Final = b"GGUF"
PLAIN: Final[dict[int, tuple[str, DType]]] = {
    0: ("f32", f32), 1: ("f16", f16), 24: ("i8", i8), 25: ("i16", i16), 26: ("i32", i32), 27: ("i64", i64),
    28: ("f64", f64), 30: ("bf16", bf16),
}  # fmt: skip
# code: name, elements and bytes of a block; those without a decoder here can be carried and written, not decoded
BLOCKS: Final[dict[int, tuple[str, int, int]]] = {
    **{f.code: (f.name, f.elements, f.bytes) for f in gguf_blocks.FORMATS.values()},
    9: ("q8_1", 32, 40), 16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50), 20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136), 29: ("iq1_m", 256, 56), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36), 41: ("q1_0", 128, 18),
}  # fmt: skip
CODES: Final = {name: code for code, (name, *_) in {**PLAIN, **BLOCKS}.items()}
SCALARS: Final[dict[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
NUMPY: Final = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9
MAX_RANK = 8
MAX_ELEMENTS = 1 << 48
MAX_NAME = 1 << 16
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf\Z")


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """One tensor: `shape` outermost first; `data` the elements of a plain type, or the bytes [.., bytes per row]."""

    name: str
    kind: str  # f32, bf16, q4_0, q4k, …
    shape: tuple[int, ...]
    data: np.ndarray
    # of the elements of x that columns belong to, where it is not their own: [K], or of each matrix of a stack [E, K]
    order: np.ndarray | None = None

    @property
    def scheme(self) -> schemes.Scheme | None:
        """How the weights are stored, if quantised in a way that the compiler knows."""
        known = self.kind in gguf_blocks.FORMATS or self.kind in gguf_blocks.PACKED
        return schemes.Scheme(f"gguf_{self.kind}") if known else None

    @property
    def is_plain(self) -> bool:
        return CODES.get(self.kind) in PLAIN

    def move(self, data: np.ndarray) -> None:
        """Have the same bytes at another place."""
        object.__setattr__(self, "data", data)

    def dequantize(self) -> np.ndarray:
        """The numbers, in f32."""
        if self.is_plain:
            return self.data.astype(np.float32)
        if self.scheme is None:
            raise undecodable(f"gguf: tensor {self.name!r}", self.kind)
        found = gguf_blocks.decode(self.data, self.kind).reshape(self.shape)
        if self.order is not None:
            order = self.order if self.order.ndim == 1 else self.order[:, None]  # of each matrix of a stack
            placed = np.empty_like(found)
            np.put_along_axis(placed, np.broadcast_to(order, found.shape), found, -1)
            return placed
        return found


def undecodable(what: str, kind: str) -> FileError:
    """The error of weights in blocks that there is no decoder for."""
    known = ", ".join(gguf_blocks.FORMATS)
    return FileError(f"{what} is {kind}, which cannot be decoded; known are {known}", code="F131")


class GgufFile(Mapping[str, GgufTensor]):
    """Tensors by name, and `metadata` by key."""

    def __init__(self, tensors: dict[str, GgufTensor], metadata: dict[str, Any], version: int) -> None:
        self.tensors, self.metadata, self.version = tensors, metadata, version

    def __getitem__(self, name: str) -> GgufTensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Strings(Sequence[str]):
    """An array of strings, decoded when first looked at: vocabularies are long, and often not needed."""

    def __init__(self, data: memoryview, spans: list[tuple[int, int]]) -> None:
        self._data, self._spans = data, spans
        self._known: list[str] | None = None

    def _list(self) -> list[str]:
        if self._known is None:
            raw = bytes(self._data)
            self._known = [str(raw[a:b], "utf-8", "replace") for a, b in self._spans]
        return self._known

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: Any) -> Any:
        return self._list()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._list())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, tuple, Strings)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class _GgufReader:
    """A cursor over the bytes of one file."""

    def __init__(self, data: np.ndarray, name: str) -> None:
        self.bytes = memoryview(data)  # type: ignore[arg-type]
        self.name, self.at, self.wide = name, 0, True

    def fail(self, message: str) -> FileError:
        return FileError(f"gguf: {self.name}: {message}", code="F130")

    @property
    def left(self) -> int:
        return len(self.bytes) - self.at

    def number(self, form: str) -> Any:
        size = struct.calcsize(form)
        if size > self.left:
            raise self.fail(f"ends at byte {len(self.bytes)}, inside its header")
        (value,) = struct.unpack_from(form, self.bytes, self.at)
        self.at += size
        return value

    def count(self) -> int:
        """A count or a length: 32 bits in version 1."""
        value: int = self.number("<Q" if self.wide else "<I")
        return value

    def string(self, limit: int | None = None) -> str:
        """A text; with a limit, a name: of at most this many bytes, and nothing but UTF-8."""
        size = self.count()
        if size > (self.left if limit is None else min(limit, self.left)):
            raise self.fail(f"a string of {size} bytes at byte {self.at} does not fit")
        text = bytes(self.bytes[self.at : self.at + size])
        self.at += size
        if limit is None:
            return str(text, "utf-8", "replace")
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"the name {text[:40]!r} at byte {self.at - size} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        raise self.fail(f"a value of the unknown type {kind}")

    def array(self) -> Any:
        kind, count = self.number("<I"), self.count()
        if kind == STRING:
            return self.strings(count)
        if kind not in NUMPY:
            raise self.fail(f"an array of the unknown type {kind}")
        dtype = np.dtype(NUMPY[kind])
        if count * dtype.itemsize > self.left:
            raise self.fail(f"an array of {count} elements at byte {self.at} does not fit")
        found = np.frombuffer(self.bytes, dtype, count, self.at) if count else np.empty(0, dtype)
        self.at += count * dtype.itemsize
        return found

    def strings(self, count: int) -> Strings:
        width = 8 if self.wide else 4
        if count * width > self.left:
            raise self.fail(f"{count} strings at byte {self.at} do not fit")
        unpack, data, at, first = struct.Struct("<Q" if self.wide else "<I").unpack_from, self.bytes, self.at, self.at
        spans = []
        try:
            for _ in range(count):
                start = at + width
                at = start + unpack(data, at)[0]
                spans.append((start - first, at - first))
        except (struct.error, OverflowError):
            at = len(data) + 1
        if at > len(data):
            raise self.fail(f"a string of an array at byte {self.at} does not fit")
        self.at = at
        return Strings(data[first:at], spans)


def load_gguf(path: PathLike | Sequence[PathLike]) -> GgufFile:
    """A GGUF file. Of a split file, any part may be named, or all of them in order."""
    if isinstance(path, (list, tuple)):
        return _joined([_load_one(p) for p in path])
    path = path_of(path, "gguf")
    first = _load_one(path)
    parts = first.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts <= 1:
        return first
    match = SPLIT_NAME.match(path.name)
    if match is None or int(match[3]) != parts:
        raise FileError(f"gguf: {path.name} is one of {parts} parts, but is not named like one", code="F132")
    names = [path.with_name(f"{match[1]}-{i + 1:05d}-of-{match[3]}.gguf") for i in range(parts)]
    return _joined([_load_one(p) for p in names])


def _joined(parts: list[GgufFile]) -> GgufFile:
    if not parts:
        raise FileError("gguf: no files were named", code="F132")
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        twice = tensors.keys() & part.keys()
        if twice:
            raise FileError(f"gguf: tensor {min(twice)!r} is in two of the files", code="F132")
        tensors |= part.tensors
    return GgufFile(tensors, parts[0].metadata, parts[0].version)


def _load_one(path: PathLike) -> GgufFile:
    data = map_file(path, "gguf")
    r = _GgufReader(data, Path(path).name)
    if r.left < 4 or bytes(r.bytes[:4]) != MAGIC:
        raise r.fail("does not begin with GGUF")
    r.at = 4
    version = r.number("<I")
    if version not in (1, 2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise r.fail("is big-endian" if swapped in (2, 3) else f"has version {version}, known are 1 to 3")
    r.wide = version > 1
    tensor_count, key_count = r.count(), r.count()
    if tensor_count > min(MAX_TENSORS, r.left // 16) or key_count > min(MAX_KEYS, r.left // 8):
        raise r.fail(f"says it has {tensor_count} tensors and {key_count} keys in {len(data)} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = r.string(MAX_NAME)
        if key in metadata:
            raise r.fail(f"has the key {key!r} twice")
        metadata[key] = r.value(r.number("<I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise r.fail(f"has the alignment {alignment!r}, which is not a power of two")
    infos = [_tensor_info(r) for _ in range(tensor_count)]
    return GgufFile(_place(r, data, infos, alignment), metadata, version)


Info = tuple[str, tuple[int, ...], int, int]  # name, shape outermost first, type code, offset


def _tensor_info(r: _GgufReader) -> Info:
    name = r.string(MAX_NAME)
    rank = r.number("<I")
    if rank > MAX_RANK:
        raise r.fail(f"tensor {name!r} has {rank} axes")
    dims = tuple(r.count() for _ in range(rank))
    if prod(d for d in dims if d) > MAX_ELEMENTS:
        raise r.fail(f"tensor {name!r} has the sizes {list(dims)}")
    code, offset = r.number("<I"), r.number("<Q")
    if code not in PLAIN and code not in BLOCKS:
        raise r.fail(f"tensor {name!r} has the unknown type {code}")
    return name, dims[::-1], code, offset


def _place(r: _GgufReader, data: np.ndarray, infos: list[Info], alignment: int) -> dict[str, GgufTensor]:
    """Every tensor over its bytes, when they are inside the file and belong to it alone."""
    start = -(-r.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    spans = []
    for name, shape, code, offset in infos:
        if name in tensors:
            raise r.fail(f"has the tensor {name!r} twice")
        elements, width = (1, PLAIN[code][1].itemsize) if code in PLAIN else BLOCKS[code][1:]
        row = shape[-1] if shape else 1
        if row % elements:
            raise r.fail(
                f"tensor {name!r} : {BLOCKS[code][0]}{list(shape)} has rows that are not whole blocks of {elements}"
            )
        count = prod(shape[:-1]) * (row // elements * width)
        if offset % alignment or offset > len(data) - start or count > len(data) - start - offset:
            raise r.fail(f"tensor {name!r}, {count} bytes at {offset}, does not lie inside the file")
        spans.append((offset, offset + count, name))
        if code in PLAIN:
            kind, dtype = PLAIN[code]
            tensors[name] = GgufTensor(name, kind, shape, typed_view(data, start + offset, dtype.np, shape))
        else:
            raw = data[start + offset : start + offset + count]
            rows = raw.reshape(*shape[:-1], row // elements * width)
            tensors[name] = GgufTensor(name, BLOCKS[code][0], shape, rows)
    spans.sort()
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            raise r.fail(f"tensors {first!r} and {second!r} overlap")
    return tensors


# -------------------------------------------------------------------------------------------------------------- writing


@own_checks()
def save_gguf(
    path: PathLike, tensors: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, *, alignment: int = 32
) -> None:
    """Write version 3. A tensor is an array, or a GgufTensor whose bytes are kept as they are."""
    if isinstance(path, Mapping) and not isinstance(tensors, Mapping):
        raise FileError(
            f"save_gguf: the path comes first, got {with_article(type(path))}",
            code="F121",
            fix="save_gguf(path, tensors)",
        )
    path_of(path, "save_gguf")
    for what, given in (("tensors", tensors), ("metadata", metadata)):
        if not isinstance(given, Mapping) and (what == "tensors" or given is not None):
            raise FileError(f"save_gguf: {what} are a mapping by name, got {with_article(type(given))}", code="F133")
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise FileError(f"save_gguf: the alignment {alignment!r} is not a power of two", code="F133")
    made = [x if isinstance(x, GgufTensor) else _plain(name, np.asarray(x)) for name, x in tensors.items()]
    keys = {"general.alignment": alignment} | dict(metadata or {})
    keys["general.alignment"] = alignment
    head = [MAGIC, struct.pack("<IQQ", 3, len(made), len(keys))]
    for key, value in keys.items():
        head += [_text(key), _value(key, value)]
    at = 0
    for name, tensor in zip(tensors, made, strict=True):
        head += [
            _text(name),
            struct.pack("<I", len(tensor.shape)),
            struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1]),
        ]
        head.append(struct.pack("<IQ", CODES[tensor.kind], at))
        at += -(-tensor.data.nbytes // alignment) * alignment
    text = b"".join(head)

    def write(file: BinaryIO) -> None:
        file.write(text + b"\0" * (-len(text) % alignment))
        for tensor in made:
            file.write(np.ascontiguousarray(tensor.data).tobytes())
            file.write(b"\0" * (-tensor.data.nbytes % alignment))

    replace_file(path, "save_gguf", write)


def quantized_tensor(name: str, array: np.ndarray, kind: str, importance: np.ndarray | None = None) -> GgufTensor:
    """An array [.., K] in a block format; `importance` [K] says how much each column counts."""
    form = gguf_blocks.block_format(kind)
    return GgufTensor(name, form.name, array.shape, gguf_blocks.encode(array, form.name, importance))


def _plain(name: str, array: np.ndarray) -> GgufTensor:
    dtype = as_dtype(array.dtype)
    if dtype.name not in CODES:
        raise FileError(f"gguf: {name!r} : {dtype} cannot be stored", code="F133")
    return GgufTensor(name, dtype.name, array.shape, np.ascontiguousarray(array).reshape(array.shape))


def _text(text: Any) -> bytes:
    try:
        raw = text.encode()
    except (AttributeError, UnicodeEncodeError):
        raise FileError(f"gguf: {text!r} is not a text in UTF-8", code="F133") from None
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, (bool, np.bool_)):
        return struct.pack("<I?", 7, bool(value))
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, (int, np.integer)):
        kind = 4 if 0 <= value < 1 << 32 else 10 if value >= 0 else 11
        return struct.pack("<I", kind) + struct.pack(SCALARS[kind], int(value))
    if isinstance(value, (float, np.floating)):
        narrow = np.float32(value) == value or not np.isfinite(value) or isinstance(value, np.float32)
        return struct.pack("<If", 6, value) if narrow else struct.pack("<Id", 12, value)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        kinds = {np.dtype(form): kind for kind, form in NUMPY.items()}
        found = kinds.get(value.dtype)
        if found is not None:
            return struct.pack("<IIQ", ARRAY, found, len(value)) + value.tobytes()
    if isinstance(value, (list, tuple, Strings)):
        if all(isinstance(v, str) for v in value) and len(value):
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(_text(v) for v in value)
        array = np.asarray(value)
        array = array.astype({"i": np.int32, "f": np.float32, "b": np.bool_}.get(array.dtype.kind, array.dtype))
        if array.ndim == 1 and array.dtype.kind in "ifbu":
            return _value(key, array)
    raise FileError(f"gguf: the value of {key!r} cannot be stored: {type(value).__name__}", code="F133")
