"""Files of arrays: safetensors, GGUF, npz. Their headers are changed field by field as well as byte by byte."""

from __future__ import annotations

import io
import json
import random
import struct
import warnings
import zipfile
import zlib
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from strata.cli import stages
from strata.cli.parser import Mistake
from strata.errors import StrataError
from strata.io import GgufTensor, load_gguf, load_npz, load_safetensors, quantized_tensor, save_gguf, save_safetensors
from strata.ops import gguf_blocks
from tests.fuzz.mutate.base import Files, Format
from tests.fuzz.mutate.changes import NUMBERS, WORDS, change_bytes, change_json, json_bytes, packed


def inspect(path: Path) -> None:
    """`strata inspect FILE`, which shows a file that it can read and tells the others' mistake in a line."""
    options = Namespace(model=str(path), stage=None, json=False, device="reference", passes=None)
    try:
        with redirect_stdout(io.StringIO()):
            stages.inspect(options)
    except (Mistake, StrataError):
        pass


def sound_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.standard_normal((3, 4)).astype(np.float32),
        "b": np.arange(6, dtype=np.int64),
        "c": np.zeros((0, 2), np.float16),
        "d": np.array(True),
    }


class Safetensors(Format):
    name = "safetensors"

    def prepare(self, folder: Path) -> None:
        path = folder / "x.safetensors"
        save_safetensors(path, sound_arrays(), {"format": "pt"})
        self.data = path.read_bytes()
        size = int.from_bytes(self.data[:8], "little")
        self.header, self.body = json.loads(self.data[8 : 8 + size]), self.data[8 + size :]
        assert self.attempt(folder, random.Random()) == "read"

    def mutant(self, rng: random.Random) -> Files:
        if rng.random() < 0.3:
            return {"x.safetensors": change_bytes(self.data, rng)}
        header = json_bytes(change_json(self.header, rng, ("F32", "I64", "BF16", "F8_E4M3", "C64", "BOOL", "U4")), rng)
        header += b" " * (-len(header) % 8)
        size = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS)
        body = self.body if rng.random() < 0.8 else self.body[: rng.randrange(len(self.body))] * rng.choice((1, 2))
        return {"x.safetensors": packed("<q", size) + header + body}

    def attempt(self, folder: Path, rng: random.Random) -> str:
        inspect(folder / "x.safetensors")
        for array in load_safetensors(folder / "x.safetensors").values():
            array.astype(np.complex128).sum()
        return "read"


# ----------------------------------------------------------------------------------------------------------------- GGUF

Field = tuple[str, bytes]  # what it is: count, length, type, rank, size, offset, text, value, data


def gguf_fields(data: bytes) -> list[Field]:
    """A sound file of version 3 as its fields, in order."""
    fields: list[Field] = [("text", data[:4])]
    at = 4

    def take(kind: str, size: int) -> bytes:
        nonlocal at
        fields.append((kind, data[at : at + size]))
        at += size
        return data[at - size : at]

    def text() -> None:
        take("text", int.from_bytes(take("length", 8), "little"))

    def value(kind: int) -> None:
        if kind == 8:
            text()
        elif kind == 9:
            inner, count = int.from_bytes(take("type", 4), "little"), int.from_bytes(take("count", 8), "little")
            for _ in range(count):
                value(inner)
        else:
            take("value", {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1}.get(kind, 8))

    take("type", 4)
    tensors, keys = (int.from_bytes(take("count", 8), "little") for _ in range(2))
    for _ in range(keys):
        text()
        value(int.from_bytes(take("type", 4), "little"))
    for _ in range(tensors):
        text()
        for _ in range(int.from_bytes(take("rank", 4), "little")):
            take("size", 8)
        take("type", 4)
        take("offset", 8)
    fields.append(("data", data[at:]))
    return fields


