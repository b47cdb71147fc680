"""Random numbers from explicit keys: Philox-4x32-10, counter-based, the same on every device.

A key is u32[2]: (seed low, seed high). Word i of a draw is word i mod 4 of block i // 4; the 128-bit counter of a block
is (block low, block high, 0, domain). Domain 0 holds drawn numbers; domains 1 and 2 hold new keys, so that a key that
has been split or folded shares no block with the numbers drawn from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strata.core import (
    Dim,
    DType,
    TensorType,
    as_dtype,
    bf16,
    f16,
    f32,
    f64,
    i32,
    i64,
    located,
    normalize_axis,
    u32,
    u64,
)
from strata.errors import DTypeError, OptionError
from strata.mir import Op, Sample, Value, constant, function, op
from strata.ops.base.creation import zeros_like
from strata.ops.base.elementwise import maximum
from strata.ops.base.frontend import Operand, as_value, full_shape, promoted, same_shape
from strata.ops.base.movement import broadcast_to, narrow, reshape, stack
from strata.ops.elementwise.logic import cast, where
from strata.ops.elementwise.math import cos, log, sqrt
from strata.ops.indexing.indexing import take
from strata.ops.indexing.sorting import argmax, argsort

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and the square root of 3, minus 1, as fractions of 2 ** 32
ROUNDS = 10
DRAW, FOLD, SPLIT = 0, 1, 2  # domains


def philox4x32(counter: tuple[Any, ...], key: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    """Four words for each counter of four words and key of two, by arrays that broadcast."""
    mask, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = (np.asarray(k, np.uint64) for k in key)
    for _ in range(ROUNDS):
        first, second = np.uint64(MULTIPLIERS[0]) * c0, np.uint64(MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (second >> high) ^ c1 ^ k0, second & mask, (first >> high) ^ c3 ^ k1, first & mask
        k0, k1 = (k0 + np.uint64(KEY_STEPS[0])) & mask, (k1 + np.uint64(KEY_STEPS[1])) & mask
    return tuple(c.astype(np.uint32) for c in (c0, c1, c2, c3))


@op("random_bits")
class RandomBits(Op):
    """32-bit words of the stream of a key u32[.., 2]: [.., *shape]. An optional u64[..] says which block comes
    first."""

    shape: tuple[Dim, ...]
    domain: int = DRAW

    rounds: ClassVar[int] = ROUNDS
    multipliers: ClassVar[tuple[int, int]] = MULTIPLIERS
    key_steps: ClassVar[tuple[int, int]] = KEY_STEPS

    differentiable = False
    dtypes = (u32,)

    def infer(self, key: TensorType, *first: TensorType) -> TensorType:
        self.require_dtype(key.dtype is u32, f"a key is u32[2], got {key}", code="D222")
        self.require(key.ndim >= 1 and key.shape[-1] == 2, f"a key is u32[2], got {key}", code="S272")
        self.require(len(first) <= 1, f"takes a key and a counter, got {1 + len(first)} inputs", code="S273")
        for counter in first:
            ok = counter.dtype is u64 and same_shape(counter.shape, key.shape[:-1])
            self.require(ok, f"the counter of {key} is u64{list(key.shape[:-1])}, got {counter}", code="S273")
        return TensorType(u32, (*key.shape[:-1], *self.shape))

    def numpy(self, key: np.ndarray, *first: np.ndarray) -> np.ndarray:
        shape = tuple(int(d) for d in self.shape)
        count = int(np.prod(shape))
        block = np.arange(-(-count // 4), dtype=np.uint64)
        if first:
            block = first[0][..., None] + block
        counter = (block & np.uint64(0xFFFFFFFF), block >> np.uint64(32), 0, self.domain)
        words = np.stack(philox4x32(counter, (key[..., :1], key[..., 1:])), -1)
        flat = words.reshape((*key.shape[:-1], 4 * words.shape[-2]))
        return flat[..., :count].reshape((*key.shape[:-1], *shape))

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(*(x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(inputs, batched, strict=True)))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        lead = len(inputs[0].shape) - 1
        at, inner = index[:lead], index[lead:]
        position = k.flatten(inner, self.shape)
        mask, high = k.const(0xFFFFFFFF, u64), k.const(32, u64)
        block = k.cast(k.floordiv(position, k.index(4)), u64)
        if len(inputs) > 1:
            block = block + inputs[1][at]
        c0, c1, c2, c3 = k.and_(block, mask), k.shr(block, high), k.const(0, u64), k.const(self.domain, u64)
        k0, k1 = (k.cast(inputs[0][(*at, k.index(i))], u64) for i in (0, 1))
        for _ in range(ROUNDS):
            first, second = k.const(MULTIPLIERS[0], u64) * c0, k.const(MULTIPLIERS[1], u64) * c2
            c0, c2 = k.xor(k.xor(k.shr(second, high), c1), k0), k.xor(k.xor(k.shr(first, high), c3), k1)
            c1, c3 = k.and_(second, mask), k.and_(first, mask)
            k0, k1 = k.and_(k0 + k.const(KEY_STEPS[0], u64), mask), k.and_(k1 + k.const(KEY_STEPS[1], u64), mask)
        word = k.mod(position, k.index(4))
        low = k.select(k.eq(word, k.index(0)), c0, c1)
        return k.cast(k.select(k.lt(word, k.index(2)), low, k.select(k.eq(word, k.index(2)), c2, c3)), u32)

    @classmethod
    def samples(cls) -> list[Sample]:
        keys = np.array([[0, 0], [7, 9], [0xFFFFFFFF, 0xFFFFFFFF]], np.uint32)
        far = np.array([3, 2**32 - 1, 2**63], np.uint64)
        return [
            Sample(keys[1], shape=(3, 5)), Sample(keys[0], shape=()), Sample(keys[0], shape=(0,)),
            Sample(keys, shape=(6,)),
            Sample(keys, far, shape=(2, 3)), Sample(keys[2], far[1], shape=(9,), domain=SPLIT),
        ]  # fmt: skip


@function()
def random_bits(key: Operand, shape: Any = (), *, counter: Operand | None = None) -> Value:
    """Uniform 32-bit words from a key; `counter` skips that many blocks of four words."""
    inputs = [_key(key, "random_bits")]
    if counter is not None:
        inputs.append(cast(as_value(counter), u64))
    return RandomBits(full_shape(shape))(*inputs)


def _key(x: Operand, what: str) -> Value:
    value = as_value(x)
    if value.dtype is not u32 or value.ndim < 1 or value.shape[-1] != 2:
        raise DTypeError(f"{what}: a key is u32[2], got {value.type}", code="D222", fix="random.key(seed)")
    return value


# ----------------------------------------------------------------------------------------------------------------- keys


@located
def key(seed: int | Value) -> Value:
    """The key of a seed: its low and high 32 bits."""
    if isinstance(seed, Value):
        wide = cast(seed, u64)
        return stack([cast(wide & constant(0xFFFFFFFF, u64), u32), cast(wide >> constant(32, u64), u32)], -1)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise OptionError(f"random.key: a seed is an integer, got {seed!r}", code="O233")
    number = int(seed) % 2**64
    return constant(np.array([number & 0xFFFFFFFF, number >> 32], np.uint32))


@located
def split(key: Operand, count: int = 2) -> Value:
    """`count` new keys [count, 2], independent of each other and of what is drawn from `key`."""
    parent = _key(key, "random.split")
    return RandomBits((*full_shape(count), 2), SPLIT)(parent)


@located
def fold_in(key: Operand, data: Operand) -> Value:
    """A new key for each number: a step, a layer, a row."""
    parent, number = _key(key, "random.fold_in"), as_value(data)
    if not number.dtype.is_int:
        raise DTypeError(f"random.fold_in: needs an integer, got {number.type}", code="D223")
    counter = broadcast_to(cast(number, u64), parent.shape[:-1]) if number.ndim < parent.ndim else cast(number, u64)
    parent = broadcast_to(parent, (*counter.shape, 2))
    return RandomBits((2,), FOLD)(parent, counter)


# -------------------------------------------------------------------------------------------------------- distributions

_PRECISION = {f16: 11, bf16: 8, f32: 24, f64: 53}


def _unit(key: Value, shape: tuple[Dim, ...], dtype: DType) -> Value:
    """Uniform multiples of 2 ** -p in [0, 1), where p is the precision of the dtype."""
    if dtype not in _PRECISION:
        raise DTypeError(f"random: {dtype} is not f16, bf16, f32 or f64", code="D224")
    bits = _PRECISION[dtype]
    if dtype is f64:
        words = cast(RandomBits((*shape, 2))(key), u64)
        high, low = (reshape(narrow(words, -1, i, 1), words.shape[:-1]) for i in (0, 1))
        whole = ((high >> constant(5, u64)) << constant(26, u64)) | (low >> constant(6, u64))
        return cast(whole, f64) * 2.0**-53
    word = RandomBits(shape)(key)
    return cast(cast(word >> constant(32 - bits, u32), f32) * 2.0**-bits, dtype)


def _positive(u: Value) -> Value:
    """In (0, 1): half a step in place of 0, where a logarithm would give an outlier."""
    return maximum(u, constant(0.5 * 2.0 ** -_PRECISION[u.dtype], u.dtype))


@located
def uniform(key: Operand, shape: Any = (), dtype: Any = f32, low: Operand = 0.0, high: Operand = 1.0) -> Value:
    """Uniform numbers in [low, high)."""
    unit = _unit(_key(key, "random.uniform"), full_shape(shape), as_dtype(dtype))
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and (low, high) == (0, 1):
        return unit
    a, b = (cast(as_value(x, unit.dtype), unit.dtype) for x in (low, high))
    return a + unit * (b - a)


@located
def normal(key: Operand, shape: Any = (), dtype: Any = f32) -> Value:
    """Standard normal numbers: the cosine branch of Box and Muller."""
    kind = as_dtype(dtype)
    wide = f64 if kind is f64 else f32
    pairs = _unit(_key(key, "random.normal"), (*full_shape(shape), 2), wide)
    first, second = (reshape(narrow(pairs, -1, i, 1), pairs.shape[:-1]) for i in (0, 1))
    return cast(sqrt(log(_positive(first)) * -2.0) * cos(second * (2 * np.pi)), kind)


@located
def exponential(key: Operand, shape: Any = (), dtype: Any = f32) -> Value:
    """Exponential numbers of mean 1."""
    return -log(_positive(uniform(key, shape, dtype)))


@located
def gumbel(key: Operand, shape: Any = (), dtype: Any = f32) -> Value:
    """Standard Gumbel numbers: logits plus these have their maximum where a categorical draw falls."""
    return -log(-log(_positive(uniform(key, shape, dtype))))


@located
def randint(key: Operand, shape: Any, low: Operand, high: Operand, dtype: Any = i32) -> Value:
    """Integers in low .. high - 1: the top of a 64-bit word times the span, so that no value is favoured noticeably."""
    kind = as_dtype(dtype)
    if not kind.is_int:
        raise DTypeError(f"random.randint: {kind} is not an integer type", code="D223")
    if isinstance(low, (int, np.integer)) and isinstance(high, (int, np.integer)) and low >= high:
        raise OptionError(f"random.randint: the range {low} .. {high} is empty", code="O234")
    words = cast(RandomBits((*full_shape(shape), 2))(_key(key, "random.randint")), u64)
    top, bottom = (reshape(narrow(words, -1, i, 1), words.shape[:-1]) for i in (0, 1))
    start, stop = (cast(as_value(x), i64) for x in (low, high))
    return cast(cast(_high_product(top, bottom, cast(stop - start, u64)), i64) + start, kind)


def _high_product(top: Value, bottom: Value, span: Value) -> Value:
    """The upper 64 bits of (top, bottom) · span, from products of 32-bit halves."""
    shift, mask = constant(32, u64), constant(0xFFFFFFFF, u64)
    low, high = span & mask, span >> shift
    middle = top * low + ((bottom * low) >> shift)
    cross = bottom * high + (middle & mask)
    return top * high + (middle >> shift) + (cross >> shift)


@located
def bernoulli(key: Operand, p: Operand = 0.5, shape: Any = None) -> Value:
    """True with probability p."""
    chance = as_value(p)
    wide = chance.dtype if chance.dtype in _PRECISION else f32
    return uniform(key, chance.shape if shape is None else shape, wide) < cast(chance, wide)


@located
def categorical(key: Operand, logits: Operand, axis: int = -1, shape: Any = None) -> Value:
    """Ids drawn with probability softmax(logits) along an axis; `shape` is that of the result, which logits broadcast
    to."""
    values = as_value(logits)
    values = cast(values, f32 if not values.dtype.is_float else values.dtype.accumulator)
    at = normalize_axis(axis, values.ndim, "random.categorical")
    if shape is not None:
        plain = full_shape(shape)
        behind = values.ndim - 1 - at
        full = (*plain[: len(plain) - behind], values.shape[at], *plain[len(plain) - behind :])
        values, at = broadcast_to(values, full), len(plain) - behind
    return argmax(values + gumbel(key, values.shape, values.dtype), at)


@located
def permutation(key: Operand, x: Operand | int, axis: int = 0) -> Value:
    """The numbers 0 .. x - 1, or the rows of x, in random order."""
    number = int(x) if isinstance(x, (int, np.integer)) and not isinstance(x, bool) else None
    rows = as_value(x)
    count = rows.shape[normalize_axis(axis, rows.ndim, "random.permutation")] if number is None else number
    words = cast(RandomBits((count, 2))(_key(key, "random.permutation")), u64)
    top, bottom = (reshape(narrow(words, -1, i, 1), (count,)) for i in (0, 1))
    order = argsort((top << constant(32, u64)) | bottom, 0)
    return order if number is not None else take(rows, order, axis=axis)


@function()
def dropout(x: Operand, key: Operand, rate: float = 0.5) -> Value:
    """x with each element zero with probability `rate`, and the others scaled so that the mean stays."""
    (value,) = promoted(x)
    if not 0 <= rate <= 1:
        raise OptionError(f"dropout: the rate {rate} is not in 0..1", code="O235")
    if rate in (0, 1):
        return value if rate == 0 else zeros_like(value)
    keep = uniform(key, value.shape) < 1.0 - rate
    return where(keep, value * (1.0 / (1.0 - rate)), constant(0, value.dtype))


__all__ = [
    "bernoulli", "categorical", "dropout", "exponential", "fold_in", "gumbel", "key", "normal", "permutation",
    "randint", "random_bits", "split", "uniform",
]  # fmt: skip
