"""Steps that need more than one call: each takes the namespace (graph values or tensors), then its operands."""

from __future__ import annotations

from typing import Any


def merge(space: Any, x: Any, axis: int) -> Any:
    """Two neighbouring axes as one."""
    return space.reshape(x, (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :]))


def flat(space: Any, x: Any) -> Any:
    return space.reshape(x, (-1,)) if x.ndim else space.reshape(x, (1,))


def spread(space: Any, x: Any, copies: int) -> Any:
    """Broadcast along a new first axis."""
    return space.broadcast_to(x, (copies, *x.shape))


def gram(space: Any, x: Any, turned: bool) -> Any:
    """A matrix times its own transpose."""
    y = space.swapaxes(x, -1, -2)
    return space.matmul(y, x) if turned else space.matmul(x, y)


def attended(space: Any, x: Any) -> Any:
    """Rows that attend to each other."""
    scores = space.matmul(x, space.swapaxes(x, -1, -2)) * 0.3
    return space.matmul(space.softmax(scores, axis=-1), x)


def inner(space: Any, x: Any, subscripts: str) -> Any:
    return space.einsum(subscripts, x, x)


def convolved(space: Any, x: Any, stride: int) -> Any:
    """Windows of the last axis with a part of the array itself as weights."""
    return space.conv1d(x, x[:1, :, :2], stride=stride, padding=2)


def centred(space: Any, x: Any, axis: int) -> Any:
    """A row less its mean, over its spread."""
    m = space.mean(x, axis=axis, keepdims=True)
    return (x - m) / space.sqrt(space.mean(space.square(x - m), axis=axis, keepdims=True) + 0.1)


def running(space: Any, x: Any, reverse: bool) -> Any:
    """A loop over the first axis; the carry and the rows."""
    start = space.zeros(x.shape[1:], x.dtype)
    return space.scan(lambda c, row: (c * 0.5 + row, c + row), start, x, reverse=reverse)


def counting(space: Any, x: Any) -> Any:
    """The same in whole numbers, which wrap."""
    start = space.zeros(x.shape[1:], x.dtype)
    return space.scan(lambda c, row: (c * 3 + row, c + row), start, x)


def either(space: Any, test: Any, x: Any) -> Any:
    """One of two branches, by whether all of a test holds."""
    return space.cond(space.all(test), lambda a: a + a, lambda a: -a, x)


def placed(space: Any, x: Any, y: Any) -> Any:
    """Where numbers belong among others, put in order first."""
    return space.searchsorted(space.sort(x), y)


def chosen(space: Any, test: Any, x: Any) -> Any:
    return space.where(test, x, space.zeros(x.shape, x.dtype))


def drawn(space: Any, x: Any, seed: int, kind: str) -> Any:
    """Random numbers in the shape of a value, from a key."""
    key = space.random.key(seed)
    if kind == "bits":
        return space.random_bits(key, x.shape)
    return space.random.randint(key, x.shape, -3, 9) if kind == "whole" else space.random.uniform(key, x.shape)


def replaced(space: Any, x: Any, at: int) -> Any:
    """The first row of the flipped array written over a row."""
    part = space.flip(x, 0)[:1]
    return space.dynamic_update_slice(x, part, [at] + [0] * (x.ndim - 1))