def change_fields(fields: list[Field], rng: random.Random) -> bytes:
    """One to three fields changed, doubled, dropped or swapped; mostly the lengths of texts stay true."""
    made = list(fields)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(made))
        kind, old = made[at]
        match rng.randrange(8):
            case 0 | 1 | 2 | 3 if kind == "text":
                words = [t for k, t in fields if k == "text"]
                raw = [w.encode("utf-8", "surrogatepass") for w in WORDS]
                new = rng.choice((*words, *raw, b"\xff\xfe", b"\xc0\x80", old + b"\x80", old[:-1]))
                made[at] = kind, new
                if at and made[at - 1][0] == "length":
                    made[at - 1] = "length", struct.pack("<Q", len(new))
            case 0 | 1 | 2 | 3 if len(old) in (1, 2, 4, 8):
                now = int.from_bytes(old, "little")
                form = {1: "<b", 2: "<h", 4: "<i", 8: "<q"}[len(old)]
                near = (now + 1, now - 1, now * 2, now + 32)
                made[at] = kind, packed(form, rng.choice((*NUMBERS, *near, rng.randrange(48))))
            case 4:
                first = rng.randrange(len(made))
                made[at:at] = made[first : first + rng.choice((1, 2, 4, 6))]
            case 5:
                del made[at : at + rng.choice((1, 2, 3))]
            case 6:
                other = rng.randrange(len(made))
                made[at], made[other] = made[other], made[at]
            case _:
                made[at] = kind, rng.randbytes(len(old)) if len(old) < 64 else old[: rng.randrange(len(old))]
        if not made:
            break
    return b"".join(piece for _, piece in made)


