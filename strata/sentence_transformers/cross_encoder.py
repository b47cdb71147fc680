"""CrossEncoder: scores of pairs of texts, and documents ranked by their score with a query."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from strata.core import located
from strata.core import progress as progress_bar
from strata.errors import OptionError
from strata.models import Encoder, batches, load, padded, read_json
from strata.places import here
from strata.sentence_transformers.arguments import chosen_prompt, renamed, require_device
from strata.sentence_transformers.encoder import model_folder


def _softmax(x: np.ndarray) -> np.ndarray:
    risen = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(risen / risen.sum(-1, keepdims=True))


class CrossEncoder:
    """A model that reads two texts together, from a folder with a head for classification."""

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str],
        *,
        max_length: int | None = None,
        activation_fn: Callable[[np.ndarray], np.ndarray] | None = None,
        device: str | None = None,
        prompts: dict[str, str] | None = None,
        default_prompt_name: str | None = None,
    ) -> None:
        folder = model_folder(model_name_or_path)
        found = load(folder, device=device or "cpu")
        if not isinstance(found, Encoder) or not found.config.labels:
            raise OptionError(f"{folder} has no head that scores texts", code="O721", place=here())
        self._encoder = found
        self.num_labels = found.config.labels
        self.max_length = min(max_length, found.config.longest) if max_length else found.limit
        place = folder / "config_sentence_transformers.json"
        settings: dict[str, Any] = read_json(place) if place.exists() else {}
        self.prompts: dict[str, str] = {**dict(settings.get("prompts") or {}), **(prompts or {})}
        self.default_prompt_name = default_prompt_name or settings.get("default_prompt_name")
        self.activation_fn = activation_fn or found.activation

    @property
    def tokenizer(self) -> Any:
        """What makes ids of texts."""
        return self._encoder.tokenizer

    @located
    @renamed(sentences="inputs", activation_fct="activation_fn")
    def predict(
        self,
        inputs: Sequence[Any],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[[np.ndarray], np.ndarray] | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | Sequence[str] | None = None,
        pool: Any = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Scores of pairs of texts: f32[pairs], or f32[pairs, labels]; of one pair, its own.

        A prompt stands before the first text of each pair. One process uses all cores: what is said of pools and
        chunks changes nothing.
        """
        require_device(self._encoder.device, device)
        one = len(inputs) == 2 and all(isinstance(t, str) for t in inputs)
        pairs = [tuple(inputs)] if one else [tuple(p) for p in inputs]
        if not all(len(p) == 2 and all(isinstance(t, str) for t in p) for p in pairs):
            raise OptionError("predict takes pairs of texts: [(query, document), …]", code="O721")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise OptionError(f"batch_size is at least 1, got {batch_size!r}", code="O721")
        before = chosen_prompt(self.prompts, self.default_prompt_name, prompt_name, prompt)
        logits = self._logits([(before + a, b) for a, b in pairs], batch_size, show_progress_bar)
        found = (activation_fn or self.activation_fn)(logits)
        if apply_softmax and self.num_labels > 1:
            found = _softmax(found)
        out: Any = found[:, 0] if self.num_labels == 1 else found
        out = out[0] if one else out
        if convert_to_tensor:
            from strata.tensor import asarray

            return asarray(out)
        return out if convert_to_numpy or one else list(out)

    @located
    @renamed(activation_fct="activation_fn")
    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[[np.ndarray], np.ndarray] | None = None,
        device: str | Sequence[str] | None = None,
        pool: Any = None,
        chunk_size: int | None = None,
    ) -> list[dict[str, Any]]:
        """Documents by their score with a query, the best first: corpus_id, score, and the text where asked for."""
        if self.num_labels != 1:
            raise OptionError(
                f"CrossEncoder.rank() only works for models with num_labels=1, this one has {self.num_labels}",
                code="O721", fix="predict([(query, document), …])",
            )  # fmt: skip
        if not len(documents):  # which may be an array
            return []
        scores = self.predict(
            [(query, d) for d in documents], prompt_name, prompt, batch_size, show_progress_bar, activation_fn,
            device=device, pool=pool, chunk_size=chunk_size,
        )  # fmt: skip
        rows: list[dict[str, Any]] = [
            {"corpus_id": i, "score": float(s), **({"text": documents[i]} if return_documents else {})}
            for i, s in enumerate(scores)
        ]
        return sorted(rows, key=lambda row: -row["score"])[:top_k]

    def _logits(self, pairs: Sequence[tuple[Any, ...]], batch_size: int, progress: bool | None) -> np.ndarray:
        read = self._encoder.tokenizer.encode_pairs([(a, b) for a, b in pairs], self.max_length)
        out = np.empty((len(pairs), self.num_labels), np.float32)
        with progress_bar("pairs", len(pairs), wanted=progress, keep=bool(progress)) as advance:
            for batch in batches([len(ids) for ids, _ in read]):
                for start in range(0, len(batch), batch_size):
                    part = batch[start : start + batch_size]
                    block, mask = padded([read[i][0] for i in part])
                    feeds = {"input_ids": block, "attention_mask": mask}
                    if self._encoder.reads_types:
                        feeds["token_type_ids"] = padded([read[i][1] for i in part])[0]
                    out[part] = self._encoder.run(**feeds)["logits"]
                    advance(len(part))
        return out
