"""The disk cache under attack: killed writers, many processes, damaged files, folders that cannot be written."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from strata.cache import DiskStore, digest
from strata.mir import Graph
from strata.runtime import AotCache

WRITER = """
import sys
from strata.cache import DiskStore, digest
store = DiskStore(sys.argv[1])
i = int(sys.argv[2])
print("ready", flush=True)
while True:
    i += 1
    key = digest(str(i % 50))
    store.put(key, key.encode() * (1 + i % 700), {"number": i % 50})
"""


def is_right(key: str, payload: bytes) -> bool:
    return len(payload) % 64 == 0 and payload == key.encode() * (len(payload) // 64)


def test_killed_writers_leave_nothing_wrong(tmp_path, many, seed) -> None:
    rng = random.Random(seed)
    root = tmp_path / "cache"
    for round_ in range(many(6, 1000)):
        command = [sys.executable, "-c", WRITER, str(root), str(round_ * 17)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(rng.random() * 0.05)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        store = DiskStore(root)
        for i in range(50):
            payload = store.get(digest(str(i)))
            assert payload is None or is_right(digest(str(i)), payload)
        assert not [e for e in store.events if e.what == "damaged"]
    good, bad = DiskStore(root).verify()
    assert good > 0
    assert bad == []
    store = DiskStore(root)
    for path in root.glob("??/.new-*"):
        os.utime(path, (1, 1))
    store.prune()
    assert not list(root.glob("??/.new-*"))  # what the dead left behind is gone


PROGRAM = """
import sys, json
import numpy as np
from strata import ops
from strata.cache import default_store
from strata.core import sym
from strata.mir import Graph
from strata.runtime import Session
g = Graph("shared")
n = sym("N", 1, 64)
x, w = g.input("x", (n, 24)), g.param("w", (24, 24))
h = ops.layer_norm(ops.gelu(x @ w), ops.mean(w, axis=0), ops.mean(w, axis=1))
c = Session("cpu").compile(g.outputs(ops.softmax(h @ w, axis=-1), ops.cumsum(x, axis=0), ops.sort(h, axis=-1)))
rng = np.random.default_rng(0)
c.set_param("w", rng.standard_normal((24, 24)).astype(np.float32))
outs = c.run(x=rng.standard_normal((7, 24)).astype(np.float32))
puts = [e.key for e in default_store().events if e.what == "put"]
print(json.dumps([[o.tobytes().hex()[:256] for o in outs], puts]))
"""


def run_program(cache: Path, **limits) -> subprocess.CompletedProcess:
    env = {**os.environ, "STRATA_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, check=False, **limits
    )


def answer(done: subprocess.CompletedProcess) -> tuple[list[str], list[str]]:
    assert done.returncode == 0, done.stderr
    outs, puts = json.loads(done.stdout)
    return outs, puts


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[str]:
    return answer(run_program(tmp_path_factory.mktemp("first")))[0]


def test_many_processes_on_a_cold_cache(tmp_path, many, expected) -> None:
    env = {**os.environ, "STRATA_CACHE_DIR": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        for _ in range(many(4, 32))
    ]
    made: Counter[str] = Counter()
    for one in started:
        out, err = one.communicate(timeout=600)
        outs, puts = answer(subprocess.CompletedProcess([], one.returncode, out, err))
        assert outs == expected
        made.update(puts)
    assert max(made.values()) <= 2, made.most_common(3)


def test_damaged_files_are_made_again(tmp_path, many, expected, seed) -> None:
    rng = random.Random(seed)
    assert answer(run_program(tmp_path))[0] == expected
    for _ in range(many(2, 50)):
        for path in sorted((tmp_path / "objects").glob("??/*.bin")):
            data = bytearray(path.read_bytes())
            match rng.randrange(4):
                case 0:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                case 1:
                    del data[rng.randrange(len(data)) :]
                case 2:
                    data = bytearray(rng.randbytes(rng.randrange(200)))
                case _:
                    pass
            path.write_bytes(bytes(data))
        done = run_program(tmp_path)
        assert answer(done)[0] == expected
        assert "Traceback" not in done.stderr
    DiskStore(tmp_path / "objects").verify()  # removes what nobody asked for
    assert DiskStore(tmp_path / "objects").verify()[1] == []


def test_entries_in_each_others_place_are_made_again(tmp_path, many, expected, seed) -> None:
    """Good entries, each under the name of another: by content, by name, and as another name of the same file."""
    rng = random.Random(seed)
    assert answer(run_program(tmp_path))[0] == expected
    for round_ in range(many(3, 50)):
        paths = sorted((tmp_path / "objects").glob("??/*.bin"))
        held = [path.read_bytes() for path in paths]
        rng.shuffle(held)
        for path, data in zip(paths, held, strict=True):
            path.unlink()
            if round_ % 3 == 0:
                path.write_bytes(data)
            else:
                (tmp_path / "held").mkdir(exist_ok=True)
                kept = tmp_path / "held" / digest(data)
                kept.write_bytes(data)
                path.hardlink_to(kept) if round_ % 3 == 1 else path.symlink_to(kept)
        done = run_program(tmp_path)
        assert answer(done)[0] == expected
        assert "Traceback" not in done.stderr


def _two_plans(folder: Path) -> list[float]:
    """Results of two programs with one signature, from an AOT folder."""
    cache = AotCache(folder)
    found = []
    for name, factor in (("double", 2.0), ("triple", 3.0)):
        graph = Graph("scaled")
        x = graph.input("x", (4,))
        graph.outputs(x * factor)
        made = cache.compile_hir_cached(name, lambda graph=graph: graph, "cpu")
        found.append(float(made.run(x=np.ones(4, np.float32))[0][0]))
    return found


def test_plans_of_an_aot_folder_in_each_others_place_are_made_again(tmp_path) -> None:
    assert _two_plans(tmp_path / "aot") == [2.0, 3.0]
    first, second = sorted((tmp_path / "aot").glob("??/*.bin"))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    assert _two_plans(tmp_path / "aot") == [2.0, 3.0]
    assert AotCache(tmp_path / "aot").store.verify() == (2, [])


def test_a_full_disk_is_no_cache(tmp_path, expected) -> None:
    import resource

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

    done = run_program(tmp_path, preexec_fn=small_files)
    assert answer(done)[0] == expected
    assert not list((tmp_path / "objects").glob("??/*"))


def mounted(cache: Path, options: str) -> subprocess.CompletedProcess:
    """The program with a file system of its own as cache, which no other process sees and which ends with it."""
    env = {**os.environ, "STRATA_CACHE_DIR": str(cache), "STRATA_LOG": "warning"}
    if "remount" in options:
        mount = f"mount -t tmpfs tmpfs {cache} && mount -o {options} {cache}"
    else:
        mount = f"mount -t tmpfs -o {options} tmpfs {cache}"
    script = f'{mount} || exit 77; "$0" -c "$1"; code=$?; ls {cache}/objects >&2; exit $code'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this user may not mount")
    return done


@pytest.mark.skipif(shutil.which("unshare") is None, reason="a file system of our own needs `unshare`")
@pytest.mark.parametrize("options", ["size=4k", "size=24k", "size=64k", "size=1m,nr_inodes=3", "remount,ro"])
def test_a_file_system_that_is_full_or_read_only_is_no_cache(tmp_path, expected, options: str) -> None:
    done = mounted(tmp_path, options)
    assert answer(done)[0] == expected
    assert "Traceback" not in done.stderr
    assert done.stderr.count(f"cache {tmp_path}") == 1, done.stderr  # one warning


def test_folders_that_cannot_be_made_are_no_cache(tmp_path, expected) -> None:
    (tmp_path / "objects").write_text("in the way")
    assert answer(run_program(tmp_path))[0] == expected
    if os.getuid() != 0:  # the superuser may write anywhere
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        assert answer(run_program(locked))[0] == expected


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS", "EACCES", "EIO", "EDQUOT"])
def test_failing_writes_turn_the_store_off_once(tmp_path, monkeypatch, caplog, error: str) -> None:
    store = DiskStore(tmp_path)

    def fail(*args, **kwargs):
        raise OSError(getattr(errno, error), os.strerror(getattr(errno, error)))

    key = digest("x")
    store.put(key, b"before")
    monkeypatch.setattr(os, "replace", fail)
    assert not store.put(digest("y"), b"data")
    assert not store.put(digest("z"), b"data")
    with store.making(key):
        pass
    assert store.get(key) == b"before"
    assert len([r for r in caplog.records if "is off" in r.message]) == 1
    assert not list(tmp_path.glob("??/.new-*"))
