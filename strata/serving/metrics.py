"""Server metrics: counters, and histograms with doubling buckets."""

from __future__ import annotations

from threading import Lock
from typing import Any, Final

from strata.errors import OptionError

BUCKETS: Final = 16


class Histogram:
    """A histogram with doubling buckets: bucket i counts values from 2**i up to below 2**(i + 1).

    The first takes all that is less than 2, and the last all that is larger than the others hold.
    """

    def __init__(self) -> None:
        self.buckets = [0] * BUCKETS
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        self.buckets[min(max(int(value), 1).bit_length() - 1, BUCKETS - 1)] += 1
        self.count += 1
        self.total += value

    def quantile(self, part: float) -> float:
        """A bound that this part of all values is below: the upper end of its bucket, 0 when there are none."""
        seen = 0
        for i, count in enumerate(self.buckets):
            seen += count
            if count and seen >= part * self.count:
                return float(2 ** (i + 1))
        return 0.0


class Metrics:
    """Counters and histograms by name. All methods may be called from many threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counters: dict[str, int] = {}
        self._gauges: dict[str, int] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter, which never falls."""
        if by < 0:
            raise OptionError(f"metrics: the counter {name!r} cannot fall by {-by}", code="O608")
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + by

    def set(self, name: str, value: int) -> None:
        """Note what something is now, such as the length of a queue."""
        with self._lock:
            self._gauges[name] = value

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram; it is not negative, and its unit is part of the name."""
        if not 0 <= value < float("inf"):
            raise OptionError(f"metrics: {value} is not a value of the histogram {name!r}", code="O608")
        with self._lock:
            self._histograms.setdefault(name, Histogram()).add(value)

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain data, which JSON can hold; later counts do not change it."""
        with self._lock:
            return {
                "counters": dict(self._counters), "gauges": dict(self._gauges),
                "histograms": {
                    name: {"count": h.count, "sum": h.total, "buckets": list(h.buckets), "p50": h.quantile(0.5),
                           "p99": h.quantile(0.99)}
                    for name, h in self._histograms.items()
                },
            }  # fmt: skip

    def text(self) -> str:
        """The text that Prometheus reads."""
        found = self.snapshot()
        lines = []
        for kind in ("counter", "gauge"):
            for name, value in sorted(found[f"{kind}s"].items()):
                lines += [f"# TYPE strata_{name} {kind}", f"strata_{name} {value}"]
        for name, h in sorted(found["histograms"].items()):
            lines.append(f"# TYPE strata_{name} histogram")
            seen = 0
            for i, count in enumerate(h["buckets"][:-1]):
                seen += count
                lines.append(f'strata_{name}_bucket{{le="{2 ** (i + 1)}"}} {seen}')
            lines.append(f'strata_{name}_bucket{{le="+Inf"}} {h["count"]}')
            lines += [f"strata_{name}_sum {h['sum']:g}", f"strata_{name}_count {h['count']}"]
        return "\n".join(lines) + "\n"
