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


# --------------------------------------------------------------------------------------- functions made of several ops


def likeness(space: Any, x: Any, axis: int) -> Any:
    return space.cosine_similarity(x, space.flip(x, axis) + 1.0, axis=axis)


def halves(space: Any, x: Any, axis: int) -> Any:
    """Both halves of a doubled array, the other way round."""
    first, second = space.split(space.concat([x, x], axis), 2, axis)
    return space.concat([second, space.flip(first, axis)], axis)


def gated(space: Any, x: Any, axis: int) -> Any:
    return space.glu(space.concat([x, x * 0.5], axis), axis=axis)


def ranked(space: Any, x: Any, axis: int) -> Any:
    return space.take_along_axis(x, space.argsort(x, axis=axis), axis=axis)


def batch_normal(space: Any, x: Any) -> Any:
    made = space.batch_norm(x, training=True)
    return made[0] if isinstance(made, (tuple, list)) else made


def padded(space: Any, x: Any, mode: str, width: int = 1) -> Any:
    return space.pad(x, [(width, 1)] + [(0, 0)] * (x.ndim - 1), mode=mode)


def put(space: Any, x: Any, reduction: str) -> Any:
    """The last row added to the first one, or written over it."""
    return space.index_update(x, 0, x[-1], reduction=reduction if not x.dtype.is_bool else "none")


def marked(space: Any, x: Any, classes: int) -> Any:
    return space.one_hot(space.clip(x, 0, 3).astype("i64"), classes)


def grid(space: Any, x: Any) -> Any:
    a, b = space.meshgrid(x, x, indexing="ij")
    return space.stack([a, b], 0)


def refolded(space: Any, x: Any, first: bool) -> Any:
    """All axes but one as one, of whatever size is left."""
    return space.reshape(x, (x.shape[0], -1) if first else (-1, x.shape[-1]))


def crossed(space: Any, x: Any) -> Any:
    y = space.stack([x, x + 1, x - 2], -1)
    return space.cross(y, space.flip(y, -1), axis=-1)


def outer_sum(space: Any, x: Any) -> Any:
    return space.sum(space.outer(space.reshape(x, (-1,)), space.reshape(x, (-1,))), axis=0)


def pooled(space: Any, x: Any, kind: str) -> Any:
    y = space.reshape(x, (1, *x.shape)) if x.ndim == 2 else x
    if kind.startswith("adaptive"):
        return getattr(space, f"{kind}_pool1d")(y, 3)
    if kind == "lp":
        return space.lp_pool1d(space.abs(y) + 0.5, 2, 2, stride=1)
    return getattr(space, f"{kind}_pool1d")(y, 3, stride=2, padding=1)


def folded(space: Any, x: Any, window: int) -> Any:
    """Overlapping windows of a picture, added up again."""
    y = space.reshape(x, (1, 1, *x.shape))
    return space.sum(space.unfold(y, window, padding=1), axis=-1)


def convolved_2d(space: Any, x: Any, stride: int, dilation: int) -> Any:
    y = space.insert_axis(x, 0)
    weight = space.sin(space.reshape(space.arange(0, 18, dtype=x.dtype), (2, 1, 3, 3)))
    return space.conv2d(space.reshape(y, (x.shape[0], 1, *x.shape[1:])), weight, stride=stride, padding=1,
                        dilation=dilation)  # fmt: skip


def spread_by_weights(space: Any, x: Any, stride: int) -> Any:
    weight = space.cos(space.reshape(space.arange(0, 6, dtype=x.dtype), (1, 2, 3)))
    y = space.reshape(x, (x.shape[0] * x.shape[1], 1, x.shape[2]))
    return space.conv_transpose1d(y, weight, stride=stride, padding=1)


def resized(space: Any, x: Any, mode: str) -> Any:
    y = space.reshape(x, (1, *x.shape)) if x.ndim == 2 else x
    return space.interpolate(y, scale_factor=2, mode=mode)


def attention(space: Any, x: Any, causal: bool, groups: int) -> Any:
    """Rows that attend to each other in two heads, of which `groups` share keys."""
    y = space.reshape(x, (1, 1, *x.shape)) if x.ndim == 2 else space.reshape(x, (1, *x.shape))
    q = space.concat([y, y * 0.5], 1) if groups == 2 else y
    return space.scaled_dot_product_attention(q, y, y * 2.0, is_causal=causal, enable_gqa=groups == 2)


def scaled_attention(space: Any, x: Any) -> Any:
    """The same with a mask, and a scale that is not the usual one."""
    y = space.reshape(x, (1, 1, *x.shape)) if x.ndim == 2 else space.reshape(x, (1, *x.shape))
    mask = space.sum(y, -1, keepdims=True) > 0
    bias = space.where(mask, 0.0, -1.0).astype(x.dtype)
    return space.scaled_dot_product_attention(y, y, y, attn_mask=bias, scale=0.25)


