"""Members as processes, on one or several machines: TCP connections between each pair.

The first member listens at an address that all know; the others tell it where they listen, and learn of each other.
Messages are lengths, a head and raw numbers: nothing that is received is ever run.
"""

from __future__ import annotations

import hmac
import json
import queue
import socket
import struct
import time
from threading import Thread
from typing import Any, Final

from strata.distributed.group import Group
from strata.errors import OptionError, RunError

MOST_HEAD: Final = 1 << 16
MOST_BODY: Final = 1 << 36
GREETING: Final = 5.0  # seconds that a caller has to say who it is
_LENGTHS: Final = struct.Struct("<QQ")


class SocketTransport:
    """One member's connections to all others."""

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self.rank, self.size = rank, len(peers) + 1
        self._peers = peers
        self._lines: dict[int, queue.SimpleQueue[Any]] = {to: queue.SimpleQueue() for to in peers}
        self._broken: dict[int, OSError] = {}
        self._threads = [Thread(target=self._sending, args=(to,), daemon=True) for to in peers]
        for thread in self._threads:
            thread.start()

    def send(self, to: int, head: bytes, body: bytes) -> None:
        self._lines[to].put((head, body))

    def _sending(self, to: int) -> None:
        while (message := self._lines[to].get()) is not None:
            try:
                _put(self._peers[to], *message)
            except OSError as error:
                self._broken[to] = error
                return

    def receive(self, source: int) -> tuple[bytes, Any]:
        try:
            return _get(self._peers[source])
        except TimeoutError:
            raise RunError(
                f"rank {self.rank} waited {self._peers[source].gettimeout():g} s for rank {source}", code="X611"
            ) from None
        except OSError as error:
            raise RunError(f"rank {self.rank} lost rank {source}: {error}", code="X611") from None

    def close(self) -> None:
        """Close the connections once everything sent has arrived."""
        for line in self._lines.values():
            line.put(None)
        for thread in self._threads:
            thread.join()
        for peer in self._peers.values():
            peer.close()


def connect(rank: int, size: int, address: str, *, secret: str = "", timeout: float = 60.0) -> Group:
    """Join a group of processes as one of its members. `address` is host:port of rank 0, the same for all.

    With a `secret`, only members that know it are let in. Whoever waits longer than `timeout` seconds gets an error.
    """
    host, _, port = address.rpartition(":")
    if not 0 <= rank < size:
        raise OptionError(f"group: there is no rank {rank} among {size}", code="O630")
    if not host or not port.isdigit() or int(port) > 65535:
        raise OptionError(f"group: {address!r} is not host:port", code="O630")
    end = time.monotonic() + timeout
    try:
        peers = _meet(rank, size, (host, int(port)), secret, end)
    except (OSError, ValueError) as error:
        raise RunError(
            f"group: rank {rank} of {size} did not find all others at {address}: {error}", code="X611"
        ) from None
    for peer in peers.values():
        peer.settimeout(timeout)
    return Group(SocketTransport(rank, peers))


def _meet(rank: int, size: int, first: tuple[str, int], secret: str, end: float) -> dict[int, socket.socket]:
    """A connection to each other member: those with lower ranks are called, those with higher ones call."""
    peers: dict[int, socket.socket] = {}
    with socket.create_server(
        first if rank == 0 else (first[0] if _is_local(first[0]) else "", 0), backlog=size
    ) as door:
        try:
            places: dict[int, tuple[str, int]] = {0: first}
            if rank > 0:
                peers[0] = _call(first, rank, secret, end, door.getsockname()[1])
                places = {int(r): (h, p) for r, (h, p) in json.loads(_get(peers[0])[0]).items()}
            for lower in range(1, rank):
                peers[lower] = _call(places[lower], rank, secret, end, 0)
            while len(peers) < size - 1:
                other, port, line = _answer(door, secret, end)
                if other in peers or not rank < other < size:
                    line.close()  # called twice, or not of this group: the right one is still awaited
                    continue
                peers[other] = line
                places[other] = (line.getpeername()[0], port)
            if rank == 0:
                told = json.dumps({r: p for r, p in places.items() if r > 0}).encode()
                for line in peers.values():
                    _put(line, told, b"")
        except BaseException:
            for line in peers.values():
                line.close()
            raise
    return peers


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _call(place: tuple[str, int], rank: int, secret: str, end: float, port: int) -> socket.socket:
    while True:
        try:
            line = socket.create_connection(place, timeout=max(0.01, end - time.monotonic()))
            break
        except ConnectionRefusedError:  # not there yet
            if time.monotonic() >= end:
                raise
            time.sleep(0.01)
    line.settimeout(max(0.01, end - time.monotonic()))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    challenge, _ = _get(line)
    _put(line, json.dumps([rank, port, _proof(secret, challenge)]).encode(), b"")
    return line


def _answer(door: socket.socket, secret: str, end: float) -> tuple[int, int, socket.socket]:
    """The next caller that knows the secret: its rank, where it listens, and the connection."""
    while True:
        door.settimeout(max(0.01, end - time.monotonic()))
        line, _ = door.accept()
        line.settimeout(max(0.01, min(GREETING, end - time.monotonic())))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = _challenge()
        try:
            _put(line, challenge, b"")
            rank, port, proof = json.loads(_get(line)[0])
            if hmac.compare_digest(str(proof), _proof(secret, challenge)):
                return int(rank), int(port), line
        except (OSError, ValueError, TypeError):
            pass  # somebody else knocked
        line.close()


def _challenge() -> bytes:
    import secrets

    return secrets.token_bytes(16)


def _proof(secret: str, challenge: bytes) -> str:
    return hmac.new(secret.encode(), challenge, "sha256").hexdigest()


def _put(line: socket.socket, head: bytes, body: bytes) -> None:
    line.sendall(_LENGTHS.pack(len(head), len(body)) + head)
    line.sendall(body)


def _get(line: socket.socket) -> tuple[bytes, bytearray]:
    head, body = _LENGTHS.unpack(_exactly(line, _LENGTHS.size))
    if head > MOST_HEAD or body > MOST_BODY:
        raise ConnectionError(f"a message of {head} and {body} bytes is not one of ours")
    return bytes(_exactly(line, head)), _exactly(line, body)


def _exactly(line: socket.socket, count: int) -> bytearray:
    found = bytearray(count)
    view, at = memoryview(found), 0
    while at < count:
        got = line.recv_into(view[at:])
        if got == 0:
            raise ConnectionError("the connection was closed")
        at += got
    return found
