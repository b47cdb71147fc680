"""Images: preprocessing, vectors, similarity, labels, and mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import strata as st
from strata.errors import FileError, OptionError, ShapeError, UnknownNameError
from strata.models.vision.images import ImageSettings, centre, target
from tests.families.stored import complete
from tests.unit.models.test_families import folder

PHOTOS = [np.random.default_rng(i).integers(0, 256, (40 + i, 50, 3), dtype=np.uint8) for i in range(3)]


def test_an_image_is_resized_cropped_and_normalised() -> None:
    settings = ImageSettings.from_json({
        "size": {"shortest_edge": 20}, "resample": 3, "do_center_crop": True, "crop_size": {"height": 16, "width": 18},
        "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7],
    })  # fmt: skip
    image = Image.fromarray(PHOTOS[0])
    wanted = np.asarray(image.resize((25, 20), Image.Resampling.BICUBIC))[2:18, 3:21] / 255.0
    wanted = (wanted - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    np.testing.assert_allclose(settings.pixels(image), wanted.transpose(2, 0, 1), atol=1e-6)
    np.testing.assert_array_equal(settings.pixels(image), settings.pixels(PHOTOS[0]))


def test_sizes() -> None:
    assert target((30, 60), {"shortest_edge": 20}) == (20, 40)
    assert target((60, 30), {"shortest_edge": 20}) == (40, 20)
    assert target((30, 90), {"shortest_edge": 20, "longest_edge": 45}) == (15, 45)
    assert target((30, 90), {"height": 7, "width": 9}) == (7, 9)
    assert centre(np.ones((2, 3, 1), np.uint8), 4, 5).sum() == 6


@pytest.mark.parametrize(
    ("kind", "found", "shape"),
    [
        ("CLIP", {"size": 20, "crop_size": 16, "crop_pct": 0.5}, (16, 16)),  # as CLIP's first folders have it
        ("CLIP", {"size": 20, "do_center_crop": False}, (20, 25)),
        ("Siglip", {"size": 20}, (20, 25)),
        ("Detr", {"size": 20, "max_size": 24}, (19, 24)),
        ("Detr", {"size": 20}, (20, 25)),
        ("ConvNext", {"size": 20, "crop_pct": 0.875}, (20, 20)),
        ("ConvNext", {"size": 20, "image_processor_type": "BitImageProcessor", "do_center_crop": False}, (20, 25)),
        ("CLIP", {"size": 20, "crop_pct": 0.5, "feature_extractor_type": "ConvNextFeatureExtractor",
                       "do_center_crop": False}, (20, 20)),
    ],
)  # fmt: skip
def test_sizes_of_one_number(kind: str, found: dict[str, Any], shape: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(found))
    settings = ImageSettings.from_folder(tmp_path, kind)
    assert settings.pixels(PHOTOS[0]).shape == (3, *shape)


def test_one_mean_for_all_channels() -> None:
    plain = {"do_resize": False, "image_mean": 0.5, "image_std": [0.25]}
    wanted = (PHOTOS[0].transpose(2, 0, 1) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(ImageSettings.from_json(plain).pixels(PHOTOS[0]), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"size": 8, "do_pad": True, "pad_size": {"height": 9, "width": 9}}, "pad_size"),
        ({"size": {"zork": 3}}, "which is not a size"),
        ({"size": 3, "image_std": [0, 1, 1]}, "divides by 0"),
        ({"size": 3, "image_mean": "grey"}, "a number for each of 3 channels"),
        ({"size": -1}, "size = -1"),
    ],
)
def test_settings_that_make_no_sense(found: dict[str, Any], told: str) -> None:
    with pytest.raises(FileError, match=told):
        ImageSettings.from_json(found)


def test_vectors_and_labels(tmp_path: Path) -> None:
    place = folder(tmp_path / "model", "vit", id2label={"0": "cat", "3": "owl"})
    (place / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 24, "width": 24}}), "utf-8")
    model = st.load(place)
    Image.fromarray(PHOTOS[0]).save(tmp_path / "a.png")
    vectors = model.embed_image([tmp_path / "a.png", PHOTOS[1], Image.fromarray(PHOTOS[2])])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(model.similarity(PHOTOS, vectors).diagonal(), 1, rtol=1e-5)
    logits = model.run(pixel_values=model.preprocess(PHOTOS))["logits"]
    for row, best in zip(logits, model.classify(PHOTOS, top=5), strict=True):
        assert [label.number for label in best] == list(np.argsort(-row, kind="stable"))
        assert sum(label.score for label in best) == pytest.approx(1)
    assert {label.name for label in best} == {"cat", "owl", "LABEL_1", "LABEL_2", "LABEL_4"}
    for wrong, error in (
        (np.zeros((4, 4, 3)), OptionError), (np.zeros((4, 4, 5), np.uint8), ShapeError), ([], OptionError),
    ):  # fmt: skip
        with pytest.raises(error):
            model.embed_image(wrong)
    with pytest.raises(ShapeError, match="pixel_values are"):
        model.run(pixel_values=np.zeros((3, 24, 24)))
    with pytest.raises(UnknownNameError, match="labels no pixels"):
        model.segment(PHOTOS[0])


def test_images_and_texts_in_one_space(tmp_path: Path) -> None:
    place = folder(tmp_path / "model", "siglip")
    (place / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 24, "width": 24}}), "utf-8")
    complete(place, {}, 60)
    model = st.load(place)
    images, texts = model.embed_image(PHOTOS), model.embed(["w5", "w9"])
    cosines = model.similarity(PHOTOS, ["w5", "w9"])
    np.testing.assert_allclose(cosines, images @ texts.T, atol=1e-5)
    padded = np.full((2, 20), 50, np.int32)
    padded[:, 0] = 5, 9
    both = model.run(pixel_values=model.preprocess(PHOTOS), input_ids=padded)
    np.testing.assert_allclose(model.similarity(PHOTOS, texts, scaled=True), both["logits_per_image"], atol=1e-5)
    with pytest.raises(ShapeError, match="S up to 20"):
        model.run(input_ids=np.zeros((1, 21), np.int32))
    with pytest.raises(OptionError, match="takes a text or a list"):
        model.embed([3])


def test_a_label_for_every_pixel(tmp_path: Path) -> None:
    place = folder(tmp_path / "model", "segformer")
    (place / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 64, "width": 96}}), "utf-8")
    found = st.load(place).segment(PHOTOS[:2])
    assert [x.shape for x in found] == [(40, 50), (41, 50)]
    assert {int(n) for x in found for n in np.unique(x)} <= set(range(5))


@pytest.mark.parametrize("kind", ["detr", "rt_detr"])
def test_objects_with_boxes(kind: str, tmp_path: Path) -> None:
    place = folder(tmp_path / "model", kind, id2label={"0": "cat", "1": "owl"})
    (place / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 48, "width": 64}}), "utf-8")
    model = st.load(place)
    results = model.run(pixel_values=model.preprocess(PHOTOS[0]))
    logits, boxes = results["logits"][0], results["pred_boxes"][0]
    found = model.detect(PHOTOS[0], threshold=0.0)[0]
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    scores = 1 / (1 + np.exp(-logits)) if kind == "rt_detr" else (odds / odds.sum(-1, keepdims=True))[:, :-1]
    assert len(found) == len(logits)
    assert found[0].score == pytest.approx(scores.max(), rel=1e-5)
    assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)
    row, number = np.unravel_index(scores.argmax(), scores.shape)
    x, y, w, h = boxes[row] * (50, 40, 50, 40)
    np.testing.assert_allclose(found[0].box, (x - w / 2, y - h / 2, x + w / 2, y + h / 2), rtol=1e-5)
    assert (found[0].number, found[0].name) == (number, {0: "cat", 1: "owl"}.get(int(number), f"LABEL_{number}"))
    between = (found[0].score + found[1].score) / 2
    assert [len(r) for r in model.detect(PHOTOS[:1] * 2, threshold=between)] == [1, 1]
    with pytest.raises(OptionError, match="a threshold is from 0 to 1"):
        model.detect(PHOTOS[0], threshold=3)
    with pytest.raises(OptionError, match="there are no images"):
        model.detect([])


def test_a_backbone_by_timm(tmp_path: Path) -> None:
    """The same weights under timm's names, where the configuration has no sizes of the backbone."""
    pixels = np.random.default_rng(0).standard_normal((1, 3, 48, 64)).astype(np.float32)
    wanted = st.load(folder(tmp_path / "model", "detr")).run(pixel_values=pixels)
    place = folder(tmp_path / "timm", "detr", backbone_config=None, use_timm_backbone=True, backbone="resnet18")
    weights = {name: np.array(w) for name, w in st.io.load_safetensors(place / "model.safetensors").items()}
    for new, old in (
        (r"conv_encoder.model.conv1.", r"conv_encoder\.model\.embedder\.embedder\.convolution\."),
        (r"conv_encoder.model.bn1.", r"conv_encoder\.model\.embedder\.embedder\.normalization\."),
        (r"layer{0}.{1}.conv{2}.", r"encoder\.stages\.(\d)\.layers\.(\d)\.layer\.(\d)\.convolution\."),
        (r"layer{0}.{1}.bn{2}.", r"encoder\.stages\.(\d)\.layers\.(\d)\.layer\.(\d)\.normalization\."),
        (r"layer{0}.{1}.downsample.0.", r"encoder\.stages\.(\d)\.layers\.(\d)\.shortcut\.convolution\."),
        (r"layer{0}.{1}.downsample.1.", r"encoder\.stages\.(\d)\.layers\.(\d)\.shortcut\.normalization\."),
    ):

        def timm(m: re.Match[str], new: str = new) -> str:
            stage, block, number = (int(n) for n in (*m.groups(), 0, 0, 0)[:3])
            return new.format(stage + 1, block, number + 1)

        weights = {re.sub(old, timm, name): w for name, w in weights.items()}
    assert "model.backbone.conv_encoder.model.layer2.0.downsample.0.weight" in weights
    (place / "model.safetensors").unlink()
    st.io.save_safetensors(place / "model.safetensors", weights)
    np.testing.assert_array_equal(st.load(place).run(pixel_values=pixels)["logits"], wanted["logits"])
