"""The disk store: what goes in comes out, damage is noticed, limits hold, failures are quiet."""

import contextlib
import errno
import hashlib
import multiprocessing
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from strata.cache import DiskStore, default_store, digest
from strata.cache import store as store_module
from strata.cache.store import _hands
from strata.config import using
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


def _place(root: Path, key: str) -> Path:
    return root / key[:2] / f"{key}.bin"


def _two(tmp_path: Path) -> tuple[DiskStore, str, str]:
    store, other = DiskStore(tmp_path), digest("other")
    store.put(KEY, b"mine", {"name": "mine"})
    store.put(other, b"theirs", {"name": "theirs"})
    return store, KEY, other


def test_an_entry_is_good_under_its_own_name_only(tmp_path, caplog) -> None:
    store, mine, other = _two(tmp_path)
    a, b = _place(tmp_path, mine), _place(tmp_path, other)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert mine not in store
    assert [bool(e.trouble) for e in store.entries()] == [True, True]
    assert [e.trouble for e in store.entries() if e.key == mine] == [f"it is the entry of {other[:12]}"]
    assert store.get(mine) is None
    assert not a.exists()
    assert f"misplaced and was removed: it is the entry of {other[:12]}" in caplog.text
    assert store.verify() == (0, [other])
    assert store.put(mine, b"again")
    assert store.get(mine) == b"again"


def test_a_key_that_was_written_over_is_noticed(tmp_path) -> None:
    """The checksum covers the key: an entry cannot be given another one."""
    store, mine, other = _two(tmp_path)
    data = _place(tmp_path, other).read_bytes()
    _place(tmp_path, mine).write_bytes(data.replace(bytes.fromhex(other), bytes.fromhex(mine)))
    assert store.get(mine) is None
    assert [e.what for e in store.events if e.key == mine] == ["put", "damaged"]


@pytest.mark.parametrize("how", ["rename", "copy", "link", "symlink"])
def test_an_entry_under_another_name_is_absent(tmp_path, how: str) -> None:
    store, mine, other = _two(tmp_path)
    a, b = _place(tmp_path, mine), _place(tmp_path, other)
    a.unlink()
    match how:
        case "rename":
            b.rename(a)
        case "copy":
            a.write_bytes(b.read_bytes())
        case "link":
            a.hardlink_to(b)
        case "symlink":
            a.symlink_to(b)
    assert store.get(mine) is None
    assert mine not in store
    assert store.get(other) == (None if how == "rename" else b"theirs")


def test_an_entry_in_another_folder_is_not_good(tmp_path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEY, b"x")
    wrong = tmp_path / "00" / f"{KEY}.bin"
    wrong.parent.mkdir()
    _place(tmp_path, KEY).rename(wrong)
    (entry,) = store.entries()
    assert entry.trouble
    assert store.verify() == (0, [KEY])


def test_entries_of_an_older_format_are_misses(tmp_path, caplog) -> None:
    rest = (2).to_bytes(4, "little") + b"{}" + b"payload"
    old = b"strata-entry-1\n" + hashlib.sha256(rest).digest() + rest
    store, path = DiskStore(tmp_path), _place(tmp_path, KEY)
    path.parent.mkdir()
    path.write_bytes(old)
    assert store.get(KEY) is None
    assert KEY not in store
    assert [(e.what, e.reason) for e in store.events] == [("miss", "it has another format")]
    assert not caplog.records
    assert [e.trouble for e in store.entries()] == ["it has another format"]
    assert store.verify() == (0, [])
    assert path.read_bytes() == old  # it is the other version's
    assert store.put(KEY, b"new")
    assert store.get(KEY) == b"new"


def _in_the_way(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # names of sockets are short
                made.bind(path.name)
        case "device":
            path.symlink_to("/dev/zero")
        case "nowhere":
            path.symlink_to(path.parent / "nothing")
        case "folder":
            path.mkdir()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "nowhere", "folder"])
def test_what_is_no_file_is_no_entry(tmp_path, kind: str) -> None:
    store, path = DiskStore(tmp_path), _place(tmp_path, KEY)
    _in_the_way(path, kind)
    assert store.get(KEY) is None
    assert KEY not in store
    (entry,) = store.entries()
    assert entry.trouble
    assert store.prune() == 0
    assert store.verify() == (0, [KEY])
    _in_the_way(path, kind)
    assert store.put(KEY, b"new")
    assert store.get(KEY) == b"new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "nowhere", "folder"])
def test_what_is_no_file_is_no_lock(tmp_path, kind: str) -> None:
    store = DiskStore(tmp_path)
    _in_the_way(tmp_path / "locks" / KEY, kind)
    with store.making(KEY):
        assert store.put(KEY, b"made")
    assert store.get(KEY) == b"made"
    assert not (tmp_path / "locks" / "nothing").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no owners of files")
