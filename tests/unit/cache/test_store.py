"""The disk store: what goes in comes out, damage is noticed, limits hold, failures are quiet."""

import errno
import multiprocessing
import os
import stat
import time

import pytest

from strata.cache import DiskStore, digest
from strata.cache import store as store_module
from strata.errors import FileError

KEY = digest("a", "b")


def test_round_trip_and_description(tmp_path) -> None:
    store = DiskStore(tmp_path / "c")
    assert store.get(KEY) is None
    assert KEY not in store
    assert store.put(KEY, b"payload" * 1000, {"kind": "kernel", "name": "k0"})
    assert store.get(KEY) == b"payload" * 1000
    assert KEY in store
    (entry,) = store.entries()
    assert entry.key == KEY
    assert entry.about == {"kind": "kernel", "name": "k0"}
    assert entry.size > 7000


def test_folder_is_private(tmp_path) -> None:
    store = DiskStore(tmp_path / "c")
    store.put(KEY, b"x")
    assert stat.S_IMODE(os.stat(tmp_path / "c").st_mode) == 0o700


def test_parts_of_a_key_do_not_run_together() -> None:
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "grow", "header"])
def test_damage_counts_as_absent_and_heals(tmp_path, damage: str) -> None:
    store = DiskStore(tmp_path)
    store.put(KEY, bytes(range(256)) * 8)
    (path,) = tmp_path.glob("??/*.bin")
    data = bytearray(path.read_bytes())
    match damage:
        case "flip":
            data[-5] ^= 1
        case "cut":
            del data[-9:]
        case "empty":
            data.clear()
        case "grow":
            data += b"!"
        case "header":
            data[3] ^= 255
    path.write_bytes(bytes(data))
    assert store.get(KEY) is None
    assert KEY not in store
    assert store.put(KEY, b"new")
    assert store.get(KEY) == b"new"


def test_verify_names_damaged_entries(tmp_path) -> None:
    store = DiskStore(tmp_path)
    keys = [digest(str(i)) for i in range(5)]
    for key in keys:
        store.put(key, b"data")
    victim = tmp_path / keys[2][:2] / f"{keys[2]}.bin"
    victim.write_bytes(victim.read_bytes()[:-1])
    assert store.verify() == (4, [keys[2]])


def test_least_recently_used_go_first(tmp_path) -> None:
    store = DiskStore(tmp_path)
    keys = [digest(str(i)) for i in range(4)]
    for age, key in enumerate(keys):
        store.put(key, b"x" * 1000)
        os.utime(tmp_path / key[:2] / f"{key}.bin", (1000 + age, 1000 + age))
    store.prune(2500)
    assert [key in store for key in keys] == [False, False, True, True]


def test_stale_temporary_files_are_removed(tmp_path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEY, b"x")
    leftover = tmp_path / KEY[:2] / ".new-dead"
    leftover.write_bytes(b"half")
    os.utime(leftover, (1, 1))
    store.prune()
    assert not leftover.exists()
    assert KEY in store


def test_a_file_in_the_way_turns_the_store_off(tmp_path, caplog) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    store = DiskStore(blocker / "cache")
    assert not store.put(KEY, b"x")
    assert not store.put(KEY, b"x")
    assert store.get(KEY) is None
    assert len([r for r in caplog.records if "cache" in r.message]) == 1


def test_bad_keys_are_refused(tmp_path) -> None:
    with pytest.raises(FileError):
        DiskStore(tmp_path).get("../../etc/passwd")


def test_export_copies_entries(tmp_path) -> None:
    store = DiskStore(tmp_path / "a")
    store.put(KEY, b"x", {"name": "k"})
    assert store.export(tmp_path / "b") == 1
    assert DiskStore(tmp_path / "b").get(KEY) == b"x"


def _make(root: str, log: str) -> None:
    store = DiskStore(root)
    with store.making(KEY):
        if store.get(KEY) is None:
            with open(log, "a") as file:
                file.write("made\n")
            store.put(KEY, b"result")


def test_processes_make_an_entry_once(tmp_path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_make, args=(str(tmp_path / "c"), str(tmp_path / "log"))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (tmp_path / "log").read_text() == "made\n"


def test_an_entry_can_be_made_while_another_is(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("strata.cache.store.LOCK_SECONDS", 5)
    store, other = DiskStore(tmp_path), KEY[:2] + "0" * 62  # keys that begin alike share nothing
    start = time.monotonic()
    with store.making(KEY), store.making(other):
        assert len(list((tmp_path / "locks").iterdir())) == 2
    assert time.monotonic() - start < 4
    assert not list((tmp_path / "locks").iterdir())


def test_a_lock_that_a_child_inherited_is_released(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("strata.cache.store.LOCK_SECONDS", 5)
    store = DiskStore(tmp_path)
    with store.making(KEY):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        child.start()
    start = time.monotonic()
    with store.making(KEY):
        pass
    child.kill()
    child.join()
    assert time.monotonic() - start < 4


def test_locks_of_dead_processes_are_pruned(tmp_path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEY, b"x")
    (tmp_path / "locks").mkdir()
    old = tmp_path / "locks" / KEY
    old.touch()
    os.utime(old, (0, 0))
    store.prune()
    assert not old.exists()
    assert store.get(KEY) == b"x"


@pytest.mark.skipif(store_module.fcntl is None, reason="this system has no file locks")
def test_a_file_system_without_locks_is_not_waited_for(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    store = DiskStore(tmp_path)
    monkeypatch.setattr(store_module.fcntl, "flock", refuse)
    start = time.monotonic()
    with store.making(KEY):
        assert store.put(KEY, b"made")
    assert time.monotonic() - start < 5
    assert store.get(KEY) == b"made"


def test_many_processes_that_add_little_stay_near_the_limit(tmp_path) -> None:
    limit = 64 << 10
    for i in range(300):  # each as a process would: a store of its own
        DiskStore(tmp_path, limit).put(digest(str(i)), b"x" * 1000)
    assert sum(f.stat().st_size for f in tmp_path.glob("??/*.bin")) < 2 * limit


def test_times_of_a_wrong_clock_are_set_right(tmp_path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEY, b"x")
    (path,) = tmp_path.glob("??/*.bin")
    future = time.time() + 1e7
    os.utime(path, (future, future))
    assert store.get(KEY) == b"x"
    assert path.stat().st_mtime < future - 1e6
