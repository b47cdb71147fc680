"""Images are read as the image processors of transformers read them (image_vectors.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from strata.models.vision.images import ImageSettings
from tests.unit.models.image_vectors import CASES, FILE, PHOTO, sampled

KNOWN = json.loads(FILE.read_text("utf-8"))


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_pixels(number: int, is_named: bool, tmp_path: Path) -> None:
    """By the family's kind of processor, and by the kind that the folder names."""
    kind, settings = CASES[number]
    named = {"image_processor_type": f"{kind}ImageProcessor"} if is_named else {}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, **named}), "utf-8")
    found = ImageSettings.from_folder(tmp_path, "Segformer" if is_named else kind).pixels(PHOTO)
    assert list(found.shape) == KNOWN[number]["shape"]
    np.testing.assert_allclose(sampled(found), KNOWN[number]["pixels"], atol=2e-5)


def test_every_case_is_stored() -> None:
    assert len(KNOWN) == len(CASES)
