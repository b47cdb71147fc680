"""Workers, metrics, records: what a server counts, divides and keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from strata.errors import FileError, OptionError
from strata.serving import Histogram, Metrics, Record, Recorder, WorkerPool, read_records, replay


def test_workers_in_turn() -> None:
    pool = WorkerPool(["a", "b", "c"], policy="round_robin")
    with ExitStack() as stack:
        assert [stack.enter_context(pool.worker()) for _ in range(5)] == ["a", "b", "c", "a", "b"]
        assert pool.loads == (2, 2, 1)
    assert pool.loads == (0, 0, 0)


def test_the_least_loaded_worker() -> None:
    pool = WorkerPool(["a", "b", "c"])
    with pool.worker(weight=5) as first, pool.worker() as second, pool.worker() as third:
        assert (first, second, third) == ("a", "b", "c")
        with pool.worker() as fourth, pool.worker() as fifth, pool.worker() as sixth:
            assert (fourth, fifth, sixth) == ("b", "c", "b")
        assert pool.loads == (5, 1, 1)
    with pytest.raises(RuntimeError, match="broken"), pool.worker():
        raise RuntimeError("broken")
    assert pool.loads == (0, 0, 0)
    with pytest.raises(OptionError, match="a pool of none"):
        WorkerPool([])
    with pytest.raises(OptionError, match="'random' is not one of least_loaded, round_robin"):
        WorkerPool([1], policy="random")


def test_buckets_double() -> None:
    histogram = Histogram()
    for value in (0, 0.5, 1, 1.99, 2, 3, 4, 7.5, 8, 2**15 - 1, 2**15, 2**40):
        histogram.add(value)
    assert histogram.buckets == [4, 2, 2, 1, *[0] * 10, 1, 2]
    assert histogram.count == 12
    assert histogram.total == sum((0, 0.5, 1, 1.99, 2, 3, 4, 7.5, 8, 2**15 - 1, 2**15, 2**40))
    assert (histogram.quantile(0.0), histogram.quantile(0.5), histogram.quantile(0.6), histogram.quantile(1)) == (
        2, 4, 8, 65536,
    )  # fmt: skip
    assert Histogram().quantile(0.5) == 0


def test_metrics_are_a_snapshot_and_a_text() -> None:
    metrics = Metrics()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: (metrics.count("requests"), metrics.observe("microseconds", 5)), range(400)))
    metrics.set("waiting", 3)
    found = metrics.snapshot()
    assert found["counters"] == {"requests": 400}
    assert found["gauges"] == {"waiting": 3}
    assert found["histograms"]["microseconds"]["buckets"][2] == 400
    metrics.count("requests", 2)
    assert found["counters"] == {"requests": 400}
    assert json.loads(json.dumps(found)) == found
    lines = metrics.text().splitlines()
    assert "strata_requests 402" in lines
    assert 'strata_microseconds_bucket{le="4"} 0' in lines
    assert 'strata_microseconds_bucket{le="8"} 400' in lines
    assert 'strata_microseconds_bucket{le="+Inf"} 400' in lines
    assert "strata_microseconds_sum 2000" in lines
    for wrong in (
        lambda: metrics.count("x", -1),
        lambda: metrics.observe("x", -1.0),
        lambda: metrics.observe("x", float("nan")),
    ):
        with pytest.raises(OptionError):
            wrong()


def test_records_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Recorder(path) as recorder:
        recorder.write(Record("/a", {"x": [1, "é\n"]}, {"y": None, "id": 1}, 0.5))
    with Recorder(path) as recorder:  # appends
        for i in range(3):
            recorder.write(Record("/b", i, {"id": i, "created": i, "choices": [{"id": 7, "text": str(i)}]}))
    assert len(path.read_text("utf-8").splitlines()) == 4
    found = list(read_records(path))
    assert found[0] == Record("/a", {"x": [1, "é\n"]}, {"y": None, "id": 1}, 0.5)
    assert [r.body for r in found[1:]] == [0, 1, 2]
    asked: list[Any] = []

    def answer(where: str, body: Any) -> Any:
        asked.append((where, body))
        return {"y": None} if where == "/a" else {"choices": [{"text": "1"}], "id": 99}

    differing = replay(path, answer)
    assert asked == [("/a", {"x": [1, "é\n"]}), ("/b", 0), ("/b", 1), ("/b", 2)]
    assert [record.body for record, _ in differing] == [0, 2]
    assert len(replay(path, answer, same=lambda old, new: False)) == 4
    with path.open("a") as file:
        file.write('{"path": 1}\n')
    with pytest.raises(FileError, match="line 5 is not a record"):
        list(read_records(path))


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log.jsonl") as recorder, ThreadPoolExecutor(4) as threads:
        write: Callable[[int], None] = lambda i: recorder.write(Record("/", "x" * 5000, i))
        list(threads.map(write, range(100)))
    assert sorted(r.answer for r in read_records(tmp_path / "log.jsonl")) == list(range(100))
