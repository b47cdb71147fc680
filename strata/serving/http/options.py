"""Settings of the HTTP server: keys, hosts, origins, limits, TLS."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from strata.core import read_text
from strata.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """What the server allows. Times are in seconds.

    With `api_keys`, a request needs one of them. Without, the `Host` of a request has to be an address, a name without
    dots or one of `allowed_hosts`, so that no page on the web can reach a server on the same machine under a name of
    its own. Pages of other origins are refused unless `cors_origins` names theirs (`*` is all).
    """

    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body: int = 8 << 20  # bytes
    max_connections: int = 2048
    read_timeout: float = 30.0  # for a request, from its first byte to its last
    idle_timeout: float = 30.0  # between requests of a connection
    write_timeout: float = 30.0  # for a client that does not read
    drain: float = 30.0  # for requests on their way when the server stops
    workers: int = 4  # threads that read requests: JSON, templates, tokens
    certificate: str | None = None  # files of TLS
    private_key: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_body", "max_connections", "read_timeout", "idle_timeout", "write_timeout", "workers"):
            if not getattr(self, name) > 0:
                raise OptionError(f"serve: {name} {getattr(self, name)} serves nobody", code="O623")
        if self.drain < 0:
            raise OptionError(f"serve: a drain of {self.drain} seconds is none", code="O623")
        for key in self.api_keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise OptionError("serve: an API key has 8 or more letters, digits and signs", code="O623")
        if (self.certificate is None) != (self.private_key is None):
            raise OptionError("serve: TLS needs a certificate and its private key", code="O623")

    @staticmethod
    def read_keys(path: str | Path) -> tuple[str, ...]:
        """The API keys of a file, one on a line; empty lines and those that begin with # are none."""
        try:
            lines = [line.strip() for line in read_text(path).splitlines()]
        except (OSError, ValueError) as error:
            raise OptionError(f"serve: {str(path)!r} cannot be read: {error}", code="O623") from None
        return tuple(line for line in lines if line and not line.startswith("#"))


class KeyRing:
    """API keys, compared in a time that does not depend on them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def client(self, given: str) -> str | None:
        """Who a key belongs to, as a name for logs and turns; None where it is not known."""
        found = None
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        for known in self._digests:  # all of them, whichever it is
            if hmac.compare_digest(known, digest):
                found = f"key-{known.hex()[:8]}"
        return found
