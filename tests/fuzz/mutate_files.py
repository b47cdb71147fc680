"""Mutated safetensors and GGUF files: a loader may refuse them with a StrataError, and must do nothing worse.

Run by hand for a long time: `python tests/fuzz/mutate_files.py 20000`. The unit tests run a few hundred.
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from strata.errors import StrataError
from strata.io import load_gguf, load_safetensors, quantized_tensor, save_gguf, save_safetensors

MEMORY = 64 << 20  # bytes that one mutant may take, beside four times its file
SECONDS = 2.0  # of a core, for one mutant


def resident_memory() -> int:
    """The bytes of this process in memory; from here on `peak_memory` counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> int:
    """The most bytes that this process had in memory since `resident_memory`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def seed_files(folder: Path) -> dict[str, Callable[[Path], object]]:
    """Small valid files by name, with their loaders."""
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((3, 4)).astype(np.float32),
        "b": np.arange(6, dtype=np.int64),
        "c": np.zeros((0, 2), np.float16),
    }
    save_safetensors(folder / "x.safetensors", arrays, {"format": "pt"})
    quantised = {
        f"w{kind}": quantized_tensor(f"w{kind}", rng.standard_normal((2, 256)).astype(np.float32), kind)
        for kind in ("q4_0", "q4k", "q6k", "q8_0")
    }
    keys = {
        "general.architecture": "llama",
        "a.list": [1, 2, 3],
        "a.names": ["x", "yy"],
        "f": 1.5,
        "flag": True,
        "n": -3,
    }
    save_gguf(folder / "x.gguf", arrays | quantised, keys)
    return {"x.safetensors": _read_safetensors, "x.gguf": _read_gguf}


def _read_safetensors(path: Path) -> object:
    found = load_safetensors(path)
    return [a.astype(np.float64).sum() if a.dtype.kind != "c" else a.sum() for a in found.values()]


def _read_gguf(path: Path) -> object:
    found = load_gguf(path)
    return [t.dequantize().sum() for t in found.values()], [
        list(v) if hasattr(v, "__len__") else v for v in found.metadata.values()
    ]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few random changes: bytes, whole numbers, pieces cut, doubled or moved, and truncation."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if len(raw) < 16:
            break
        at = rng.randrange(min(len(raw), rng.choice((64, 512, len(raw)))))
        match rng.randrange(7):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                raw[at] ^= 1 << rng.randrange(8)
            case 2:
                number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.randrange(2**16), len(raw)))
                raw[at : at + 8] = struct.pack("<Q", number)
            case 3:
                del raw[at : at + rng.randrange(1, 32)]
            case 4:
                raw[at:at] = raw[at : at + rng.randrange(1, 32)]
            case 5:
                raw = raw[:at]
            case 6:
                raw[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 7, 8, 9, 2**31, 2**32 - 1)))
    return bytes(raw)


def run(count: int, seed: int = 0) -> dict[str, int]:
    """Load so many mutants of each file; returns how many were refused. Anything but a StrataError propagates."""
    rng = random.Random(seed)
    refused = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for file, read in seed_files(folder).items():
            original = (folder / file).read_bytes()
            read(folder / file)
            refused[file] = 0
            for i in range(count):
                changed = folder / f"mutant{i % 2}-{file}"
                data = mutate(original, rng)
                changed.write_bytes(data)
                before, start = resident_memory(), time.process_time()
                try:
                    with np.errstate(all="ignore"):
                        read(changed)
                except StrataError:
                    refused[file] += 1
                seconds, grown = time.process_time() - start, peak_memory() - before
                name = f"mutant {i} of {file} with seed {seed}"
                assert seconds < SECONDS, f"{name} took {seconds:.1f} s"
                assert grown < 4 * len(data) + MEMORY, f"{name} took {grown >> 20} MB"
                changed.unlink()
    return refused


if __name__ == "__main__":
    print(run(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000))
