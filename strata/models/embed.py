"""Text embeddings: texts in batches of similar length on one compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from strata.errors import FileError
from strata.models.base import Model, compile_built
from strata.models.bert import EncoderSizes, build_embedder, build_encoder, graph_of
from strata.models.tokenizer import TextModel, Tokenizer
from strata.models.weights import Weights
from strata.runtime import CompiledGraph

TOKENS = 512  # of one batch: the activations of a small encoder still fit the cache
WASTE = 0.06  # of a batch's tokens that may be padding


class Encoder(TextModel, Model):
    """A text encoder: `embed` for vectors, `run` for hidden states and logits. Both are compiled when first used."""

    def __init__(
        self, config: EncoderSizes, weights: Weights, tokenizer: Callable[[], Tokenizer], *,
        pooling: str = "mean", normalize: bool = True, limit: int | None = None, device: str = "cpu",
        behind: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.config, self.weights, self.device = config, weights, device
        self.pooling, self.normalize = pooling, normalize
        self.behind = behind  # kinds of layers that the folder has behind the pooling, which are not read here
        self.limit = min(limit or config.longest, config.longest)
        self._make_tokenizer = tokenizer
        self._embedders: dict[tuple[str, bool], CompiledGraph] = {}
        self._whole: CompiledGraph | None = None
        self._names: tuple[str, ...] = ()

    @property
    def graph(self) -> CompiledGraph:  # type: ignore[override]
        """The graph behind `run`."""
        if self._whole is None:
            built, self._names = build_encoder(self.config, self.weights)
            self._whole = compile_built(built, self.device)
        return self._whole

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        assert self.graph is not None
        return self._names

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run on arrays by input name: where they are not given, every token counts and is of type 0."""
        if "input_ids" in arrays:
            shape = np.shape(arrays["input_ids"])
            arrays.setdefault("attention_mask", np.ones(shape, bool))
            if self.config.types:
                arrays.setdefault("token_type_ids", np.zeros(shape, np.int32))
        return super().run(**arrays)

    def embedder(self, pooling: str, normalize: bool) -> CompiledGraph:
        key = pooling, normalize
        if key not in self._embedders:
            self._embedders[key] = compile_built(build_embedder(self.config, self.weights, *key), self.device)
        return self._embedders[key]

    def finished(self, finish: Callable[[Any, Any], Any]) -> CompiledGraph:
        """A graph of token vectors and what `finish(builder, vectors)` makes of them."""
        b = graph_of(self.config, self.weights, "embed")
        b.graph.outputs(finish(b, b.encoded()))
        return compile_built(b, self.device)

    def embed(
        self, texts: str | Sequence[str], *, pooling: str | None = None, normalize: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:  # fmt: skip
        """A vector for each text, f32[texts, hidden]; for one string, f32[hidden].

        `progress(done, all)` is told of each batch.
        """
        many = [texts] if isinstance(texts, str) else list(texts)
        ids = self.tokenizer.encode_batch(many, self.limit)
        out = self.embed_ids(ids, pooling=pooling, normalize=normalize, progress=progress)
        return out[0] if isinstance(texts, str) else out

    def embed_ids(
        self, ids: Sequence[Sequence[int]], *, pooling: str | None = None, normalize: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:  # fmt: skip
        """A vector for the tokens of each text, f32[texts, hidden]."""
        if self.behind:
            raise FileError(
                f"embed: modules.json has a layer of the kind {self.behind[0]} behind the pooling, which is not read",
                code="F720", fix="strata.sentence_transformers.SentenceTransformer(folder)",
            )  # fmt: skip
        graph = self.embedder(pooling or self.pooling, self.normalize if normalize is None else normalize)
        out = np.empty((len(ids), self.config.hidden), np.float32)
        done = 0
        for batch in batches([len(i) for i in ids]):
            block, mask = padded([ids[i] for i in batch])
            out[batch] = graph.run(input_ids=block, attention_mask=mask)[0]
            done += len(batch)
            if progress is not None:
                progress(done, len(ids))
        return out

    @property
    def scores_pairs(self) -> bool:
        """Whether it reads two texts together and gives one number: a cross-encoder."""
        return self.config.labels == 1 and not self.config.is_per_token

    def score_pairs(
        self, pairs: Sequence[tuple[str, str]], progress: Callable[[int, int], None] | None = None
    ) -> tuple[np.ndarray, int]:
        """The score of each pair of texts, from 0 to 1, f32[pairs], and how many tokens were read."""
        found = self.tokenizer.encode_pairs(pairs, self.limit)
        out = np.empty(len(found), np.float32)
        done = 0
        for batch in batches([len(ids) for ids, _ in found]):
            block, mask = padded([found[i][0] for i in batch])
            arrays: dict[str, np.ndarray] = {"input_ids": block, "attention_mask": mask}
            if self.config.types:
                arrays["token_type_ids"] = padded([found[i][1] for i in batch])[0]
            logits = self.run(**arrays)["logits"].reshape(-1).astype(np.float64)
            out[batch] = 1 / (1 + np.exp(-logits))
            done += len(batch)
            if progress is not None:
                progress(done, len(found))
        return out, sum(len(ids) for ids, _ in found)


def padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids i32[B, S] of rows of any length, and which of them count."""
    length = max((len(r) for r in rows), default=1) or 1
    block, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        block[i, : len(row)] = row
        mask[i, : len(row)] = True
    return block, mask


def batches(lengths: Sequence[int], tokens: int = TOKENS, waste: float = WASTE) -> list[list[int]]:
    """Indices in batches of near lengths, longest first: at most so many tokens, of which a small part is padding."""
    found: list[list[int]] = []
    longest = real = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = max(lengths[i], 1)
        if (
            found
            and longest * (len(found[-1]) + 1) <= tokens
            and real + size >= (1 - waste) * longest * (len(found[-1]) + 1)
        ):
            found[-1].append(i)
            real += size
        else:
            found.append([i])
            longest, real = size, size
    return found