class Gguf(Format):
    """Two files: one of tensors and keys of every kind, and a whole decoder with its vocabulary."""

    name = "gguf"

    def prepare(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        kinds = ("q4_0", "q4k", "q6k", "q8_0")
        blocks = {
            f"w{k}": quantized_tensor(f"w{k}", rng.standard_normal((2, 256)).astype(np.float32), k) for k in kinds
        }
        for kind, form in gguf_blocks.FORMATS.items():  # those that are read only, too
            data = gguf_blocks.random_blocks(form, 2 * (256 // form.elements), rng).reshape(2, -1)
            blocks[f"r{kind}"] = GgufTensor(f"r{kind}", kind, (2, 256), data)
        keys = {"general.architecture": "llama", "a.list": [1, 2, 3], "a.names": ["x", "yy"], "f": 1.5, "flag": True,
                "n": -3}  # fmt: skip
        plain = {name: array for name, array in sound_arrays().items() if name != "d"}
        save_gguf(folder / "x.gguf", plain | blocks, keys)
        self.files = [(folder / "x.gguf").read_bytes()]
        save_gguf(folder / "x.gguf", *tiny_decoder())
        self.files.append((folder / "x.gguf").read_bytes())
        self.fields = [gguf_fields(data) for data in self.files]
        for data, fields in zip(self.files, self.fields, strict=True):
            assert b"".join(piece for _, piece in fields) == data
            (folder / "x.gguf").write_bytes(data)
            outcome = self.attempt(folder, random.Random(0))
        assert outcome == "ran"

    def mutant(self, rng: random.Random) -> Files:
        which = rng.randrange(2)
        if rng.random() < 0.3:
            return {"x.gguf": change_bytes(self.files[which], rng)}
        return {"x.gguf": change_fields(self.fields[which], rng)}

    def attempt(self, folder: Path, rng: random.Random) -> str:
        from strata.models import load

        path = folder / "x.gguf"
        if rng.random() < 0.2:
            inspect(path)
        found = load_gguf(path)
        for value in found.metadata.values():
            list(value) if hasattr(value, "__len__") else value
        for tensor in found.values():
            try:
                tensor.dequantize().sum()
            except StrataError:
                pass
        if "token_embd.weight" not in found:
            return "read"
        model = load(path, device="reference")
        ids = model.tokenizer.encode("a b")[:4] if rng.random() < 0.5 else [1, 2]
        model.tokenizer.decode(ids)
        if rng.random() < 0.1:
            model.run(input_ids=np.array([ids or [0]]))
        return "ran"


def tiny_decoder() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and keys of a Llama of one layer."""
    rng = np.random.default_rng(1)
    hidden, inner, vocab = 8, 12, 16
    shapes = {
        "token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,), "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,), "blk.0.attn_q.weight": (hidden, hidden),
        "blk.0.attn_k.weight": (hidden // 2, hidden), "blk.0.attn_v.weight": (hidden // 2, hidden),
        "blk.0.attn_output.weight": (hidden, hidden), "blk.0.ffn_gate.weight": (inner, hidden),
        "blk.0.ffn_up.weight": (inner, hidden), "blk.0.ffn_down.weight": (hidden, inner),
        "rope_freqs.weight": (2,),
    }  # fmt: skip
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["rope_freqs.weight"][:] = 1, 2
    tokens = ["<s>", "</s>", "<unk>", *"abcdefghijklĠ"]
    keys = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1, "llama.embedding_length": hidden, "llama.feed_forward_length": inner,
        "llama.context_length": 64, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 4, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0,
        "llama.attention.sliding_window": 8,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.token_type": [3, 3, 3, *([1] * (len(tokens) - 3))], "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }  # fmt: skip
    return tensors, keys


# ------------------------------------------------------------------------------------------------------------------ npz


class Npz(Format):
    """Zip files of arrays: members, their headers, their sizes as told and as packed."""

    name = "npz"
    shapes: ClassVar = ("(3, 4)", "()", "(-1,)", "(0,)", "(2, 2)", "(99999999999,)", "(2305843009213693952, 8)", "[3]",
                        "(3, 4, ", "(" * 300 + ")" * 300, "(True,)", "(1.5,)")  # fmt: skip
    types: ClassVar = (
        "<f4",
        "<f8",
        "|b1",
        "<i8",
        "|O",
        "<c16",
        "<U5",
        "|V8",
        "<M8[s]",
        "",
        "f4,f4",
        ">f4",
        "S99999999",
    )

    def prepare(self, folder: Path) -> None:
        file = io.BytesIO()
        np.savez_compressed(file, **sound_arrays())
        self.data = file.getvalue()
        (folder / "x.npz").write_bytes(self.data)
        assert self.attempt(folder, random.Random()) == "read"

    def mutant(self, rng: random.Random) -> Files:
        if rng.random() < 0.4:
            return {"x.npz": change_bytes(self.data, rng)}
        file = io.BytesIO()
        warnings.simplefilter("ignore")  # zipfile warns of names that come twice
        packing = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        with zipfile.ZipFile(file, "w", packing) as made:
            for name in rng.choices(("a.npy", "b.npy", "a", "../x.npy", "/x.npy", "é.npy", ""), k=rng.randrange(4)):
                made.writestr(zipfile.ZipInfo(name or "x"), self._member(rng), packing)
        data = file.getvalue()
        return {"x.npz": change_bytes(data, rng) if rng.random() < 0.3 else data}

    def _member(self, rng: random.Random) -> bytes:
        head = f"{{'descr': {rng.choice(self.types)!r}, 'fortran_order': {rng.choice((True, False, 3))}, 'shape': "
        head += f"{rng.choice(self.shapes)}, }}"
        raw = head.encode() + b" " * rng.choice((0, 7, 20_000)) + b"\n"
        version = rng.choice(((1, "<H"), (2, "<I"), (3, "<I"), (9, "<I")))
        size = len(raw) if rng.random() < 0.8 else rng.randrange(1 << 16)
        body = bytes(rng.choice((0, 48, 96, 100, 1 << 16)))
        if rng.random() < 0.02:
            body = bytes(48 << 20)  # zeros pack a thousand to one
        return b"\x93NUMPY" + bytes((version[0], 0)) + struct.pack(version[1], size & 0xFFFF) + raw + body

    def attempt(self, folder: Path, rng: random.Random) -> str:
        for array in load_npz(folder / "x.npz").values():
            zlib.crc32(array.tobytes())
        return "read"
