"""Spoiled configurations of every family of decoders: only errors of our own, at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.errors import StrataError
from strata.models.decoders import decoder_family
from strata.models.decoders.expert_weights import stacked
from tests.unit.models.decoder_vectors import unpacked
from tests.unit.models.test_decoder_vectors import KNOWN

ODD: tuple[Any, ...] = (None, -1, 0, 1, 3, "x", [], [1], {}, 1e9, 0.5, float("nan"), True, [None, "y"])


@pytest.mark.parametrize("name", KNOWN)
def test_spoiled_settings(name: str) -> None:
    settings = KNOWN[name]["config"]
    of = decoder_family(settings["model_type"])
    shapes = unpacked(KNOWN[name]["weights"])
    weights = stacked(of.names({key: np.broadcast_to(np.float32(0), shape) for key, shape in shapes.items()}))
    config = of.config(settings)
    config.check(weights)
    of.graph(config, weights, 32, every=True).build().check()
    rng = np.random.default_rng(len(name))
    for key in settings.keys() - {"model_type"}:
        for value in ODD:
            try:
                config = of.config({**settings, key: value})
                config.check(weights)
                if rng.random() < 0.01:  # building takes longer
                    of.graph(config, weights, 32, every=False).build().check()
            except StrataError:
                pass
