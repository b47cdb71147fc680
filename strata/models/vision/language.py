"""Language models that see: images become vectors among the tokens of a prompt, in `generate` and `chat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

import numpy as np

from strata.arguments import own_checks
from strata.core import Table, f32, i32, i64, sym
from strata.errors import OptionError
from strata.mir import Value
from strata.models.decoder_config import DecoderConfig
from strata.models.generate import Decoder, DecoderSizes, Prompt
from strata.models.generating.prompts import PromptTokens, SeenImages, images_of, laid_out
from strata.models.llama import LlamaGraph
from strata.models.tokenizer import Tokenizer
from strata.models.vision.images import as_image
from strata.models.weights import ops


@dataclass(frozen=True)
class ImageTokens:
    """An image as the decoder takes it: vectors, the text around and among their tokens, and their grid."""

    rows: np.ndarray  # f32[vectors, H]
    text: str  # in which the name of the image token stands once for each vector
    grid: tuple[int, int] = (0, 0)


@runtime_checkable
class ImageEncoder(Protocol):
    """The part of a model that turns images into vectors of its decoder."""

    token: int  # the id of the token that stands for a vector of an image

    def encode(self, image: np.ndarray, name: str) -> ImageTokens:
        """What an image u8[H, W, 3] becomes; `name` is that of the image token."""

    def rows(self, arrays: Mapping[str, Any]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """The vectors of images that were preprocessed already, and the grid of each."""

    def positions(self, ids: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray | None:
        """Three positions of each token, i64[3, tokens]; None where there is one, its number."""

    def check(self) -> None:
        """Refuse weights that are not those of the configuration."""


@dataclass(frozen=True)
class MropeConfig(DecoderConfig):
    """A decoder with rotary positions of time, row and column (mrope), each for a part of the head."""

    sections: tuple[int, ...] = ()


class ImageDecoderGraph(LlamaGraph):
    """A decoder some of whose tokens are vectors of images: `image_at` says which row of `image_rows`, 0 is none."""

    def embedded(self) -> Value:
        x, hidden = super().embedded(), self.config.hidden
        rows = self.graph.input("image_rows", (sym("R", 1), hidden), f32)
        at = self.graph.input("image_at", (self.batch, self.count), i32)
        is_seen = ops.reshape(at > 0, (self.batch, self.count, 1))
        return ops.where(is_seen, ops.take(rows, at, axis=0), x)


class MropeGraph(ImageDecoderGraph):
    """A decoder of images and text whose tokens have a time, a row and a column (mrope)."""

    config: MropeConfig

    def _rope_tables(self, name: str, rope: Any, length: int) -> tuple[Value, Value]:
        places = self.graph.input("places", (self.batch, 3, self.count), i64)
        sections, rows = self.config.sections, []
        for part, table in zip(("cos", "sin"), rope.tables(length, self.config.head_dim, self.config.rotary_dim),
                               strict=True):  # fmt: skip
            self.bound[f"{name}.{part}"] = table
            whole, pieces = self.graph.param(f"{name}.{part}", table.shape, f32), []
            for i, count in enumerate(sections):
                at = ops.reshape(ops.narrow(places, 1, i, 1), (self.batch, self.count))
                pieces.append(ops.take(ops.narrow(whole, 1, sum(sections[:i]), count), at, axis=0))
            rows.append(ops.concat(pieces, -1))
        return rows[0], rows[1]


class ImageDecoder(Decoder):
    """A text generator that sees: prompts may have images."""

    def __init__(
        self, config: DecoderSizes, build: Callable[..., Any], tokenizer: Callable[[], Tokenizer],
        encoder: ImageEncoder, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, build, tokenizer, **settings)
        self.image_encoder = encoder
        self._encoded: Table[bytes, ImageTokens] = Table("image tokens")

    sees = True

    def _image_tokens(self, image: np.ndarray, name: str) -> ImageTokens:
        """What an image becomes; the last few are remembered, for chats that go on."""
        key = blake2b(repr(image.shape).encode() + image.tobytes(), digest_size=32).digest()
        return self._encoded.get_or_make(key, lambda: self.image_encoder.encode(image, name))

    def adapted(self, adapters: Mapping[str, Any]) -> Decoder:
        """Adapters are for models of texts alone."""
        raise OptionError(f"adapters: a model that sees takes none, got {', '.join(adapters)}", code="O611")

    def check(self) -> None:
        """Refuse weights that are not those of the configuration."""
        self.image_encoder.check()
        builder = self._build(self.context, every=False)
        builder.build()
        builder.check()

    @own_checks()
    def read_prompt(
        self, prompt: Prompt, *, images: Sequence[Any] = (), tools: Sequence[Mapping[str, Any]] | None = None,
        limit: int | None = None,
    ) -> PromptTokens:  # fmt: skip
        """A text or ids in which the image token stands for each of `images`, or messages with images in them."""
        if isinstance(prompt, PromptTokens):
            return prompt
        shown = list(images)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            shown += images_of(prompt)  # type: ignore[arg-type]
            prompt = laid_out(prompt)  # type: ignore[arg-type]
        ids = self.prompt_ids(prompt, tools=tools, limit=limit)
        count = ids.count(self.image_encoder.token)
        if count != len(shown):
            raise OptionError(f"generate: the prompt has {count} places for {len(shown)} images", code="O606")
        if not shown:
            return PromptTokens(ids, self._seen(np.asarray(ids, np.int64), np.zeros((0, self.config.hidden)), []))
        name = self.tokenizer.name_of(self.image_encoder.token)
        looks = [self._image_tokens(as_image(image), name) for image in shown]
        whole: list[int] = []
        queue = iter(looks)
        for token in ids:
            more = next(queue).text if token == self.image_encoder.token else None
            whole += [token] if more is None else self.tokenizer.encode(more, add_special=False)
        rows = np.concatenate([look.rows for look in looks])
        return PromptTokens(whole, self._seen(np.asarray(whole, np.int64), rows, [look.grid for look in looks]))

    def _seen(self, ids: np.ndarray, rows: np.ndarray, grids: Sequence[tuple[int, int]]) -> SeenImages:
        is_image = ids == self.image_encoder.token
        if int(is_image.sum()) != len(rows):
            raise OptionError(
                f"run: {is_image.sum()} image tokens stand for {len(rows)} vectors of images", code="O606"
            )
        at = np.where(is_image, np.cumsum(is_image), 0).astype(np.int32)
        first = np.zeros((1, self.config.hidden), np.float32)  # row 0 is for tokens that are text
        return SeenImages(
            np.concatenate([first, rows.astype(np.float32)]), at, self.image_encoder.positions(ids, grids)
        )

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Logits of every position of one prompt: `input_ids` i32[1, S] and what preprocessing gives for images."""
        ids = np.ascontiguousarray(arrays.pop("input_ids", np.zeros((0, 0))), np.int32)
        if ids.ndim != 2 or len(ids) != 1 or not ids.size:
            raise OptionError(f"run: takes input_ids of one prompt, i32[1, S], got {ids.shape}", code="O265")
        state = self.start(1, ids.shape[1])
        state.seen = self.prompt_of(ids[0], arrays).seen
        return {"logits": self.step(state, ids, every=True)}

    def prompt_of(self, ids: np.ndarray, arrays: Mapping[str, Any]) -> PromptTokens:
        """A prompt whose ids and images were prepared already."""
        rows, grids = self.image_encoder.rows(arrays) if arrays else (np.zeros((0, self.config.hidden)), [])
        return PromptTokens([int(i) for i in ids], self._seen(np.asarray(ids, np.int64), rows, grids))

    def seen_feeds(self, seen: Sequence[SeenImages | None], starts: Sequence[int], count: int) -> dict[str, np.ndarray]:
        at = np.zeros((len(seen), count), np.int32)
        places = np.zeros((len(seen), 3, count), np.int64)
        rows = [np.zeros((1, self.config.hidden), np.float32)]
        for i, (known, start) in enumerate(zip(seen, starts, strict=True)):
            places[i] = np.arange(start, start + count) if known is None else known.placed(start, count)
            some = np.zeros(0, np.int32) if known is None else known.at[start : start + count]
            if known is not None and some.any():
                base = sum(map(len, rows))
                used = np.flatnonzero(some)
                at[i, used] = base + np.arange(len(used))
                rows.append(known.rows[some[used]])
        feeds = {"image_rows": np.concatenate(rows), "image_at": at}
        return feeds | ({"places": places} if getattr(self.config, "sections", ()) else {})
