"""SentenceTransformer: `encode` texts to vectors, `similarity` of vectors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from strata.core import located
from strata.core import progress as progress_bar
from strata.errors import MissingFileError, OptionError
from strata.models import Encoder, batches, load, padded, read_json, read_steps
from strata.places import here
from strata.runtime import CompiledGraph
from strata.sentence_transformers.arguments import chosen_prompt, no_prompt, renamed, require_device
from strata.sentence_transformers.precision import PRECISIONS, quantize_embeddings
from strata.sentence_transformers.similarity import PAIRWISE, SIMILARITIES


def model_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a model, which must be on this machine: nothing is downloaded."""
    folder = Path(path)
    if not folder.is_dir():
        raise MissingFileError(
            f"{str(path)!r} is not a folder; models are read from this machine, nothing is downloaded", code="F721",
            place=here(),
        )  # fmt: skip
    return folder


class SentenceTransformer:
    """Texts to vectors by a model in a folder, as sentence-transformers writes them."""

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str],
        *,
        device: str | None = None,
        prompts: dict[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        folder = model_folder(model_name_or_path)
        settings: dict[str, Any] = {}
        if (folder / "config_sentence_transformers.json").exists():
            settings = read_json(folder / "config_sentence_transformers.json")
        self._steps = read_steps(folder)
        found = load(self._steps.folder, device=device or "cpu")
        if not isinstance(found, Encoder):
            raise OptionError(f"{folder} is not an encoder of texts", code="O721", place=here())
        self._encoder = found
        self.prompts: dict[str, str] = {
            "query": "",
            "document": "",
            **dict(settings.get("prompts") or {}),
            **(prompts or {}),
        }
        self.default_prompt_name = default_prompt_name or settings.get("default_prompt_name")
        if self.default_prompt_name is not None and self.default_prompt_name not in self.prompts:
            raise no_prompt(self.prompts, self.default_prompt_name)
        self.truncate_dim = truncate_dim if truncate_dim is not None else settings.get("truncate_dim")
        self.similarity_fn_name = similarity_fn_name or settings.get("similarity_fn_name")
        self.max_seq_length: int = min(self._steps.limit or found.limit, found.limit)
        self._graphs: dict[bool | None, CompiledGraph] = {}

    @property
    def tokenizer(self) -> Any:
        """What makes ids of texts."""
        return self._encoder.tokenizer

    @property
    def device(self) -> str:
        """Where the model runs."""
        return str(self._encoder.device)

    @property
    def similarity_fn_name(self) -> str:
        """Which similarity `similarity` and `similarity_pairwise` give; set to None, it is the cosine."""
        return self._similarity

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: str | None) -> None:
        name = name or "cosine"
        if name not in SIMILARITIES:
            known = ", ".join(SIMILARITIES)
            raise OptionError(f"similarity_fn_name is one of {known}, got {name!r}", code="O721", place=here())
        self._similarity = name

    def get_sentence_embedding_dimension(self) -> int:
        """Features of a vector."""
        width = self._steps.width(self._encoder.config.hidden)
        return width if self.truncate_dim is None else min(width, self.truncate_dim)

    get_embedding_dimension = get_sentence_embedding_dimension

    def get_max_seq_length(self) -> int:
        """Tokens of a text that are read."""
        return self.max_seq_length

    @located
    @renamed(sentences="inputs")
    def encode(
        self,
        inputs: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | Sequence[str] | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: Any = None,
        chunk_size: int | None = None,
    ) -> Any:
        """A vector for each text, f32[texts, features]; for one string, f32[features].

        `convert_to_tensor` gives a strata tensor; without `convert_to_numpy`, a list of vectors. With `output_value`
        "token_embeddings", a list of f32[tokens, hidden], before pooling; with None, a dict of both and of the ids for
        each text. One process uses all cores: what is said of
        pools and chunks changes nothing.
        """
        if output_value not in ("sentence_embedding", "token_embeddings", None):
            told = "is one of sentence_embedding, token_embeddings, None"
            raise OptionError(f"output_value {told}, got {output_value!r}", code="O721")
        require_device(self.device, device)
        precision = precision or "float32"
        if precision not in PRECISIONS:
            raise OptionError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}", code="O720")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise OptionError(f"batch_size is at least 1, got {batch_size!r}", code="O721")
        one = isinstance(inputs, str)
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        wrong = next((t for t in texts if not isinstance(t, str)), None)
        if wrong is not None:
            raise OptionError(f"texts are strings, got {type(wrong).__name__}", code="O721")
        before = chosen_prompt(self.prompts, self.default_prompt_name, prompt_name, prompt)
        size = truncate_dim if truncate_dim is not None else self.truncate_dim
        if output_value != "sentence_embedding":
            rows = self._parts(texts, before, batch_size, show_progress_bar)
            whole = [{**row, "sentence_embedding": row["sentence_embedding"][:size]} for row in rows]
            if output_value is None and precision != "float32":
                raise OptionError(f"output_value=None gives float32, and precision is {precision!r}", code="O720")
            tokens = [row["token_embeddings"] for row in rows]
            chosen: list[Any] = (
                whole if output_value is None else quantize_embeddings(tokens, precision) if tokens else []
            )
            return chosen[0] if one else chosen
        plain = size is None
        found = self._vectors(texts, before, batch_size, show_progress_bar, normalize=normalize_embeddings and plain)
        if not plain:
            found = found[:, :size]
            if normalize_embeddings:
                found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        found = np.ascontiguousarray(found)
        out: Any = found if precision == "float32" else quantize_embeddings(found, precision)
        out = out[0] if one else out
        if convert_to_tensor:
            from strata.tensor import asarray

            return asarray(out)
        return out if convert_to_numpy or one else list(out)

    @located
    @renamed(sentences="inputs")
    def encode_query(
        self,
        inputs: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> Any:
        """`encode` with the prompt of queries."""
        return self.encode(inputs, prompt_name, self._task(prompt_name, prompt, "query"), **options)

    @located
    @renamed(sentences="inputs")
    def encode_document(
        self,
        inputs: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> Any:
        """`encode` with the prompt of documents."""
        name = next((n for n in ("document", "passage", "corpus") if n in self.prompts), "document")
        return self.encode(inputs, prompt_name, self._task(prompt_name, prompt, name), **options)

    def _task(self, prompt_name: str | None, prompt: str | None, name: str) -> str | None:
        return self.prompts.get(name, "") if prompt is None and prompt_name is None else prompt

    def similarity(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """How near each vector is to each other one."""
        return SIMILARITIES[self.similarity_fn_name](embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """How near each vector is to the one at its own place."""
        return PAIRWISE[self.similarity_fn_name](embeddings1, embeddings2)

    def start_multi_process_pool(self, target_devices: Sequence[str] | None = None) -> dict[str, Any]:
        """A pool to give to `encode`; it is empty, as one process uses all cores."""
        require_device(self.device, target_devices)
        return {"input": None, "output": None, "processes": []}

    @staticmethod
    def stop_multi_process_pool(pool: Any) -> None:
        """Give a pool back."""

    @contextmanager
    def truncate_sentence_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Inside the block, vectors have so many features."""
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_embeddings = truncate_sentence_embeddings

    def _ids(self, texts: Sequence[str], before: str) -> list[list[int]]:
        given = [before + (t.lower() if self._steps.lower else t) for t in texts]
        return self._steps.weighted(self._encoder.tokenizer.encode_batch(given, self.max_seq_length))

    def _skipped(self, before: str) -> int:
        """Tokens at the start of a text that are not pooled: a prompt, where the files leave it out."""
        if self._steps.include_prompt or not before:
            return 0
        return len(self._encoder.tokenizer.encode(before)) - 1  # without the token that ends a text

    def _feeds(self, ids: Sequence[Sequence[int]], skipped: int) -> dict[str, np.ndarray]:
        block, mask = padded(ids)
        feeds = {"input_ids": block, "attention_mask": mask}
        if not self._steps.include_prompt:
            feeds["pooling_mask"] = mask & (np.arange(mask.shape[1]) >= skipped)
        return feeds

    def _graph(self, normalize: bool | None) -> CompiledGraph:
        """Of the vector of each text; for None, of those of its tokens, too."""
        if normalize not in self._graphs:
            made = self._encoder.finished(
                lambda b, x: (
                    self._steps.whole(b, x, normalize=False)
                    if normalize is None
                    else self._steps.finish(b, x, normalize=normalize)
                )
            )
            self._graphs[normalize] = made
        return self._graphs[normalize]

    def _parts(self, texts: Sequence[str], before: str, batch_size: int, progress: bool | None) -> list[dict[str, Any]]:
        """For each text, its ids, its mask, the vectors of its tokens and its own."""
        ids, graph, skipped = self._ids(texts, before), self._graph(None), self._skipped(before)
        out: list[dict[str, Any]] = []
        with progress_bar("texts", len(texts), wanted=progress, keep=bool(progress)) as advance:
            for start in range(0, len(ids), batch_size):
                part = ids[start : start + batch_size]
                vectors, tokens = graph.run(self._feeds(part, skipped))
                for row, known in enumerate(part):
                    length = len(known)
                    out.append(
                        {
                            "input_ids": np.array(known, np.int64),
                            "attention_mask": np.ones(length, np.int64),
                            "modality": "text",
                            "token_embeddings": tokens[row, :length].copy(),
                            "sentence_embedding": vectors[row].copy(),
                        }
                    )
                advance(len(part))
        return out

    def _vectors(
        self, texts: Sequence[str], before: str, batch_size: int, progress: bool | None, *, normalize: bool
    ) -> np.ndarray:
        ids, graph, skipped = self._ids(texts, before), self._graph(normalize), self._skipped(before)
        out = np.empty((len(texts), self._steps.width(self._encoder.config.hidden)), np.float32)
        with progress_bar("texts", len(texts), wanted=progress, keep=bool(progress)) as advance:
            for batch in batches([len(i) for i in ids]):
                for start in range(0, len(batch), batch_size):
                    part = batch[start : start + batch_size]
                    out[part] = graph.run(self._feeds([ids[i] for i in part], skipped))[0]
                    advance(len(part))
        return out
