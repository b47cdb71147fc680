"""The functions behind `strata cache`."""

from __future__ import annotations

import os

import pytest

import strata as st
from strata.cache import DiskStore, digest
from strata.config import using
from strata.errors import FileError


@pytest.fixture
def store(tmp_path):
    with using(cache_dir=tmp_path):
        made = st.cache.default_store()
        for i, name in enumerate(("softmax", "matmul", "softmax")):
            made.put(
                digest(str(i)), b"x" * 100 * (i + 1), {"kind": "kernel", "text": f"kernel @{name}", "target": f"cpu{i}"}
            )
        yield made


def test_ls_lists_everything(store) -> None:
    found = st.cache.ls()
    assert len(found) == 3
    assert found.bytes == sum(e.size for e in found)
    assert str(found).splitlines()[0].startswith("3 entries, ")
    assert "kernel kernel @matmul" in str(found)


def test_why_explains(store) -> None:
    text = st.cache.why("softmax")
    assert "2 entries for kernel kernel @softmax: they differ in target" in text
    assert "target: cpu0" in text
    assert "put" in st.cache.why(digest("1")[:12])
    assert "never compiled here" in st.cache.why("conv9")
    store.get(digest("absent"))
    assert "miss" in st.cache.why(digest("absent")[:16])


def test_verify_prune_and_export(store, tmp_path) -> None:
    victim = tmp_path / "objects" / digest("1")[:2] / f"{digest('1')}.bin"
    victim.write_bytes(victim.read_bytes()[:-1])
    assert st.cache.verify() == (2, [digest("1")])
    assert st.cache.export(tmp_path / "copy") == 2
    assert len(list(DiskStore(tmp_path / "copy" / "objects").entries())) == 2
    assert st.cache.prune(0) > 0
    assert len(st.cache.ls()) == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError):
        st.cache.export(tmp_path / "file")


def test_events_are_bounded(tmp_path) -> None:
    store = DiskStore(tmp_path)
    for i in range(1000):
        store.get(digest(str(i)))
    assert len(store.events) == 256


def test_a_store_can_be_used_by_a_reader_alone(tmp_path, store) -> None:
    for folder, _, files in os.walk(tmp_path / "objects"):
        for file in files:
            os.chmod(os.path.join(folder, file), 0o400)
    assert DiskStore(tmp_path / "objects").get(digest("2")) == b"x" * 300
