"""Philox against the published test vectors, and the distributions against their moments."""

import numpy as np
import pytest
import scipy.stats

from strata import ops
from strata.core import f32, i64, u32
from strata.errors import DTypeError, OptionError, ShapeError
from strata.mir import batch, evaluate_values, placeholder
from strata.ops import random
from strata.ops.random import philox4x32


def value(x):
    return evaluate_values([x], {}, {})[0]


# known answers of Random123's philox4x32 with 10 rounds: counter, key, result
VECTORS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "want"), VECTORS)
def test_published_vectors(counter, key, want) -> None:
    np.testing.assert_array_equal(philox4x32(tuple(counter), tuple(key)), want)


def test_stream_counts_blocks_from_zero() -> None:
    words = value(ops.random_bits(random.key(0), (10,)))
    assert words[:4].tolist() == VECTORS[0][2]
    later = value(ops.random_bits(random.key(0), (6,), counter=1))
    np.testing.assert_array_equal(later, words[4:])


def test_case_76_streams_and_moments() -> None:
    a, again, b = (value(ops.random_bits(random.key(s), (16,))) for s in (1, 1, 2))
    np.testing.assert_array_equal(a, again)
    assert np.sum(a != b) >= 14
    u = value(random.uniform(random.key(3), (10_000,)))
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.02
    z = value(random.normal(random.key(4), (10_000,)))
    assert abs(z.mean()) < 0.1
    assert abs(z.std() - 1) < 0.05
    assert scipy.stats.kstest(z, "norm").pvalue > 1e-3


def test_seed_is_the_key() -> None:
    assert value(random.key(2**40 + 5)).tolist() == [5, 256]
    assert value(random.key(-1)).tolist() == [0xFFFFFFFF] * 2
    number = placeholder("s", i64[()])
    got = evaluate_values([random.key(number)], {number: np.int64(2**40 + 5)}, {})[0]
    assert got.tolist() == [5, 256]
    with pytest.raises(OptionError, match="a seed is an integer"):
        random.key(1.5)
    with pytest.raises(DTypeError, match=r"a key is u32\[2\]"):
        random.uniform(np.zeros(2), (3,))


def test_split_and_fold_give_unrelated_keys() -> None:
    root = random.key(0)
    keys = [
        value(random.split(root, 4)),
        value(random.fold_in(root, 0))[None],
        value(random.fold_in(root, 1))[None],
        value(root)[None],
    ]
    rows = {tuple(k) for k in np.concatenate(keys)}
    assert len(rows) == 7
    drawn = set(value(ops.random_bits(root, (64,))).tolist())
    assert not drawn & {int(w) for row in rows for w in row} - {0}
    streams = [value(random.uniform(k, (1000,))) for k in np.concatenate(keys)]
    assert np.abs(np.corrcoef(streams) - np.eye(7)).max() < 0.15


def test_vmap_is_a_batch_of_keys() -> None:
    k, ks = placeholder("k", u32[2]), placeholder("ks", u32[3, 2])
    keys = value(random.split(random.key(1), 3))
    for fn in (lambda k: random.normal(k, (4,)), lambda k: random.fold_in(k, 7), lambda k: random.permutation(k, 5)):
        (got,) = evaluate_values(batch([fn(k)], {k: ks}, 3), {ks: keys}, {})
        for i in range(3):
            np.testing.assert_array_equal(got[i], evaluate_values([fn(k)], {k: keys[i]}, {})[0])


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_uniform_never_reaches_the_upper_end(dtype) -> None:
    u = value(random.uniform(random.key(9), (4000,), dtype)).astype(np.float64)
    assert u.max() < 1
    assert u.min() >= 0
    assert abs(u.mean() - 0.5) < 0.03
    v = value(random.uniform(random.key(9), (1000,), dtype, low=-2, high=6)).astype(np.float64)
    assert abs(v.mean() - 2) < 0.4


def test_integers() -> None:
    got = value(random.randint(random.key(5), (3000,), -2, 4))
    assert got.dtype == np.int32
    counts = np.bincount(got + 2, minlength=6)
    assert len(counts) == 6
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    wide = value(random.randint(random.key(5), (1000,), 0, 2**60, i64))
    assert wide.min() >= 0
    assert wide.max() < 2**60
    assert abs(wide.mean() / 2**59 - 1) < 0.1
    words = value(ops.random_bits(random.key(5), (1000, 2))).astype(object)
    exact = [(int(a) * 2**32 + int(b)) * 2**60 >> 64 for a, b in words]
    assert wide.tolist() == exact
    with pytest.raises(OptionError, match="empty"):
        random.randint(random.key(0), (2,), 3, 3)


def test_draws_follow_their_distribution() -> None:
    flips = value(random.bernoulli(random.key(6), 0.3, (5000,)))
    assert abs(flips.mean() - 0.3) < 0.03
    logits = np.log(np.array([0.1, 0.2, 0.7]))
    ids = value(random.categorical(random.key(7), logits, shape=(5000,)))
    np.testing.assert_allclose(np.bincount(ids, minlength=3) / 5000, [0.1, 0.2, 0.7], atol=0.03)
    assert value(random.categorical(random.key(7), np.zeros((2, 3, 4)), axis=1)).shape == (2, 4)
    with pytest.raises(ShapeError, match="axis 2 does not exist in 2 dimensions"):
        random.categorical(random.key(7), np.zeros((2, 3)), axis=2)
    assert scipy.stats.kstest(value(random.exponential(random.key(8), (5000,))), "expon").pvalue > 1e-3
    assert scipy.stats.kstest(value(random.gumbel(random.key(8), (5000,))), "gumbel_r").pvalue > 1e-3


def test_permutation() -> None:
    order = value(random.permutation(random.key(1), 100))
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() != list(range(100))
    rows = np.arange(12).reshape(6, 2)
    mixed = value(random.permutation(random.key(1), rows))
    assert sorted(map(tuple, mixed)) == list(map(tuple, rows))


def test_dropout_keeps_the_mean() -> None:
    x = placeholder("x", f32[4000])
    y = evaluate_values([ops.dropout(x, random.key(1), 0.25)], {x: np.ones(4000, np.float32)}, {})[0]
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert abs(y.mean() - 1) < 0.05
    assert ops.dropout(x, random.key(1), 0.0).same_as(x)
    with pytest.raises(OptionError, match=r"rate 1\.5"):
        ops.dropout(x, random.key(1), 1.5)
