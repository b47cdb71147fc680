"""The bounds of docs/numerics.md hold: a slice of them, measured on other inputs than the page."""

import pytest

from strata.core import as_dtype
from strata.testing.numerics import DTYPES, TABLE, measure, page, read_bounds

BOUNDS = read_bounds(page().read_text())
SEED = 11  # none of those that the page was measured with


def test_the_page_has_every_function() -> None:
    assert {(op, dtype) for device, op, dtype in BOUNDS if device == "cpu"} == {
        (item.name, dtype) for item in TABLE for dtype in DTYPES
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("item", TABLE[::3], ids=lambda item: item.name)
def test_bounds_hold(item, dtype: str) -> None:
    assert measure(item, as_dtype(dtype), seed=SEED) <= BOUNDS["cpu", item.name, dtype]
