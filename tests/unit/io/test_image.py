"""PNG files, read without Pillow and compared with it; damaged ones are refused."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from strata.errors import FileError
from strata.io import load_image
from strata.io.image import SIGNATURE, decode_png


def png(rows: list[bytes], width: int, depth: int, colour: int, **chunks: bytes) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, len(rows), depth, colour, 0, 0, 0)
    parts = [(b"IHDR", head), *((n.encode(), b) for n, b in chunks.items()), (b"IDAT", zlib.compress(b"".join(rows)))]
    return SIGNATURE + b"".join(chunk(n, b) for n, b in [*parts, (b"IEND", b"")])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("size", [(1, 1), (7, 3), (64, 33)])
def test_agrees_with_pillow(mode: str, size: tuple[int, int], tmp_path: Path, rng: np.random.Generator) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="the files are written by Pillow")
    smooth = np.add.outer(np.arange(size[1]) * 5, np.arange(size[0]) * 3)[..., None] % 256
    pixels = np.where(rng.random((size[1], size[0], 4)) < 0.3, rng.integers(0, 256, 4), smooth).astype(np.uint8)
    image = image_module.fromarray(pixels, "RGBA").convert(mode)
    image.save(tmp_path / "x.png")
    white = image_module.new("RGBA", size, "white")
    white.alpha_composite(image.convert("RGBA"))
    found = load_image(tmp_path / "x.png")
    assert (found.shape, found.dtype) == ((size[1], size[0], 3), np.uint8)
    np.testing.assert_allclose(found.astype(int), np.asarray(white.convert("RGB")).astype(int), atol=1)


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize(("colour", "step"), [(0, 1), (2, 3), (6, 4)])
def test_every_filter(kind: int, colour: int, step: int, rng: np.random.Generator) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="Pillow is the judge")
    rows = [bytes([kind]) + rng.integers(0, 256, 9 * step, np.uint8).tobytes() for _ in range(6)]
    data = png(rows, 9, 8, colour)
    opened = image_module.open(io.BytesIO(data))
    found = decode_png(data)
    if colour == 6:
        white = image_module.new("RGBA", opened.size, "white")
        white.alpha_composite(opened)
        opened = white
    np.testing.assert_allclose(found.astype(int), np.asarray(opened.convert("RGB")).astype(int), atol=1)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_grey_of_few_bits(depth: int) -> None:
    values = np.arange(5) % (1 << depth)
    bits = "".join(f"{v:0{depth}b}" for v in values)
    row = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8))
    found = decode_png(png([b"\0" + row] * 2, 5, depth, 0))
    np.testing.assert_array_equal(found[1, :, 2], values * 255 // ((1 << depth) - 1))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (SIGNATURE, "does not begin with its header"),
        (png([b"\0\1"], 1, 16, 0), "with 16 bits"),
        (png([b"\0\1"], 1, 8, 5), "colour type 5"),
        (png([b"\7\1"], 1, 8, 0), "the filter 7"),
        (png([b"\0\1\2"], 1, 8, 0), "bytes of pixels"),
        (png([b"\0"], 1, 8, 0), "bytes of pixels"),
        (png([b"\0\3"], 1, 8, 3, PLTE=b"\1\2\3"), "that the palette lacks"),
        (png([b"\0\0"], 1, 8, 3), "that the palette lacks"),
        (png([b"\0" + bytes(4)], 1 << 30, 8, 0), "pixels is not read"),
        (png([], 4, 8, 0), "pixels is not read"),
    ],
)
def test_what_cannot_be_read_is_told(data: bytes, told: str) -> None:
    with pytest.raises(FileError, match=told):
        decode_png(data)


def test_mutants_are_refused_or_read(seed: int) -> None:
    rng = random.Random(seed)
    whole = png([bytes([i % 5]) + bytes(range(i, i + 24)) for i in range(8)], 8, 8, 2)
    refused = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(8, len(data))] = rng.randrange(256)
        try:
            assert decode_png(bytes(data[: rng.randrange(8, len(data) + 1)])).shape[2] == 3
        except FileError:
            refused += 1
    assert refused > 400


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff"])
def test_photos_are_turned_upright(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="the files are written by Pillow")
    smooth = np.add.outer(np.arange(16) * 9, np.arange(24) * 3).astype(np.uint8)
    for orientation, upright in ((3, smooth[::-1, ::-1]), (6, np.rot90(smooth, -1)), (8, np.rot90(smooth))):
        image = image_module.fromarray(np.stack([smooth] * 3, -1))
        exif = image_module.Exif()
        exif[274] = orientation
        image.save(tmp_path / f"x.{kind}", exif=exif, quality=100)
        found = load_image(tmp_path / f"x.{kind}")
        assert found.shape == (*upright.shape, 3)
        np.testing.assert_allclose(found[..., 0].astype(int), upright.astype(int), atol=8)


def test_png_of_other_kinds_is_read_by_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bits a channel, and interlaced pixels."""
    pytest.importorskip("PIL.Image", reason="other kinds are read by Pillow")
    row = struct.pack(">3H", 0, 0x8000, 0xFFFF)
    (tmp_path / "deep.png").write_bytes(png([b"\0" + row] * 2, 3, 16, 0))
    np.testing.assert_array_equal(load_image(tmp_path / "deep.png")[1, :, 0], [0, 128, 255])
    data = bytearray(png([b"\0\7", b"\0\7"], 1, 8, 0))  # one pixel wide: passes 1 and 7 hold all
    data[28] = 1
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (tmp_path / "laced.png").write_bytes(data)
    np.testing.assert_array_equal(load_image(tmp_path / "laced.png"), np.full((2, 1, 3), 7))
    monkeypatch.setattr("strata.io.image.find_spec", lambda name: None)
    with pytest.raises(FileError, match="with 16 bits"):
        load_image(tmp_path / "deep.png")


@pytest.mark.parametrize(("kind", "mode"), [("webp", "RGBA"), ("gif", "RGBA"), ("tiff", "LA"), ("png", "LA")])
def test_what_is_transparent_is_white_in_all_kinds(kind: str, mode: str, tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="the files are written by Pillow")
    pixels = np.zeros((4, 6, len(mode)), np.uint8)
    pixels[:, :3, -1] = 255
    options = {"lossless": True} if kind == "webp" else {}
    image_module.fromarray(pixels, mode).save(tmp_path / f"x.{kind}", **options)
    found = load_image(tmp_path / f"x.{kind}")
    np.testing.assert_array_equal(found[:, :3], 0)
    np.testing.assert_array_equal(found[:, 3:], 255)


def test_other_kinds_go_to_pillow_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="other kinds are read by Pillow")
    image_module.new("L", (4, 2), 200).save(tmp_path / "x.bmp")
    np.testing.assert_array_equal(load_image(tmp_path / "x.bmp"), np.full((2, 4, 3), 200))
    (tmp_path / "y.jpg").write_bytes(b"no image")
    with pytest.raises(FileError, match="not an image that Pillow can read"):
        load_image(tmp_path / "y.jpg")
    monkeypatch.setattr("strata.io.image.find_spec", lambda name: None)
    with pytest.raises(FileError, match="need the package pillow"):
        load_image(tmp_path / "x.bmp")
