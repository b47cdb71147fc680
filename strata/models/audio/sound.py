"""Sound as samples: WAV files with checked bounds, mono, at the rate that a model asks for."""

from __future__ import annotations

import os
import struct
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from strata.core import read_bytes
from strata.errors import FileError, OptionError, ShapeError, file_error

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
RATES = range(1, 1 << 20)


def load_wav(path: str | os.PathLike[str]) -> tuple[np.ndarray, int]:
    """The samples of a WAV file, f32[n] from -1 to 1 with its channels averaged, and its rate."""
    place = Path(path)
    try:
        data = read_bytes(place)
    except OSError as error:
        raise file_error(place, error, code="F151", what="cannot be read", who="load_wav") from None
    return decode_wav(data)


def decode_wav(data: bytes) -> tuple[np.ndarray, int]:
    """The samples of a WAV file: PCM of 8 to 32 bits, or floats."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise FileError("wav: the file does not begin with its header", code="F151")
    parts = _parts(data)
    header, body = parts.get(b"fmt "), parts.get(b"data")
    if header is None or len(header) < 16 or body is None:
        raise FileError("wav: there is no format, or no sound", code="F151")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", header)
    if kind == EXTENSIBLE and len(header) >= 26:
        kind = struct.unpack_from("<H", header, 24)[0]
    if not channels or rate not in RATES:
        raise FileError(f"wav: {channels} channels at {rate} samples a second are not read", code="F151")
    found = _samples(body, kind, bits)
    found = found[: len(found) // channels * channels].reshape(-1, channels)
    return found.mean(1, dtype=np.float32) if channels > 1 else np.ascontiguousarray(found[:, 0]), rate


def _parts(data: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= len(data):
        name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        if at + 8 + size > len(data) and name != b"data":  # a recorder that was cut off leaves a wrong size
            raise FileError(f"wav: the part {name!r} has {size} bytes, the file has {len(data) - at - 8}", code="F151")
        found.setdefault(name, data[at + 8 : at + 8 + size])
        at += 8 + size + size % 2
    return found


def _samples(body: bytes, kind: int, bits: int) -> np.ndarray:
    match kind, bits:
        case (1, 8):
            return (np.frombuffer(body, np.uint8).astype(np.float32) - 128) / np.float32(128)
        case (1, 16) | (1, 32):
            wide = np.frombuffer(body[: len(body) // (bits // 8) * (bits // 8)], f"<i{bits // 8}")
            return wide.astype(np.float32) / np.float32(1 << (bits - 1))
        case (1, 24):
            three = np.frombuffer(body[: len(body) // 3 * 3], np.uint8).reshape(-1, 3)
            four = np.zeros((len(three), 4), np.uint8)
            four[:, 1:] = three
            return four.reshape(-1).view("<i4").astype(np.float32) / np.float32(1 << 31)
        case (3, 32) | (3, 64):
            floats = np.frombuffer(body[: len(body) // (bits // 8) * (bits // 8)], f"<f{bits // 8}")
            if not np.isfinite(floats).all():
                raise FileError("wav: a sample is not finite", code="F151")
            return floats.astype(np.float32)
    raise FileError(f"wav: format {kind} with {bits} bits is not read; PCM and floats are", code="F151")


def as_samples(sound: Any, rate: int, given: int | None = None) -> np.ndarray:
    """Samples f32[n] at `rate`, of a WAV file, or of an array with `given` samples a second (`rate` by default)."""
    if isinstance(sound, (str, os.PathLike)):
        samples, given = load_wav(sound)
    elif isinstance(sound, (bytes, bytearray)):
        samples, given = decode_wav(bytes(sound))
    else:
        samples, given = _array(sound), rate if given is None else given
    if given not in RATES:
        raise OptionError(f"transcribe: {given} samples a second make no sound", code="O236")
    return samples if given == rate else resampled(samples, given, rate)


def _array(sound: Any) -> np.ndarray:
    found = np.asarray(sound)
    if found.dtype.kind not in "fi" or found.ndim not in (1, 2) or not found.size:
        raise ShapeError(
            f"sound is a WAV file or samples f32[n], got {type(sound).__name__} of {found.dtype}{list(found.shape)}",
            code="S600",
        )
    if found.dtype.kind == "i":
        found = found / np.float32(np.iinfo(found.dtype).max + 1.0)
    if found.ndim == 2:  # channels first or last: there are fewer of them
        found = found.mean(int(found.shape[0] >= found.shape[1]))
    if not np.isfinite(found).all():
        raise ShapeError("sound has samples that are not finite", code="S600")
    return np.ascontiguousarray(found, np.float32)


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """At another rate, by a polyphase filter."""
    from scipy.signal import resample_poly

    shared = gcd(rate, wanted)
    out: np.ndarray = resample_poly(samples, wanted // shared, rate // shared).astype(np.float32)
    return out
