"""Memory in pages of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from strata.core import HUGE_PAGE, forget_pages, new_pages
from strata.io import release_pages


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("size", [1, 4096, 100_000, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 5 * HUGE_PAGE + 12_345])
def test_bytes_are_there_and_large_ones_start_at_a_huge_page(size: int) -> None:
    made = new_pages(size)
    assert made.shape == (size,)
    assert not made.any()
    made[:] = 7
    assert _address(made) % (HUGE_PAGE if size >= HUGE_PAGE else 4096) == 0


def test_pages_are_only_forgotten_where_a_file_has_them(tmp_path: Path) -> None:
    """What was written is nowhere else, whether the view of it is for reading or not."""
    path = tmp_path / "numbers"
    written = np.arange(100_000, dtype=np.int64)
    written.tofile(path)
    for mode in ("r", "c", "r+"):
        mapped = np.memmap(path, np.int64, mode)  # type: ignore[call-overload]
        if mode == "c":
            mapped[5] = 7
        forget_pages(mapped)
        release_pages(mapped[100:])
        assert np.array_equal(mapped[6:], written[6:])
        assert mapped[5] == (7 if mode == "c" else 5)
        behind = np.memmap(path, np.int64, mode, offset=8 * 600)  # type: ignore[call-overload]
        forget_pages(behind[1000:])
        assert np.array_equal(behind, mapped[600:])
    made = new_pages(100_000)
    made[:] = 7
    made.flags.writeable = False
    forget_pages(made)
    release_pages(made)
    assert (made == 7).all()


def _huge_bytes() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("AnonHugePages"))


def _has_huge_pages() -> bool:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            return "[never]" not in file.read()
    except OSError:
        return False


@pytest.mark.skipif(not _has_huge_pages(), reason="the system gives no huge pages")
def test_large_memory_is_in_huge_pages() -> None:
    before = _huge_bytes()
    made = new_pages(8 * HUGE_PAGE + 4096)
    made[:] = 1
    assert _huge_bytes() - before >= HUGE_PAGE  # as many as the system has free
    assert _huge_bytes() - before <= 8 * HUGE_PAGE


FORK = """
import os
import numpy as np
import strata as st

result = st.jit(lambda x: x + 1.0)(np.ones((1024, 1024), "f")).data()
child = os.fork()
if child == 0:
    result[:] = 9
    os._exit(0)
os.waitpid(child, 0)
print(result.min(), result.max())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_does_not_write_into_its_parents_results() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout == "2.0 2.0\n"
