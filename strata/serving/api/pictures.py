"""Images in chat messages: data: URLs, bounded in bytes, pixels and number; nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from strata.errors import StrataError
from strata.io import decode_image
from strata.models import from_url
from strata.serving.api.fields import wrong

MOST_IMAGES: Final = 16  # of a request
MOST_BYTES: Final = 20 << 20  # of an image
MOST_PIXELS: Final = 1 << 25


def with_pictures(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose images are pixels."""
    found, count = [], 0
    for at, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, list):
            content = [
                {**part, "image": picture(part["image"], f"messages[{at}]")} if part["type"] == "image" else part
                for part in content
            ]
            count += sum(part["type"] == "image" for part in content)
        found.append({**message, "content": content})
        if count > MOST_IMAGES:
            raise wrong(f"messages have more than {MOST_IMAGES} images", "messages", "invalid_value")
    return found


def picture(url: str, name: str) -> Any:
    """The pixels of a data: URL."""
    if not url[:5].lower() == "data:":
        raise wrong(
            f"{name}: an image is given as a data: URL; nothing is fetched from {url[:40]!r}",
            "messages",
            "invalid_value",
        )
    if len(url) > MOST_BYTES * 4 // 3 + 1024:
        raise wrong(f"{name}: an image has more than {MOST_BYTES} bytes", "messages", "invalid_value")
    try:
        return decode_image(from_url(url), "the image", most=MOST_PIXELS)
    except StrataError as error:
        raise wrong(f"{name}: {error.summary}", "messages", "invalid_image") from None
