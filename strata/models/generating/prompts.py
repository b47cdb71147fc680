"""Prompts as a decoder reads them: token ids, and the images that stand among them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from strata.errors import OptionError

IMAGES = ("image", "image_url", "input_image")  # kinds of parts of a message that are images
KEYS = ("image", "image_url", "url", "path")  # under which such a part has its image


@dataclass(frozen=True)
class SeenImages:
    """What the tokens of a prompt show: `rows` are vectors, of which the first is none, and `at` says which of them
    each token is, 0 for text. `positions` are three for each token, where a family counts rows and columns apart."""

    rows: np.ndarray  # f32[1 + vectors, H]
    at: np.ndarray  # i32[tokens]
    positions: np.ndarray | None = None  # i64[3, tokens]

    def placed(self, start: int, count: int) -> np.ndarray:
        """The positions of so many tokens, those of the prompt or behind it, i64[3, count]."""
        known = np.zeros((3, 0), np.int64) if self.positions is None else self.positions
        shift = int(known.max()) + 1 - known.shape[1] if known.size else 0
        later = np.arange(max(start, known.shape[1]), start + count) + shift
        return np.concatenate([known[:, start : start + count], np.broadcast_to(later, (3, len(later)))], 1)

    def digest(self, start: int, end: int) -> bytes:
        """What tells tokens that show one image from the same tokens that show another."""
        shown = self.rows[self.at[start:end]]
        return blake2b(shown.tobytes() + self.placed(start, end - start).tobytes(), digest_size=32).digest()


@dataclass(frozen=True)
class PromptTokens:
    """A prompt that was read: its ids, and what those of them show that stand for images."""

    ids: list[int]
    seen: SeenImages | None = None


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The images of messages, in the order in which they stand there."""
    found = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            if isinstance(part, Mapping) and part.get("type") in IMAGES:
                found.append(_image(part))
    return found


def _image(part: Mapping[str, Any]) -> Any:
    given = next((part[key] for key in KEYS if part.get(key) is not None), None)
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None:
        raise OptionError(f"a part of a message that is an image has one of {', '.join(KEYS)}", code="O606")
    return from_url(given) if isinstance(given, str) else given


def from_url(given: str) -> Any:
    """The bytes of a data: URL; a path as it is. Nothing is fetched from elsewhere."""
    scheme, colon, rest = given.partition(":")
    if scheme.lower() == "data" and colon:
        about, comma, packed = rest.partition(",")
        if not comma or not about.lower().endswith(";base64"):
            raise OptionError("the data: URL of an image has its bytes in base64", code="O606")
        try:
            return base64.b64decode(packed, validate=True)
        except (binascii.Error, ValueError) as error:
            raise OptionError(f"the data: URL of an image is not base64: {error}", code="O606") from None
    if "://" in given[:64]:
        raise OptionError(
            f"images are not fetched from {scheme}: URLs; give a file, or its bytes as a data: URL", code="O606"
        )
    return given


def laid_out(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates of models that see take them: contents are lists of parts, images without their bytes."""
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif isinstance(content, (list, tuple)):
            content = [{"type": "image"} if isinstance(p, Mapping) and p.get("type") in IMAGES else p for p in content]
        made.append({**message, "content": content})
    return made
