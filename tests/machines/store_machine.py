"""The disk store while its files are moved, cut and swapped by others: a read gives what was put, or nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from strata.cache import DiskStore, digest
from strata.cache.store import MAGIC

NAMES = [digest(str(i)) for i in range(4)]
KEYS = st.sampled_from(NAMES)
PAYLOADS = st.binary(max_size=40)
STORES = st.integers(0, 1)


@dataclass(frozen=True)
class Held:
    """What lies under a name: an entry and the name it was put under, or something else."""

    kind: str  # entry, broken, old, strange
    key: str = ""
    payload: bytes = b""
    is_loose: bool = False  # others may write it

    def is_good(self, name: str) -> bool:
        return self.kind == "entry" and self.key == name and not self.is_loose


class StoreMachine(RuleBasedStateMachine):
    """Two stores on one folder, as of two processes, beside a dict of what lies under each name."""

    slice = 60

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.stores = [DiskStore(self.folder / "objects") for _ in range(2)]
        self.held: dict[str, Held] = {}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def path(self, key: str) -> Path:
        return self.folder / "objects" / key[:2] / f"{key}.bin"

    def clear(self, key: str) -> Path:
        """A place with nothing in it."""
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        self.held.pop(key, None)
        return path

    # what programs do

    @rule(key=KEYS, payload=PAYLOADS, which=STORES)
    def put(self, key: str, payload: bytes, which: int) -> None:
        assert self.stores[which].put(key, payload, {"kind": "test", "name": key})
        self.held[key] = Held("entry", key, payload)

    @rule(key=KEYS, which=STORES)
    def get(self, key: str, which: int) -> None:
        held = self.held.get(key)
        found = self.stores[which].get(key)
        if held is None or not held.is_good(key):
            assert found is None
            if held is not None and not held.is_loose and held.kind in ("entry", "broken"):
                del self.held[key]  # it was removed
        else:
            assert found == held.payload

    @rule(key=KEYS, payloads=st.lists(PAYLOADS, min_size=2, max_size=4))
    def put_by_threads(self, key: str, payloads: list[bytes]) -> None:
        threads = [
            threading.Thread(target=self.stores[i % 2].put, args=(key, payload)) for i, payload in enumerate(payloads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = self.stores[0].get(key)
        assert found in payloads
        self.held[key] = Held("entry", key, found or b"")

    @rule(key=KEYS, payload=PAYLOADS)
    def make(self, key: str, payload: bytes) -> None:
        with self.stores[0].making(key):
            if self.stores[0].get(key) is None:
                self.put(key, payload, 0)
            else:
                self.get(key, 0)

    @rule(which=STORES)
    def verify(self, which: int) -> None:
        good, bad = self.stores[which].verify()
        expected = {k for k, h in self.held.items() if not h.is_good(k) and (h.kind != "old" or h.is_loose)}
        assert good == sum(h.is_good(k) for k, h in self.held.items())
        assert set(bad) == expected
        for key in bad:
            del self.held[key]

    @rule(count=st.integers(0, 4))
    def prune(self, count: int) -> None:
        removed = self.stores[0].prune(count * 200)
        sizes = {k: self.path(k).lstat().st_size for k in self.held if os.path.lexists(self.path(k))}
        assert sum(sizes.values()) <= count * 200
        assert removed >= 0
        self.held = {k: h for k, h in self.held.items() if k in sizes}

    # what others do to the files

    @rule(a=KEYS, b=KEYS)
    def swap(self, a: str, b: str) -> None:
        if a != b and a in self.held and b in self.held:
            spare = self.folder / "spare"
            self.path(a).rename(spare)
            self.path(b).rename(self.path(a))
            spare.rename(self.path(b))
            self.held[a], self.held[b] = self.held[b], self.held[a]

    @rule(a=KEYS, b=KEYS, how=st.sampled_from(["rename", "copy", "link"]))
    def give_another_name(self, a: str, b: str, how: str) -> None:
        if a == b or a not in self.held or self.held[a].kind == "strange":
            return
        held = self.held[a]
        path = self.clear(b)
        match how:
            case "rename":
                self.path(a).rename(path)
                del self.held[a]
            case "copy":
                shutil.copy(self.path(a), path)
            case _:
                path.write_bytes(self.path(a).read_bytes())
                os.chmod(path, self.path(a).stat().st_mode)
        self.held[b] = held

    @rule(key=KEYS, at=st.integers(0, 400), bit=st.integers(0, 7), cut=st.booleans())
    def damage(self, key: str, at: int, bit: int, cut: bool) -> None:
        held = self.held.get(key)
        if held is None or held.kind != "entry":
            return
        data = bytearray(self.path(key).read_bytes())
        at %= len(data)
        if cut:
            del data[at:]
        else:
            data[at] ^= 1 << bit
        self.path(key).write_bytes(bytes(data))
        is_family = data.startswith(b"strata-entry-") and not data.startswith(MAGIC) and b"\n" in data[:21]
        self.held[key] = Held("old" if is_family else "broken", is_loose=held.is_loose)

    @rule(key=KEYS)
    def leave_an_old_entry(self, key: str) -> None:
        rest = (2).to_bytes(4, "little") + b"{}" + b"old"
        self.clear(key).write_bytes(b"strata-entry-1\n" + hashlib.sha256(rest).digest() + rest)
        self.path(key).chmod(0o600)
        self.held[key] = Held("old")

    @rule(key=KEYS, kind=st.sampled_from(["pipe", "folder", "nowhere", "device"]))
    def put_something_in_the_way(self, key: str, kind: str) -> None:
        path = self.clear(key)
        match kind:
            case "pipe":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "nowhere":
                path.symlink_to(self.folder / "nothing")
            case _:
                path.symlink_to("/dev/zero")
        self.held[key] = Held("strange")

    @rule(key=KEYS)
    def let_others_write(self, key: str) -> None:
        held = self.held.get(key)
        if held is not None and held.kind != "strange":
            self.path(key).chmod(0o666)
            self.held[key] = Held(held.kind, held.key, held.payload, is_loose=True)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "held"):
            return
        store = self.stores[0]
        shown = {e.key: e for e in store.entries()}
        assert set(shown) == set(self.held)
        for key in NAMES:
            held = self.held.get(key)
            if held is not None and held.is_good(key):
                assert key in store
                assert not shown[key].trouble
            elif held is not None and held.kind != "broken":
                assert key not in store
                assert shown[key].trouble
