"""Plots and pictures: what is drawn is where the numbers are, and files are what readers of their formats expect."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from strata.core import progress
from strata.errors import OptionError, ShapeError
from strata.io import load_image
from strata.viewer import bars, picture, plot
from strata.viewer.plots import ticks


def places(svg: str) -> np.ndarray:
    (line,) = re.findall(r'<polyline points="([^"]*)"', svg)
    return np.array([[float(v) for v in p.split(",")] for p in line.split()])


def test_lines_lie_on_their_scale() -> None:
    x = np.linspace(0, 4, 50)
    made = plot({"a": (x, 2 * x + 1)}, title="<a & b>", x="time", y="size")
    ET.fromstring(made.svg())  # noqa: S314 - our own
    drawn = places(made._repr_svg_())
    assert np.all(np.diff(drawn[:, 0]) > 0)
    slope = np.diff(drawn[:, 1]) / np.diff(drawn[:, 0])
    np.testing.assert_allclose(slope, slope.mean(), atol=0.02)  # a straight line, which rises
    assert slope.mean() < 0
    logarithmic = places(plot({"a": np.exp(x)}, log=True).svg())
    slope = np.diff(logarithmic[:, 1]) / np.diff(logarithmic[:, 0])
    np.testing.assert_allclose(slope, slope.mean(), atol=0.02)


def test_a_terminal_shows_the_line() -> None:
    text = str(plot({"up": np.arange(20.0)}, title="t", x="step"))
    rows = [line.split("│")[1] for line in text.splitlines() if "│" in line]
    first = [next(i for i, c in enumerate(row) if c != "⠀") for row in rows if row.strip("⠀")]
    assert first == sorted(first, reverse=True), "a rising line begins further left in lower rows"
    assert text.splitlines()[0] == "t: up"


@pytest.mark.parametrize("values", [[3.0], [2.0, 2.0], [1.0, float("nan"), 2.0], [1e-12, 1e12], [-1.0, 0.0]])
def test_odd_numbers_are_drawn(values: list[float]) -> None:
    for log in (False, True):
        made = plot({"a": values, "b": [1.0]}, log=log)
        assert "nan" not in made.svg()
        assert str(made)


def test_long_lines_are_thinned() -> None:
    made = plot({"a": np.sin(np.arange(100_000.0))})
    assert len(made.svg()) < 20_000
    assert len(places(made.svg())) <= 602


@pytest.mark.parametrize(
    ("lines", "kind"),
    [({}, OptionError), ({"a": "text"}, OptionError), ({"a": [[1.0]]}, ShapeError), ({"a": ([1], [1, 2])}, ShapeError),
     ({"a": (1, 2, 3)}, ShapeError)],
)  # fmt: skip
def test_what_is_no_line_is_refused(lines: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        plot(lines)


def test_pictures_are_png(tmp_path: Path, rng: np.random.Generator) -> None:
    pixels = rng.integers(0, 256, (7, 9, 3), np.uint8)
    np.testing.assert_array_equal(load_image(picture(pixels).save(tmp_path / "a.png")), pixels)
    grey = load_image(picture(np.array([[0.0, 0.5], [1.0, 2.0]]), scale=3).save(tmp_path / "b.png"))
    assert grey.shape == (6, 6, 3)
    assert grey[::3, ::3, 0].tolist() == [[0, 128], [255, 255]]
    with pytest.raises(ShapeError):
        picture(np.zeros((2, 2, 4)))
    assert str(picture(np.eye(64)))


def test_bars_are_as_long_as_their_numbers() -> None:
    lines = bars({"a": 1.0, "bb": 4.0}, {"a": "one"}, columns=8).splitlines()
    assert lines == ["a   ██ one", "bb  ████████ 4"]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 4), (1e-9, 2e-9), (0, 1e9), (0.97, 1.01)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-12 <= t <= high * (1 + 1e-12) for t in found)


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("things", 3) as advance:
        advance(1, lambda: pytest.fail("nobody sees it"))
    assert capsys.readouterr() == ("", "")
    with progress("things", 3, wanted=True, keep=True) as advance:
        advance(3, "done")
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "done" in shown
