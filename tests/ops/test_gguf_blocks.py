"""GGUF block formats against the gguf package, bit for bit, and the quality of our encoders."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from strata import ops
from strata.errors import OptionError, ShapeError
from strata.mir import Graph
from strata.ops.quant import gguf_blocks
from strata.ops.quant.gguf_blocks import FORMATS, PACKED, BlockFormat
from strata.ops.quant.gguf_encoders import encode_symmetric
from strata.ops.quant.gguf_fields import BitField, Bits, Factor
from strata.runtime import Session

RNG = np.random.default_rng(5)
K_QUANTS = ["q2k", "q3k", "q4k", "q5k", "q6k", "q8k"]
LEGACY = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]


def kind(name: str) -> Kind:
    return Kind(FORMATS[name].code)


def random_blocks(name: str, rows: int = 6, blocks: int = 3) -> np.ndarray:
    """Random bytes, with finite numbers in the f16 (f32) fields."""
    form = FORMATS[name]
    data = RNG.integers(0, 256, (rows * blocks, form.bytes), np.uint8)
    for factor in filter(None, (form.d, form.m)):
        factor.write(data, RNG.standard_normal(len(data)))
    return data.reshape(rows, -1)


def test_every_type_of_the_package_is_known() -> None:
    held = {form.code for form in FORMATS.values()}
    assert {int(k) for k in quants._type_traits} - {int(Kind.BF16)} <= held


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("q8k", "q1_0")])
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


def half(data: bytes) -> float:
    return float(np.frombuffer(data, "<f2")[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def of_32(name: str, b: bytes) -> list[float]:
    """A block of 32 numbers, one after the other, as the format is described."""
    d, at = half(b[:2]), 2
    if name == "q8_0":
        return [d * signed(q) for q in b[2:]]
    m, at = (half(b[2:4]), 4) if name.endswith("_1") else (None, 2)
    has_fifth = name.startswith("q5")
    fifth = int.from_bytes(b[at : at + 4], "little") if has_fifth else 0
    nibbles = b[at + 4 * has_fifth :]
    codes = [(nibbles[i % 16] >> 4 * (i // 16) & 15) + 16 * (fifth >> i & 1) for i in range(32)]
    return [d * (q - (16 if has_fifth else 8)) if m is None else d * q + m for q in codes]


def six_bits(s: bytes, j: int) -> tuple[int, int]:
    """The scale and the minimum of a part of Q4_K and Q5_K."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def of_256(name: str, b: bytes, e: int) -> float:
    """Number `e` of a block of 256."""
    part, place = divmod(e, 128)
    group, l = divmod(place, 32)
    if name == "q8k":
        return float(np.frombuffer(b[:4], "<f4")[0]) * signed(b[4 + e])
    if name == "q2k":
        scale = b[e // 16]
        return half(b[80:82]) * (scale & 15) * (b[16 + 32 * part + l] >> 2 * group & 3) - half(b[82:]) * (scale >> 4)
    if name == "q3k":
        s, j = b[96:108], e // 16
        scale = (s[j % 8] >> 4 * (j // 8) & 15) + 16 * (s[8 + j % 4] >> 2 * (j // 4) & 3) - 32
        is_set = b[l] >> (4 * part + group) & 1
        return half(b[108:]) * scale * ((b[32 + 32 * part + l] >> 2 * group & 3) - (0 if is_set else 4))
    if name == "q6k":
        code = (
            b[64 * part + l + 32 * (group % 2)] >> 4 * (group // 2) & 15
            | (b[128 + 32 * part + l] >> 2 * group & 3) << 4
        )
        return half(b[208:]) * signed(b[192 + 8 * part + l // 16 + 2 * group]) * (code - 32)
    chunk, sub = e // 64, e // 32
    scale, low = six_bits(b[4:16], sub)
    code = b[(48 if name == "q5k" else 16) + 32 * chunk + l] >> 4 * (sub % 2) & 15
    code += 16 * (b[16 + l] >> sub & 1) if name == "q5k" else 0
    return half(b[:2]) * scale * code - half(b[2:4]) * low


@pytest.mark.parametrize("name", [*LEGACY, *K_QUANTS])
def test_every_block_is_what_its_formula_says(name: str) -> None:
    data = random_blocks(name, rows=3, blocks=1)
    if name == "q6k":
        assert (data[:, 192:208].view(np.int8) < 0).any()
    rows = [row.tobytes() for row in data]
    want = [of_32(name, b) if name in LEGACY else [of_256(name, b, e) for e in range(256)] for b in rows]
    np.testing.assert_allclose(gguf_blocks.decode(data, name), want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


def test_a_description_is_all_that_a_format_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ternary numbers in pairs of bits, which have no entry: arrays, kernels and products read what is described."""
    q = BitField((Bits(2, 0, ((2, 32, 0), (4, 0, 2), (32, 1, 0))),), add=-1)
    monkeypatch.setitem(FORMATS, "tq2_0", BlockFormat("tq2_0", 35, 256, 66, encode_symmetric, Factor(64), q))
    assert FORMATS["tq2_0"].encode is encode_symmetric
    data = random_blocks("tq2_0", rows=5, blocks=2)
    wanted = quants.dequantize(data, kind("tq2_0"))
    np.testing.assert_array_equal(gguf_blocks.decode(data, "tq2_0"), wanted)
    for target in ("cpu", "cpu:avx2", "cpu:baseline"):
        g = Graph("g")
        w, x = g.input("w", data.shape, "u8"), g.input("x", (3, 512))
        weights = ops.dequant_weights(w, scheme="gguf_tq2_0", k=512, n=5)
        made = Session(target).compile(g.outputs(weights, ops.dequant_matmul(x, w, scheme="gguf_tq2_0")))
        rows = RNG.standard_normal((3, 512)).astype(np.float32)
        found, product = made.run(w=data, x=rows)
        np.testing.assert_array_equal(found, wanted.T)
        np.testing.assert_allclose(product, rows @ wanted.T, rtol=0, atol=1e-3 * np.abs(product).max())


@pytest.mark.parametrize("name", [n for n, f in (FORMATS | PACKED).items() if isinstance(f.q, BitField)])
def test_every_bit_of_a_field_has_one_place(name) -> None:
    """Codes that are written come back, and no two numbers share a bit."""
    form = (FORMATS | PACKED)[name]
    taken: set[int] = set()
    for field in filter(None, (form.q, form.scales, form.minima)):
        places = [part.places(range(field.count)) for part in field.bits]
        bits = [8 * byte + bit + i for part, found in zip(field.bits, places, strict=True)
                for byte, bit in zip(*found, strict=True) for i in range(part.width)]  # fmt: skip
        assert len(set(bits)) == len(bits) == field.count * sum(part.width for part in field.bits)
        assert taken.isdisjoint(bits)
        assert max(bits) < 8 * form.bytes
        taken.update(bits)
        codes = RNG.integers(0, field.levels, (7, field.count)).astype(np.uint8)
        blocks = np.zeros((7, form.bytes), np.uint8)
        field.write(blocks, codes)
        np.testing.assert_array_equal(field.codes(blocks), codes)
        if not field.values and not field.float8:
            numbers = codes.view(np.int8) if field.is_signed else codes
            np.testing.assert_array_equal(field.read(blocks), numbers.astype(np.float32) * field.times + field.add)


def test_mistakes() -> None:
    with pytest.raises(OptionError, match="'q9_0' is not one of"):
        gguf_blocks.decode(np.zeros(18, np.uint8), "q9_0")
    with pytest.raises(ShapeError, match="multiples of 18 bytes"):
        gguf_blocks.decode(np.zeros(17, np.uint8), "q4_0")
    with pytest.raises(ShapeError, match="multiples of 256 elements"):
        gguf_blocks.encode(np.zeros(32, np.float32), "q4k")
