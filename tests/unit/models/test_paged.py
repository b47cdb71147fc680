"""Pages of keys and values: lending, tables, offsets, and steps that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strata.errors import OptionError
from strata.models import PAGE, Decoder, PagedCache, PagePool, PageTable, load, page_bytes
from tests.unit.models.random_models import random_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    random_model(tmp_path, "llama")
    model: Decoder = load(tmp_path, context=64)
    return model


def test_the_lowest_page_is_lent_first() -> None:
    pool = PagePool(4, tokens=2, size=96)
    assert [pool.take() for _ in range(5)] == [0, 1, 2, 3, None]
    assert [pool.offset(i) for i in range(4)] == [0, 96, 192, 288]
    pool.give_back([2, 0])
    assert pool.free == 2
    assert [pool.take(), pool.take(), pool.take()] == [0, 2, None]


def test_tables_find_tokens() -> None:
    pool = PagePool(6, tokens=4)
    one, two = PageTable(pool), PageTable(pool)
    assert one.reserve(5)
    assert two.reserve(4)
    assert one.reserve(9)
    assert (one.pages, two.pages) == ([0, 1, 3], [2])
    assert [one.page_of(t) for t in (0, 3, 4, 7, 8, 11)] == [0, 0, 1, 1, 3, 3]
    assert one.rows(2, 8).tolist() == [2, 3, 4, 5, 6, 7, 12, 13]
    assert not two.reserve(17)  # all or nothing
    assert (two.pages, pool.free) == ([2], 2)
    one.length = 9
    one.release()
    assert (one.pages, one.length, pool.free) == ([], 0, 5)
    assert two.reserve(12)
    assert two.pages == [2, 0, 1]


def test_pages_are_as_long_as_the_model_says(decoder: Decoder) -> None:
    model = decoder
    assert page_bytes(model) == PAGE * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, features, bytes
    cache = PagedCache(model, 3)
    assert sum(a.nbytes for a in cache.pools.values()) == 3 * page_bytes(model)
    assert cache.pool.offset(2) == 2 * page_bytes(model)


def test_mistakes(decoder: Decoder) -> None:
    pool = PagePool(2)
    with pytest.raises(OptionError, match="1 is given back and was not lent"):
        pool.give_back([1])
    with pytest.raises(OptionError, match="2 is not one of 2 pages"):
        pool.offset(2)
    with pytest.raises(OptionError, match="token 0 is outside of a table for 0"):
        PageTable(pool).page_of(0)
    with pytest.raises(OptionError, match="make no pool"):
        PagePool(0)
    cache = PagedCache(decoder, 2)
    table = cache.table()
    assert table.reserve(16)
    with pytest.raises(OptionError, match="0 tokens and 17 more do not fit a table for 16"):
        cache.step([table], np.zeros((1, 17), np.int32))
