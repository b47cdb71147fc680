"""Schedules of Triton kernels: their text, the table of winners, and what of them applies to a kernel."""

import json
from pathlib import Path

import pytest

from strata.backends.triton.schedules import winners
from strata.backends.triton.schedules.schedule import TritonTiles, fitted_tiles, parse_gpu_schedule
from strata.backends.triton.schedules.winners import nearest, winner
from strata.backends.triton.target import Gpu
from strata.errors import ParseError

TEXTS = [
    "lanes 1024 warps 4",
    "rows 4 x 512 warps 4",
    "fragments 16 x 2048 warps 8",
    "squares 32 x 32 warps 4",
    "product 64 x 64 x 32 warps 4 stages 3",
    "product 64 x 64 x 32 warps 4 stages 3 group 8 parts 2 descriptors persistent 132",
    "attention 128 x 64 warps 8 stages 3",
    "attention 16 x 64 warps 4 stages 3 segment 512",
    "attention 128 x 128 warps 4 stages 2 consumers 2 persistent 132",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_read_back(text: str):
    assert str(parse_gpu_schedule(text)) == text


def test_other_text_is_refused():
    with pytest.raises(ParseError, match="is not a schedule of a Triton kernel"):
        parse_gpu_schedule("product 64 x 64")


def test_every_winner_can_be_read_and_every_kind_has_rows_for_any_card():
    table = json.loads((Path(winners.__file__).parent / "winners.json").read_text())
    for kinds in table.values():
        for kind, rows in kinds.items():
            assert {kind, kind.rpartition(" ")[0]} & set(table["any"])  # the last word may be a format of weights
            for sizes, text in rows:
                assert all(n > 0 for n in sizes)
                assert str(parse_gpu_schedule(text)) == text
                forms = ("rows", "fragments") if kind.startswith("few") else kind.split()[:1]
                assert text.split()[0] in forms


def test_the_nearest_size_wins():
    gpu = Gpu.named("sm_90")
    assert nearest(gpu, "product 16", (4000, 5000, 4096))[0] == (4096, 4096, 4096)
    assert nearest(gpu, "product 16", (1 << 40, 1 << 14, 1 << 14))[0] == (8192, 8192, 8192)
    assert "descriptors" in nearest(gpu, "product 16", (8192,) * 3)[1]
    assert "descriptors" not in nearest(gpu, "product 16", (8192,) * 3, "descriptors")[1]
    other = winner(Gpu.named("sm_80"), "product 16", (4096,) * 3)
    assert winner(Gpu.named("gfx942"), "product 16", (4096,) * 3) == other


def test_tiles_are_no_larger_than_what_there_is():
    tiles = TritonTiles(128, 256, 64, 8, 4)
    assert fitted_tiles(tiles, 40, 20, 24, 16) == TritonTiles(64, 32, 32, 4, 2)
    assert fitted_tiles(tiles, 4096, 4096, 4096, 16) == tiles
