"""Recycled result memory: a block comes back only when no array over it is left."""

import gc

import numpy as np
import pytest

import strata as st
from strata.errors import OutOfMemoryError, RunError
from strata.runtime.execute.memory import BlockPool, size_class


def test_block_returns_after_the_last_view() -> None:
    pool = BlockPool()
    a = pool.empty((256, 256), np.dtype(np.float32))
    address = a.__array_interface__["data"][0]
    part = a[3:5].T
    del a
    assert pool._held == 0
    other = pool.empty((256, 256), np.dtype(np.float32))
    assert other.__array_interface__["data"][0] != address
    del part
    assert pool._held == size_class(256 * 256 * 4)
    assert pool.empty((256, 256), np.dtype(np.float32)).__array_interface__["data"][0] == address


def test_results_are_plain_writable_arrays() -> None:
    a = BlockPool().empty((100, 1000), np.dtype(np.float64))
    assert type(a) is np.ndarray
    assert a.flags.writeable
    assert a.flags.c_contiguous
    assert a.dtype == np.float64


def test_kept_memory_is_bounded() -> None:
    pool = BlockPool(keep=1 << 20)
    arrays = [pool.empty((1 << 19,), np.dtype(np.uint8)) for _ in range(8)]
    del arrays
    assert pool._held <= 1 << 20


def test_a_block_comes_back_from_a_cycle_and_from_other_holders() -> None:
    pool = BlockPool()
    holder: list[object] = [pool.empty((300, 300), np.dtype(np.float32))]
    holder.append(holder)
    del holder
    gc.collect()
    assert pool._held == size_class(300 * 300 * 4)
    exported = memoryview(pool.maker((300, 300), np.dtype(np.float32))((300, 300), np.dtype(np.float32)))
    assert pool._held == 0
    del exported
    assert pool._held == size_class(300 * 300 * 4)


def test_small_results_are_left_to_numpy() -> None:
    assert BlockPool().maker((10, 10), np.dtype(np.float32)) is np.empty


def test_blocks_side_by_side_do_not_overlap() -> None:
    """Blocks that are shorter than a huge page share one: each has its own bytes, and comes back by itself."""
    pool = BlockPool()
    sizes = [300_000, 1_000_000, 262_144, 2_000_000, 1_700_000, 40_000, 3_000_000] * 4
    arrays = [pool.empty((n,), np.dtype(np.uint8)) for n in sizes]
    for i, a in enumerate(arrays):
        a[:] = i
    assert all((a == i).all() for i, a in enumerate(arrays))
    assert all(a.__array_interface__["data"][0] % 4096 == 0 for a in arrays)
    place = arrays[4].__array_interface__["data"][0]
    arrays[4] = arrays[11] = arrays[0]
    again = pool.empty((1_700_000,), np.dtype(np.uint8))
    again[:] = 99
    assert again.__array_interface__["data"][0] == place or again.__array_interface__["data"][0] % 4096 == 0
    assert all((a == i).all() for i, a in enumerate(arrays) if i not in (4, 11))


def test_memory_that_the_system_does_not_have() -> None:
    for shape in ((1 << 48,), (1 << 40, 1 << 40)):
        with pytest.raises(OutOfMemoryError, match=r"the system has no [\d,]+ bytes.*\[X121\]") as error:
            BlockPool().empty(shape, np.dtype(np.float32))
        assert isinstance(error.value, RunError | MemoryError)
        with pytest.raises(OutOfMemoryError):
            st.empty(shape)
        with pytest.raises(MemoryError):
            (st.ones(shape) + 1).numpy()
