"""Request limits: checked before anything is computed, with one clear error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from strata.backends import DeviceHome
from strata.errors import OptionError, RequestError
from strata.models import PAGE, Decoder, page_bytes


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on requests. None is no limit."""

    max_length: int | None = None  # tokens of a sequence
    max_batch: int | None = None  # sequences, texts or images of one request
    vocabulary: int | None = None  # token ids are below it
    image_sizes: tuple[int, int] | None = None  # the least and the most pixels of a side
    channels: tuple[int, ...] | None = None  # of an image: any of these

    def check_batch(self, count: int) -> None:
        if count < 1:
            raise _refused("nothing is asked for")
        if self.max_batch is not None and count > self.max_batch:
            raise _refused(f"{count} at once are more than {self.max_batch}")

    def check_ids(self, ids: Sequence[int]) -> None:
        """The tokens of one sequence."""
        if not len(ids):
            raise _refused("the prompt is empty")
        if self.max_length is not None and len(ids) > self.max_length:
            raise _refused(f"{len(ids)} tokens are more than {self.max_length}", "context_length_exceeded")
        if self.vocabulary is not None:
            at = next((i for i, token in enumerate(ids) if not 0 <= token < self.vocabulary), None)
            if at is not None:
                raise _refused(
                    f"token {ids[at]} at position {at} is outside the vocabulary of {self.vocabulary} tokens"
                )

    def check_image(self, image: Any) -> None:
        """One image, [height, width] or [height, width, channels]."""
        shape = np.shape(image)
        if len(shape) not in (2, 3):
            raise _refused(f"an image has two or three axes, got {list(shape)}")
        height, width, channels = (*shape, 1)[:3]
        if self.image_sizes is not None:
            low, high = self.image_sizes
            if not (low <= height <= high and low <= width <= high):
                raise _refused(f"an image of {height} x {width} is not within {low} to {high} pixels a side")
        if self.channels is not None and channels not in self.channels:
            known = " or ".join(map(str, self.channels))
            raise _refused(f"an image has {known} channels, got {channels}")


def _refused(message: str, reason: str | None = None) -> RequestError:
    error = RequestError(f"request: {message}", code="O621")
    error.reason = reason
    return error


def shared_memory(limit: int, taken: int, models: Sequence[Decoder], *, bits: int | None = None) -> list[int]:
    """Tokens of each model's KV cache: equal parts of what weights of `taken` bytes leave of a limit, and no more than
    four contexts. Each has room for one context at least."""
    contexts = [_context_bytes(model, bits) for model in models]
    left = limit - taken - sum(contexts)
    if left < 0:
        raise OptionError(
            f"serve: weights of {taken:,} bytes and KV caches of a context each need {taken + sum(contexts):,} bytes, "
            f"the limit is {limit:,}", code="O605", fix="a smaller context, or a KV cache of 8 bits",
        )  # fmt: skip
    found = [model.context for model in models]
    for turn, at in enumerate(sorted(range(len(models)), key=contexts.__getitem__)):  # who needs little leaves the rest
        part = min(left // (len(models) - turn), 3 * contexts[at])
        left -= part
        found[at] += part // max(page_bytes(models[at], bits), 1) * PAGE
    return found


def _context_bytes(model: Decoder, bits: int | None) -> int:
    return -(-model.context // PAGE) * page_bytes(model, bits)


@dataclass(frozen=True)
class UsualSizes:
    """What an engine takes that is not told otherwise: requests and tokens of a step, contexts of the KV cache. A long
    prompt has one in `chunks` of the tokens of a step: a host takes longer for each, and others wait for it."""

    requests: int
    tokens: int
    contexts: int
    chunks: int


ON_HOST: Final = UsualSizes(requests=16, tokens=512, contexts=4, chunks=8)
ON_DEVICE: Final = UsualSizes(requests=256, tokens=4096, contexts=64, chunks=4)
ON_DEVICE_MEMORY: Final = 0.3  # of a device's own memory: what a KV cache takes of it that is not told otherwise


def usual_tokens(model: Decoder, home: DeviceHome | None, contexts: int, bits: int | None) -> int:
    """Tokens of a KV cache of so many contexts, or of as many as a part of the device's memory holds."""
    tokens = contexts * model.context
    total = None if home is None else home.total_bytes()
    if total is None:
        return tokens if home is None else min(tokens, ON_HOST.contexts * model.context)
    return max(model.context, min(tokens, int(total * ON_DEVICE_MEMORY) // page_bytes(model, bits) * PAGE))
