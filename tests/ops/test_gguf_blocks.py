"""GGUF block formats against the gguf package, bit for bit, and the quality of our encoders."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from strata.errors import OptionError, ShapeError
from strata.ops.quant import gguf_blocks
from strata.ops.quant.gguf_blocks import FORMATS

RNG = np.random.default_rng(5)
K_QUANTS = ["q2k", "q3k", "q4k", "q5k", "q6k", "q8k"]
LEGACY = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]


def kind(name: str) -> Kind:
    return Kind(FORMATS[name].code)


def random_blocks(name: str, rows: int = 6, blocks: int = 3) -> np.ndarray:
    """Random bytes, with finite numbers in the f16 (f32) fields."""
    form = FORMATS[name]
    data = RNG.integers(0, 256, (rows * blocks, form.bytes), np.uint8)
    offsets = {"q2k": [80, 82], "q3k": [108], "q6k": [208], "q8k": [], "q4_0": [0], "q5_0": [0], "q8_0": [0]}.get(
        name, [0, 2]
    )
    for offset in offsets:
        data[:, offset : offset + 2] = RNG.standard_normal((len(data), 1)).astype("<f2").view(np.uint8)
    if name == "q8k":
        data[:, :4] = RNG.standard_normal((len(data), 1)).astype("<f4").view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "q8k"])
def test_case_103_decoders_equal_the_gguf_package_bit_for_bit(name) -> None:
    assert (FORMATS[name].elements, FORMATS[name].bytes) == gguf.GGML_QUANT_SIZES[kind(name)]
    data = random_blocks(name)
    np.testing.assert_array_equal(gguf_blocks.decode(data, name), quants.dequantize(data, kind(name)))


def test_q8_k_is_scale_times_quants() -> None:
    data = random_blocks("q8k")
    blocks = data.reshape(-1, 292)
    want = blocks[:, :4].copy().view("<f4") * blocks[:, 4:260].view(np.int8)
    np.testing.assert_array_equal(gguf_blocks.decode(data, "q8k").reshape(-1, 256), want)


@pytest.mark.parametrize("name", LEGACY)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_legacy_encoders_equal_the_gguf_package(name, scale) -> None:
    x = (RNG.standard_normal((5, 96)) * scale).astype(np.float32)
    np.testing.assert_array_equal(gguf_blocks.encode(x, name), quants.quantize(x, kind(name)))


@pytest.mark.parametrize(("name", "bound"), list(zip(K_QUANTS, [0.30, 0.16, 0.075, 0.038, 0.019, 0.008], strict=True)))
def test_k_quant_encoders_are_close(name, bound) -> None:
    x = RNG.standard_normal((8, 1024)).astype(np.float32)
    y = gguf_blocks.decode(gguf_blocks.encode(x, name), name)
    assert np.sqrt(np.mean((x - y) ** 2) / np.mean(x**2)) < bound
    zero = np.zeros((1, 256), np.float32)
    np.testing.assert_array_equal(gguf_blocks.decode(gguf_blocks.encode(zero, name), name), zero)
    again = gguf_blocks.encode(y, name)
    assert np.abs(gguf_blocks.decode(again, name) - y).max() < 0.2 * np.abs(x).max()


def test_case_73_hand_made_blocks() -> None:
    half = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    q8 = np.concatenate([half, np.arange(-16, 16, dtype=np.int8).view(np.uint8)])
    np.testing.assert_array_equal(gguf_blocks.decode(q8, "q8_0"), 0.5 * np.arange(-16, 16))
    q4 = np.concatenate([one, np.array([i | i << 4 for i in range(16)], np.uint8)])
    np.testing.assert_array_equal(gguf_blocks.decode(q4, "q4_0"), np.tile(np.arange(-8, 8), 2))
    q4k = np.concatenate(
        [one, np.zeros(2, np.uint8), np.array([1] * 4 + [0] * 8, np.uint8), np.full(128, 0x77, np.uint8)]
    )
    np.testing.assert_array_equal(gguf_blocks.decode(q4k, "gguf_q4k")[:128], 7)
    q6k = np.concatenate([np.zeros(128, np.uint8), np.full(64, 0b10101010, np.uint8), np.ones(16, np.uint8), one])
    np.testing.assert_array_equal(gguf_blocks.decode(q6k, "q6_k"), 0)
    q2k = np.concatenate([np.ones(16, np.uint8), np.full(64, 255, np.uint8), one, np.zeros(2, np.uint8)])
    np.testing.assert_array_equal(gguf_blocks.decode(q2k, "q2k"), 3)
    q8k = np.concatenate(
        [np.frombuffer(np.float32(0.25).tobytes(), np.uint8), np.full(256, 4, np.uint8), np.zeros(32, np.uint8)]
    )
    np.testing.assert_array_equal(gguf_blocks.decode(q8k, "q8k"), 1)


def test_mistakes() -> None:
    with pytest.raises(OptionError, match="'q9_0' is none of"):
        gguf_blocks.decode(np.zeros(18, np.uint8), "q9_0")
    with pytest.raises(ShapeError, match="multiples of 18 bytes"):
        gguf_blocks.decode(np.zeros(17, np.uint8), "q4_0")
    with pytest.raises(ShapeError, match="multiples of 256 elements"):
        gguf_blocks.encode(np.zeros(32, np.float32), "q4k")
