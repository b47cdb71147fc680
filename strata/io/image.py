"""Reading images: most PNG files here, with checked bounds; others, and other formats, need Pillow."""

from __future__ import annotations

import os
import struct
import zlib
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np

from strata.core import read_bytes
from strata.errors import FileError, file_error

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type: grey, RGB, palette, grey and alpha, RGB and alpha
MOST_PIXELS = 1 << 27


def load_image(path: str | os.PathLike[str]) -> np.ndarray:
    """An image as u8 of (height, width, 3); what is transparent is shown on white."""
    place = Path(path)
    try:
        data = read_bytes(place)
    except OSError as error:
        raise file_error(place, error, code="F150", what="cannot be read", who="load_image") from None
    return decode_image(data, f"load_image: {place.name}")


def decode_image(data: bytes, name: str = "the image", *, most: int = MOST_PIXELS) -> np.ndarray:
    """An image from the bytes of its file, as `load_image` gives it; `name` is what an error calls it. One with more
    pixels than `most` is refused before it is unpacked."""
    is_png = data.startswith(SIGNATURE)
    if is_png and (_is_simple(data) or find_spec("PIL") is None):
        return decode_png(data, most=most)
    if find_spec("PIL") is None:
        raise FileError(
            f"{name} is not a PNG; other kinds need the package pillow", code="F150", fix="pip install pillow"
        )
    return _with_pillow(data, name, most)


def _is_simple(data: bytes) -> bool:
    """Whether `decode_png` reads the file: no interlacing, at most 8 bits a channel, nothing about its orientation."""
    if len(data) < 33:
        return True
    depth, interlaced = data[24], data[28]
    return depth <= 8 and not interlaced and b"eXIf" not in data


def decode_png(data: bytes, *, most: int = MOST_PIXELS) -> np.ndarray:
    """The pixels of a PNG file (not interlaced, up to 8 bits a channel)."""
    chunks = list(_chunks(data))
    if not chunks or chunks[0][0] != b"IHDR" or len(chunks[0][1]) != 13:
        raise FileError("png: the file does not begin with its header", code="F150")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    if colour not in CHANNELS or depth not in ((8,) if colour in (2, 4, 6) else (1, 2, 4, 8)) or interlaced:
        raise FileError(
            f"png: colour type {colour} with {depth} bits, interlaced {interlaced}, is not read", code="F150"
        )
    if not 0 < width * height <= most:
        raise FileError(f"png: an image of {width} x {height} pixels is not read", code="F150")
    channels = CHANNELS[colour]
    row = -(-width * channels * depth // 8)
    rows = _inflated(b"".join(body for name, body in chunks if name == b"IDAT"), height * (row + 1))
    flat = _unfiltered(rows.reshape(height, row + 1), max(1, channels * depth // 8))
    if depth < 8:
        bits = np.unpackbits(flat, axis=1).reshape(height, -1, depth)
        flat = np.packbits(bits, axis=2)[..., 0] >> (8 - depth)
        if colour == 0:
            flat = (flat.astype(np.uint16) * 255 // ((1 << depth) - 1)).astype(np.uint8)
    pixels = flat[:, : width * channels].reshape(height, width, channels)
    if colour == 3:
        pixels = _from_palette(pixels[..., 0], dict(reversed(chunks)))
    return _on_white(pixels)


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """The parts of a file, by name; their checksums are tested."""
    found, at = [], len(SIGNATURE)
    while at + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if len(body) != size or data[at + 8 + size : at + 12 + size] != struct.pack(">I", zlib.crc32(name + body)):
            raise FileError(f"png: the part {name!r} is damaged", code="F150")
        found.append((name, body))
        at += 12 + size
    return found


def _inflated(packed: bytes, size: int) -> np.ndarray:
    try:
        flat = zlib.decompressobj().decompress(packed, size + 1)
    except zlib.error as error:
        raise FileError(f"png: the pixels are damaged: {error}", code="F150") from None
    if len(flat) != size:
        raise FileError(f"png: there are {len(flat)} bytes of pixels, {size} are needed", code="F150")
    return np.frombuffer(flat, np.uint8)


def _unfiltered(rows: np.ndarray, step: int) -> np.ndarray:
    """Each row is stored as differences from its left neighbour, the row above, or both; `step` bytes are a pixel."""
    result = np.zeros((rows.shape[0] + 1, rows.shape[1] - 1 + step), np.uint8)
    for y, (kind, row) in enumerate(zip(rows[:, 0], rows[:, 1:], strict=True)):
        above, out = result[y], result[y + 1]
        match kind:
            case 0:
                out[step:] = row
            case 1:
                _along(row, out, step)
            case 2:
                out[step:] = row + above[step:]
            case 3 | 4:
                _from_both(int(kind), row.tolist(), above.tolist(), out, step)
            case _:
                raise FileError(f"png: row {y} has the filter {kind}", code="F150")
    return result[1:, step:]


def _along(row: np.ndarray, out: np.ndarray, step: int) -> None:
    for channel in range(step):
        out[step + channel :: step] = np.cumsum(row[channel::step], dtype=np.uint8)


def _from_both(kind: int, row: list[int], above: list[int], out: np.ndarray, step: int) -> None:
    made = [0] * (len(row) + step)
    for i, value in enumerate(row, step):
        left, up, corner = made[i - step], above[i], above[i - step]
        if kind == 3:
            guess = (left + up) // 2
        else:  # whichever of the three is nearest to left + up - corner
            far_left, far_up, far_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
            guess = left if far_left <= min(far_up, far_corner) else up if far_up <= far_corner else corner
        made[i] = (value + guess) & 255
    out[:] = made


def _from_palette(numbers: np.ndarray, chunks: dict[bytes, bytes]) -> np.ndarray:
    colours = np.frombuffer(chunks.get(b"PLTE", b"")[: 256 * 3], np.uint8)
    if not colours.size or colours.size % 3 or int(numbers.max()) >= colours.size // 3:
        raise FileError("png: a pixel has a colour that the palette lacks", code="F150")
    table = np.full((colours.size // 3, 4), 255, np.uint8)
    table[:, :3] = colours.reshape(-1, 3)
    alpha = np.frombuffer(chunks.get(b"tRNS", b"")[: len(table)], np.uint8)
    table[: alpha.size, 3] = alpha
    return table[numbers]


def _on_white(pixels: np.ndarray) -> np.ndarray:
    channels = pixels.shape[2]
    colour = np.repeat(pixels[..., :1], 3, -1) if channels < 3 else pixels[..., :3]
    if channels in (1, 3):
        return np.ascontiguousarray(colour)
    alpha = pixels[..., -1:].astype(np.uint32)
    return ((colour * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def _with_pillow(data: bytes, name: str, most: int) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(data)) as opened:
            if opened.width * opened.height > most:
                raise FileError(f"{name} has {opened.width} x {opened.height} pixels, which are not read", code="F150")
            upright = ImageOps.exif_transpose(opened)
            if upright.mode.startswith("I;16"):  # Pillow cuts off what is above 255
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            if upright.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in upright.info:
                return _on_white(np.asarray(upright.convert("RGBA")))
            return np.asarray(upright.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{name} is not an image that Pillow can read: {error}", code="F150") from None
