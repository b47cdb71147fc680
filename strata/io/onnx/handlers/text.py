"""Strings: they are host arrays, so these handlers compute at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from strata.io.onnx.node import NodeView
from strata.io.onnx.regex import FullMatch
from strata.io.onnx.registry import reads


def strings(values: list[str], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)


@reads("StringConcat")
def string_concat(n: NodeView) -> np.ndarray:
    x, y = np.broadcast_arrays(n.array(0), n.array(1))
    n.room(sum(len(str(s)) for both in (x, y) for s in both.reshape(-1)), 1, "letters")
    return strings([str(a) + str(b) for a, b in zip(x.reshape(-1), y.reshape(-1), strict=True)], x.shape)


@reads("StringSplit")
def string_split(n: NodeView) -> tuple[np.ndarray, np.ndarray]:
    x = n.array(0)
    delimiter, most = n.attr("delimiter") or None, n.attr("maxsplit", -1)
    parts = [str(s).split(delimiter, -1 if most is None else most) for s in x.reshape(-1)]
    width = max((len(p) for p in parts), default=0)
    n.room(len(parts) * width)
    padded = [piece for p in parts for piece in [*p, *[""] * (width - len(p))]]
    counts = np.array([len(p) for p in parts], np.int64).reshape(x.shape)
    return strings(padded, (*x.shape, width)), counts


@reads("RegexFullMatch")
def regex_full_match(n: NodeView) -> np.ndarray:
    matches = FullMatch(str(n.attr("pattern", "")))
    x = n.array(0)
    return np.array([matches(str(s)) for s in x.reshape(-1)], bool).reshape(x.shape)


@reads("StringNormalizer")
def string_normalizer(n: NodeView) -> np.ndarray:
    x = n.array(0)
    action = n.choice("case_change_action", "NONE", ("NONE", "LOWER", "UPPER"))
    strict = bool(n.attr("is_case_sensitive", 0))
    stop = list(n.attr("stopwords", ()))
    stopped = set(stop) if strict else {w.lower() for w in stop}
    changes: dict[str, Callable[[str], str]] = {"LOWER": str.lower, "UPPER": str.upper, "NONE": str}
    change = changes[action]
    kept = [str(s) for s in x.reshape(-1) if (str(s) if strict else str(s).lower()) not in stopped]
    done = [change(s) for s in kept] or [""]
    return strings(done, (len(done),) if x.ndim == 1 else (1, len(done)))


@reads("TfIdfVectorizer")
def tfidf_vectorizer(n: NodeView) -> np.ndarray:
    """Counts of n-grams with gaps, as frequency, presence, or weighted."""
    x = n.array(0)
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    grams = _grams(n)
    ids = n.attr("ngram_indexes")
    weights = np.asarray(n.attr("weights") or np.ones(len(ids)), np.float32)
    mode = n.choice("mode", "TF", ("TF", "IDF", "TFIDF"))
    low, high, gaps = n.attr("min_gram_length"), n.attr("max_gram_length"), n.attr("max_skip_count")
    n.room(2 * len(rows) * (max(ids) + 1), 4)
    out = np.zeros((len(rows), max(ids) + 1), np.float32)
    for row, counts in zip(rows, out, strict=True):
        for length in range(max(low, 1), min(high, len(row)) + 1):  # longer ones do not fit
            for gap in range(1, min(gaps if length > 1 else 0, len(row)) + 2):
                for at in range(len(row) - (length - 1) * gap):
                    place = grams.get(tuple(row[at : at + (length - 1) * gap + 1 : gap].tolist()))
                    if place is not None:
                        counts[ids[place]] += 1
    by_id = np.ones(out.shape[1], np.float32)
    for place, at in enumerate(ids):
        by_id[at] = weights[place]
    if mode == "IDF":
        out = (out > 0) * by_id
    elif mode == "TFIDF":
        out = out * by_id
    return out.astype(np.float32).reshape(out.shape if x.ndim > 1 else (-1,))


def _grams(n: NodeView) -> dict[tuple[Any, ...], int]:
    pool = list(n.attr("pool_strings") or n.attr("pool_int64s") or ())
    starts = [*n.attr("ngram_counts"), len(pool)]
    found: dict[tuple[Any, ...], int] = {}
    for length, (begin, end) in enumerate(pairwise(starts), start=1):
        for at in range(begin, end - length + 1, length):
            found[tuple(pool[at : at + length])] = len(found)
    return found