@pytest.mark.parametrize("where", ["around", "folder", "inner", "entry"])
@pytest.mark.parametrize("how", ["group", "others", "owner"])
def test_what_others_can_write_is_not_read(tmp_path, caplog, monkeypatch, where: str, how: str) -> None:
    monkeypatch.setattr("strata.cache.store._is_own_group", lambda _: False)
    root = tmp_path / "cache" / "objects"
    assert DiskStore(root).put(KEY, b"x")
    entry = _place(root, KEY)
    victim = {"around": root.parent, "folder": root, "inner": entry.parent, "entry": entry}[where]
    if how == "owner":
        if os.geteuid() != 0:
            pytest.skip("only the superuser can give files away")
        os.chown(victim, 12345, 12345)
    else:
        victim.chmod(victim.stat().st_mode | (0o020 if how == "group" else 0o002))
    store = DiskStore(root)
    assert store.get(KEY) is None
    assert KEY not in store
    assert all(e.trouble for e in store.entries())
    if where in ("around", "folder"):
        assert store.verify() == (0, [])
        assert not store.put(KEY, b"y")
        assert str(victim) in str(store.trouble())
        assert len([r for r in caplog.records if "is off" in r.message]) == 1
        assert store.events[0].what == "off"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no owners of files")
@pytest.mark.parametrize(
    ("user", "group", "members", "is_used"),
    [
        ((1000, "ada", 1000), (1000, "ada"), [], True),
        ((1000, "ada", 1000), (1000, "ada"), ["ada"], True),
        ((1000, "ada", 1000), (1000, "ada"), ["bob"], False),
        ((1000, "ada", 100), (100, "users"), [], False),
        ((1000, "ada", 1000), (2000, "lab"), [], False),
        ((0, "root", 0), (0, "root"), [], False),
    ],
)
def test_a_group_of_this_user_alone_is_nobody_else(monkeypatch, user, group, members, is_used: bool) -> None:
    """As where each user has a group, and what is made can be written by it (umask 002)."""
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    (uid, name, own), (gid, group_name) = user, group
    passwd = pwd.struct_passwd((name, "x", uid, own, "", "/", "/bin/sh"))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(pwd, "getpwuid", {uid: passwd}.__getitem__)
    monkeypatch.setattr(grp, "getgrgid", {gid: grp.struct_group((group_name, "x", gid, members))}.__getitem__)
    mode = stat.S_IFDIR | 0o775
    assert (_hands(os.stat_result((mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))) is None) == is_used
    assert _hands(os.stat_result((mode, 1, 1, 1, uid, 7, 0, 0, 0, 0))) is not None
    assert _hands(os.stat_result((mode | 2, 1, 1, 1, uid, gid, 0, 0, 0, 0))) is not None


def test_a_folder_among_everybodys_is_used(tmp_path) -> None:
    """As below the folder of temporary files, where nobody can move what belongs to another."""
    tmp_path.chmod(0o1777)
    store = DiskStore(tmp_path / "cache")
    assert store.put(KEY, b"x")
    assert store.get(KEY) == b"x"


def test_a_loose_umask_does_not_turn_the_store_off(tmp_path) -> None:
    before = os.umask(0)
    try:
        store = DiskStore(tmp_path / "strata" / "objects")
        assert store.put(KEY, b"x")
    finally:
        os.umask(before)
    assert store.get(KEY) == b"x"


def test_the_default_folder_is_made_private_again(tmp_path, monkeypatch) -> None:
    """Folders that were made under a loose umask, before anybody looked at their mode."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "strata"
    root.mkdir()
    root.chmod(0o775)
    with using(cache_dir=root):
        assert default_store().put(KEY, b"x")
        assert default_store().get(KEY) == b"x"
    assert stat.S_IMODE(root.stat().st_mode) == 0o755


def test_trouble_is_found_by_writing(tmp_path, monkeypatch) -> None:
    store = DiskStore(tmp_path / "c")
    assert store.trouble() is None
    assert not list((tmp_path / "c").iterdir())
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert store.trouble() == os.strerror(errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)  # as file systems do that find room for data late
    assert store.trouble() == os.strerror(errno.ENOSPC)
    assert not list((tmp_path / "c").iterdir())


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


def _never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a lock is an error."""

    def refuse(seconds: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr("strata.cache.store.time.sleep", refuse)


def test_an_entry_can_be_made_while_another_is(tmp_path, monkeypatch) -> None:
    _never_waits(monkeypatch)
    store, other = DiskStore(tmp_path), KEY[:2] + "0" * 62  # keys that begin alike share nothing
    with store.making(KEY), store.making(other):
        assert len(list((tmp_path / "locks").iterdir())) == 2
    assert not list((tmp_path / "locks").iterdir())


def test_a_lock_that_a_child_inherited_is_released(tmp_path, monkeypatch) -> None:
    _never_waits(monkeypatch)
    store = DiskStore(tmp_path)
    with store.making(KEY):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        child.start()
    try:
        with store.making(KEY):
            pass
    finally:
        child.kill()
        child.join()


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
    _never_waits(monkeypatch)
    with store.making(KEY):
        assert store.put(KEY, b"made")
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