def attended_by_size(space: Any, x: Any, divides: bool) -> Any:
    """Attention written out, with a scale that is computed from the number of rows."""
    scores = space.matmul(x, space.swapaxes(x, -1, -2))
    root = space.sqrt(space.cast(space.dim_size(x.shape[-2]), x.dtype) + 1.0)
    return space.matmul(space.softmax(scores / root if divides else scores * (1.0 / root), axis=-1), x)


def recurrent(space: Any, x: Any, kind: str) -> Any:
    gates = {"rnn": 1, "gru": 3, "lstm": 4}[kind]
    y = x if x.ndim == 2 else space.sum(x, -1)
    y = space.stack([y, y * 0.5, y + 1.0], -1)
    wave = [space.sin(space.arange(0, n, dtype=x.dtype)) for n in (gates * 6, gates * 4, gates * 2, gates * 2)]
    params = [space.reshape(wave[0], (gates * 2, 3)), space.reshape(wave[1], (gates * 2, 2)), wave[2], wave[3]]
    return getattr(space, kind)(y, None, params)[0]


def looked_up(space: Any, x: Any) -> Any:
    return space.embedding(space.argmax(x, axis=1), space.sin(x))


def loss(space: Any, x: Any, kind: str) -> Any:
    if kind == "cross_entropy":
        return space.cross_entropy(x, space.argmax(x, axis=1), label_smoothing=0.1)
    if kind == "kl":
        return space.kl_div(space.log_softmax(x, axis=1), space.softmax(x * 2.0, axis=1), reduction="sum")
    return getattr(space, f"{kind}_loss")(x, x * 0.5 + 1.0)


def solved(space: Any, x: Any) -> Any:
    y = space.matmul(x, space.swapaxes(x, 0, 1))
    system = y + space.eye(x.shape[0], dtype=x.dtype) * (space.sum(space.abs(y)) + 1.0)
    return space.solve(system, x)


def spectrum(space: Any, x: Any, kind: str) -> Any:
    if kind == "irfft":
        return space.irfft(space.rfft(x), n=x.shape[-1])
    return getattr(space, kind)(x)


# ------------------------------------------------------------------------------------------------------- control flow


def counted(space: Any, x: Any, times: int) -> Any:
    """A loop that counts, in whole numbers beside its value."""
    start = (space.zeros((), "i32"), x)
    return space.while_loop(lambda s: s[0] < times, lambda s: (s[0] + 1, s[1] * 2 - 1), start)[1]


def until(space: Any, x: Any) -> Any:
    """A loop with an end that depends on its value, and a most number of turns."""
    start = space.exp(-space.abs(x))
    return space.while_loop(lambda a: space.sum(a) < 3.0, lambda a: a + a * 0.5 + 0.1, start, max_iter=5)


def steps(space: Any, x: Any, length: int) -> Any:
    """A loop over nothing but its own count."""
    return space.scan(lambda c, _: (c + x, c * 2), x, None, length=length)


def pairs(space: Any, x: Any, reverse: bool) -> Any:
    """A loop over two arrays, which carries two."""
    zero = space.zeros(x.shape[1:], x.dtype)

    def body(carry: Any, row: Any) -> Any:
        total, most = carry
        a, b = row
        return (total + a * b, space.maximum(most, a)), total - a

    (total, most), rows = space.scan(body, (zero, zero), (x, space.flip(x, 0)), reverse=reverse)
    return total, most, rows


def nested(space: Any, x: Any) -> Any:
    """A loop in a loop, with a branch within."""

    def inner(c: Any, a: Any) -> Any:
        made = space.cond(space.sum(a) > space.sum(c), lambda p, q: p * 0.5 + q, lambda p, q: p - q * 0.25, c, a)
        return made, space.sum(made)

    def outer(c: Any, row: Any) -> Any:
        made, sums = space.scan(inner, c, row)
        return made, space.sum(sums)

    return space.scan(outer, space.zeros(x.shape[2:], x.dtype), x)


def branches(space: Any, x: Any) -> Any:
    """Two results of a branch, of which one is what went in."""
    return space.cond(
        space.sum(x) > 0.5, lambda a: (a * 2.0, space.sum(a, 0)), lambda a: (a, space.max(space.abs(a) + 1.0, 0)), x
    )


def remembered(space: Any, x: Any) -> Any:
    return space.checkpoint(lambda a: space.tanh(a) * space.sum(a, -1, keepdims=True))(x)
