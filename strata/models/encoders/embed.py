"""Text embeddings: texts in batches of similar length on one compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from strata.models.base import Model, compile_built
from strata.models.encoders.bert import EncoderSizes, build_embedder, build_encoder, graph_of
from strata.models.encoders.text_steps import Normalise, Scores, Steps, read_steps, reads_types, score_activation
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
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.config, self.weights, self.device = config, weights, device
        self.pooling, self.normalize = pooling, normalize
        self.limit = min(limit or config.longest, config.longest)
        self._folder = folder
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

    def embedder(self, pooling: str | None, normalize: bool) -> CompiledGraph:
        """A graph of one vector for each text; without a pooling, by all the steps that the files name."""
        key = pooling or "", normalize
        if key not in self._embedders:
            if pooling is None:
                steps = self.steps
                made = self.finished(lambda b, x: steps.finish(b, x, normalize=normalize))
            else:
                made = compile_built(build_embedder(self.config, self.weights, pooling, normalize), self.device)
            self._embedders[key] = made
        return self._embedders[key]

    @cached_property
    def steps(self) -> Steps:
        """What is done with the vectors of tokens."""
        after = (Normalise(),) if self.normalize else ()
        own = Steps(self._folder or Path(), (self.pooling,), after=after)
        if self._folder is None or not (self._folder / "modules.json").exists():
            return own
        return replace(read_steps(self._folder), include_prompt=True)

    @cached_property
    def activation(self) -> Scores:
        """What becomes of its scores: as its files say, or the sigmoid of a single one."""
        return score_activation(self._folder, self.config.labels)

    @cached_property
    def reads_types(self) -> bool:
        """Whether types of tokens tell it the texts of a pair apart."""
        return self.config.types > 1 and (self._folder is None or reads_types(self._folder))

    def finished(self, finish: Callable[[Any, Any], Any]) -> CompiledGraph:
        """A graph of what `finish(builder, vectors)` makes of the vectors of tokens: one value, or several."""
        b = graph_of(self.config, self.weights, "embed")
        made = finish(b, b.encoded())
        b.graph.outputs(*(made if isinstance(made, tuple) else (made,)))
        return compile_built(b, self.device)

    def embed(
        self, texts: str | Sequence[str], *, pooling: str | None = None, normalize: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:  # fmt: skip
        """A vector for each text, f32[texts, hidden]; for one string, f32[hidden].

        `progress(done, all)` is told of each batch.
        """
        many = [texts] if isinstance(texts, str) else list(texts)
        ids = self.text_ids(many, self.limit)
        out = self.embed_ids(ids, pooling=pooling, normalize=normalize, progress=progress)
        return out[0] if isinstance(texts, str) else out

    def text_ids(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        """The tokens of texts, up to a limit; in lower case where the files say so."""
        given = [t.lower() for t in texts] if self.steps.lower else texts
        return self.steps.weighted(self.tokenizer.encode_batch(given, limit))

    def embed_ids(
        self, ids: Sequence[Sequence[int]], *, pooling: str | None = None, normalize: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:  # fmt: skip
        """A vector for the tokens of each text, f32[texts, hidden]."""
        chosen = pooling or (self.steps.pooling[0] if self.steps.is_plain else None)
        graph = self.embedder(chosen, self.normalize if normalize is None else normalize)
        out = np.empty((len(ids), self.config.hidden if chosen else self.steps.width(self.config.hidden)), np.float32)
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
        """The score of each pair of texts, f32[pairs], and how many tokens were read."""
        found = self.tokenizer.encode_pairs(pairs, self.limit)
        out = np.empty(len(found), np.float32)
        done = 0
        for batch in batches([len(ids) for ids, _ in found]):
            block, mask = padded([found[i][0] for i in batch])
            arrays: dict[str, np.ndarray] = {"input_ids": block, "attention_mask": mask}
            if self.reads_types:
                arrays["token_type_ids"] = padded([found[i][1] for i in batch])[0]
            out[batch] = self.activation(self.run(**arrays)["logits"]).reshape(-1)
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
