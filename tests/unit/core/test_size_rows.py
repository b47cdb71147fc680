"""Sizes as rows: reading gives the size that was written, and equal parts are written once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from strata.core import Dim, SizeReader, SizeWriter, SymExpr, dim_max, dim_min, floordiv, mod, substitute, sym
from strata.errors import ParseError

B, S, M = sym("B", 0, 64), sym("len.of", 1), sym("mod", 2, 9)
SIZES: list[Dim] = [
    0,
    -7,
    B,
    -B,
    3 * B * B * S - S + 5,
    floordiv(B + 63, 64) * S,
    mod(B * S, 5) + mod(S, M + 1),
    dim_min(floordiv(B, 7), dim_max(B - S, 9 * S)),
    floordiv(dim_max(floordiv(B + 3, 4) * M, 1) + 95, 96) * floordiv(B + 3, 4),
]


def test_what_is_read_is_what_was_written() -> None:
    writer = SizeWriter()
    written = [writer.add(d) for d in (*SIZES, *SIZES)]
    read = SizeReader(json.loads(json.dumps(writer.rows)))
    back = [read(w) for w in json.loads(json.dumps(written))]
    assert back == [*SIZES, *SIZES]
    assert [str(d) for d in back] == [str(d) for d in (*SIZES, *SIZES)]
    assert all(a is b for a, b in zip(back[: len(SIZES)], back[len(SIZES) :], strict=True) if isinstance(a, SymExpr))
    binding = {"B": 17, "len.of": 3, "mod": 4}
    assert [substitute(d, binding) for d in back[: len(SIZES)]] == [substitute(d, binding) for d in SIZES]


def test_random_sizes() -> None:
    rng = np.random.default_rng(0)
    sizes: list[Dim] = [B, S, M]
    for _ in range(200):
        a, b = (sizes[int(i)] for i in rng.integers(len(sizes), size=2))
        match rng.integers(6):
            case 0:
                made = a + b
            case 1:
                made = a - 2 * b if len(str(a * b)) < 300 else a
            case 2:
                made = floordiv(a, int(rng.integers(1, 9)))
            case 3:
                made = mod(a, int(rng.integers(1, 9)))
            case 4:
                made = dim_min(a, b)
            case _:
                made = dim_max(a, b)
        if len(str(made)) < 2000:
            sizes.append(made)
    writer = SizeWriter()
    written = [writer.add(d) for d in sizes]
    read = SizeReader(writer.rows)
    assert [read(w) for w in written] == sizes


def test_equal_parts_are_written_once() -> None:
    part: Dim = B
    for n in range(2, 40):  # the text of it has two copies of each part in the next
        part = floordiv(dim_max(part, S * n) + n, n) + floordiv(dim_max(part, S * n), 3)
        if n > 11:
            break
    writer = SizeWriter()
    writer.add(part)
    assert len(writer.rows) < 120
    assert len(str(part)) > 20_000


@pytest.mark.parametrize("rows", [[["other", 1, 2]], [["sum", [1, 0]]], [["sum"], ["floordiv", [5], 1]], [[]]])
def test_damaged_rows(rows) -> None:
    with pytest.raises((ParseError, IndexError, ValueError)):
        SizeReader(rows)


def test_a_symbol_is_not_a_size() -> None:
    with pytest.raises(ParseError):
        SizeReader([["symbol", "B", 0, 64]])([0])
