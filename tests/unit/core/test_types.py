"""strata/core/types.py: tensor types and the shape rules that many ops share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core import (
    TensorType,
    broadcast_dims,
    broadcast_shapes,
    check_shape,
    f16,
    f32,
    i8,
    normalize_axes,
    normalize_axis,
    num_elements,
    sym,
)
from strata.errors import OptionError, ShapeError, SymbolError

S, T = sym("S"), sym("T")
shapes = st.lists(st.sampled_from([0, 1, 2, 3]), max_size=4).map(tuple)


def test_text() -> None:
    assert str(f32[4, S + 1]) == "f32[4, S + 1]"
    assert str(f32[()]) == "f32[]"
    assert str(f32[3]) == "f32[3]"


def test_equality_and_hash() -> None:
    assert f32[4, S] == TensorType(f32, (4, sym("S")))
    assert f32[4] != f16[4]
    assert f32[4] != f32[4, 1]
    assert len({f32[4, S], f32[4, sym("S")]}) == 1


def test_any_sequence_of_sizes_becomes_a_tuple_of_ints() -> None:
    made = TensorType(f32, [2, np.int64(3)])  # type: ignore[arg-type]  # what callers pass
    assert made == f32[2, 3]
    assert hash(made) == hash(f32[2, 3])
    assert hash(TensorType(f32, [2, 3])) == hash(f32[2, 3])  # type: ignore[arg-type]
    assert all(type(d) is int for d in made.shape)


@pytest.mark.parametrize("size", [-1, 1.0, True, "2", None])
def test_not_a_size(size: object) -> None:
    with pytest.raises(ShapeError, match=r"is not a size   \[S101\]"):
        TensorType(f32, (2, size))  # type: ignore[arg-type]
    with pytest.raises(ShapeError):
        check_shape([size])


def test_counts() -> None:
    assert (f32[2, 3].ndim, f32[2, 3].size, f32[2, 3].nbytes) == (2, 6, 24)
    assert (f32[()].size, f32[0, 5].size) == (1, 0)
    assert f16[S, 4].nbytes == 8 * S
    assert num_elements((2, 3)) == 6
    assert num_elements((2, S)) is None


def test_static() -> None:
    assert f32[2, 3].is_static
    assert f32[2, 3].static_shape == (2, 3)
    assert not f32[2, S].is_static
    with pytest.raises(SymbolError, match="the size S is symbolic"):
        _ = f32[2, S].static_shape


def test_derived_types() -> None:
    x = f32[2, S, 4]
    assert x.with_dtype(i8) == i8[2, S, 4]
    assert x.with_shape([S]) == f32[S]
    assert x.drop(1) == f32[2, 4]
    assert x.drop(0, 2) == f32[S]
    assert x.bind({"S": 7}) == f32[2, 7, 4]
    assert set(f32[S, S + T].symbols()) == {"S", "T"}


# ---- broadcasting


@given(st.lists(shapes, min_size=1, max_size=3))
def test_broadcasting_is_numpys(all_shapes: list[tuple[int, ...]]) -> None:
    try:
        expected = np.broadcast_shapes(*all_shapes)
    except ValueError:
        with pytest.raises(ShapeError, match="do not broadcast"):
            broadcast_shapes(*all_shapes)
    else:
        assert broadcast_shapes(*all_shapes) == expected


def test_broadcasting_symbols() -> None:
    assert broadcast_shapes((S, 1), (4,)) == (S, 4)
    assert broadcast_shapes((S,), (S,)) == (S,)
    assert broadcast_shapes((S,), (1,)) == (S,)
    assert broadcast_dims(S, 4) == 4
    assert broadcast_dims(S, T) == broadcast_dims(T, S)
    assert broadcast_dims(3, 4) is None


def test_broadcast_error_names_both_shapes() -> None:
    with pytest.raises(ShapeError) as caught:
        broadcast_shapes((2, 3), (4,), what="add")
    assert (
        str(caught.value).split("\n")[0] == "add: shapes [2, 3] and [4] do not broadcast: sizes 3 and 4 differ   [S104]"
    )


# ---- axes


@given(st.integers(1, 5), st.integers(-7, 7))
def test_axis_counts_from_the_end(ndim: int, axis: int) -> None:
    if -ndim <= axis < ndim:
        assert normalize_axis(axis, ndim, "sum") == range(ndim)[axis]
    else:
        with pytest.raises(ShapeError, match=f"sum: axis {axis} does not exist in {ndim} dimensions"):
            normalize_axis(axis, ndim, "sum")


@pytest.mark.parametrize("axis", [True, 1.0, "0", None])
def test_axis_is_an_int(axis: object) -> None:
    with pytest.raises(OptionError, match="an axis is an int"):
        normalize_axis(axis, 2, "sum")  # type: ignore[arg-type]


def test_axes() -> None:
    assert normalize_axes(None, 3, "sum") == (0, 1, 2)
    assert normalize_axes(-1, 3, "sum") == (2,)
    assert normalize_axes(np.int64(1), 3, "sum") == (1,)  # type: ignore[arg-type]
    assert normalize_axes((2, 0), 3, "sum") == (0, 2)
    assert normalize_axes((), 3, "sum") == ()
