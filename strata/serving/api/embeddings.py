"""Embeddings and reranking: texts in batches, between which whoever has gone away is noticed."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from strata.models import Encoder
from strata.serving.api.fields import wrong
from strata.serving.api.requests import EmbeddingRequest, RerankRequest


class Gone(Exception):  # noqa: N818 - nobody waits for the answer any longer
    """Whoever asked has gone away."""


def embed(encoder: Encoder, request: EmbeddingRequest, model: str, is_gone: Callable[[], bool]) -> dict[str, Any]:
    """The answer to a request for embeddings."""
    ids = _ids(encoder, request.texts, cuts=request.cuts)
    vectors = _vectors(encoder, ids, is_gone)
    if request.dimensions is not None:
        if request.dimensions > vectors.shape[1]:
            told = f"dimensions = {request.dimensions} is more than the {vectors.shape[1]} that the model has"
            raise wrong(told, "dimensions", "invalid_value")
        vectors = vectors[:, : request.dimensions]
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.where(lengths > 0, lengths, 1)

    def shown(vector: np.ndarray) -> Any:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if request.base64 else vector.tolist()

    data = [{"object": "embedding", "index": i, "embedding": shown(v)} for i, v in enumerate(vectors)]
    tokens = sum(map(len, ids))
    return {"object": "list", "model": model, "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def rerank(encoder: Encoder, request: RerankRequest, model: str, is_gone: Callable[[], bool]) -> dict[str, Any]:
    """Documents by their score: that of a model that reads both texts together, or the cosine of their vectors."""
    if encoder.scores_pairs:
        pairs = [(request.query, d) for d in request.documents]
        scores, tokens = encoder.score_pairs(pairs, lambda *_: _check(is_gone))
    else:
        ids = _ids(encoder, (request.query, *request.documents), cuts=True)
        vectors = _vectors(encoder, ids, is_gone).astype(np.float64)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.where(lengths > 0, lengths, 1)
        scores, tokens = vectors[1:] @ vectors[0], sum(map(len, ids))
    order = sorted(range(len(request.documents)), key=lambda i: (-scores[i], i))[: request.top]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": float(scores[i])} for i in order]
    if request.shows_documents:
        results = [{**r, "document": {"text": request.documents[r["index"]]}} for r in results]
    return {"id": f"rerank-{secrets.token_hex(12)}", "model": model, "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}  # fmt: skip


def _check(is_gone: Callable[[], bool]) -> None:
    if is_gone():
        raise Gone


def _ids(encoder: Encoder, texts: Sequence[str | Sequence[int]], *, cuts: bool) -> list[list[int]]:
    """Tokens of texts; one that is too long is cut, or refused."""
    given = [t for t in texts if isinstance(t, str)]
    read = iter(encoder.text_ids(given, encoder.limit if cuts else encoder.limit + 1))
    found = [next(read) if isinstance(t, str) else list(t) for t in texts]
    for ids in found:
        if len(ids) > encoder.limit:
            told = f"a text has more than the {encoder.limit} tokens that the model reads; truncate = true cuts it"
            raise wrong(told, "input", "context_length_exceeded")
        odd = next((i for i in ids if not 0 <= i < encoder.config.vocab), None)
        if odd is not None:
            raise wrong(
                f"token {odd} is outside the vocabulary of {encoder.config.vocab} tokens", "input", "invalid_value"
            )
    return found


def _vectors(encoder: Encoder, ids: list[list[int]], is_gone: Callable[[], bool]) -> np.ndarray:
    return encoder.embed_ids(ids, progress=lambda *_: _check(is_gone))
