"""strata/config.py: defaults, the environment overlay, scopes and cache-key text."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import tempfile
import threading
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from strata.config import Config, _own_temporary_dir, config, using
from strata.errors import ConfigError, UnknownNameError


def test_defaults_are_safe() -> None:
    c = Config()
    assert (c.verify, c.deterministic, c.check_indices) == (True, True, False)
    assert (c.num_threads, c.device, c.log_level) == (None, "cpu", None)


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().device = "cuda"  # type: ignore[misc]


def test_cache_dir_follows_xdg(tmp_path: Path) -> None:
    assert Config.from_environment({"XDG_CACHE_HOME": str(tmp_path)}).cache_dir == tmp_path / "strata"
    home = Path.home() / ".cache" / "strata"
    assert Config.from_environment({"XDG_CACHE_HOME": "relative"}).cache_dir == home
    assert Config.from_environment({}).cache_dir == home
    both = {"XDG_CACHE_HOME": str(tmp_path), "STRATA_CACHE_DIR": str(tmp_path / "own")}
    assert Config.from_environment(both).cache_dir == tmp_path / "own"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has no users to tell apart")
@pytest.mark.parametrize("make", ["nothing", "private", "open to all", "a link", "a file"])
def test_without_a_home_only_private_folders_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: str
) -> None:
    def homeless(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(homeless))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _own_temporary_dir.cache_clear()
    usual = tmp_path / f"strata-{os.getuid()}"
    match make:
        case "private":
            usual.mkdir(mode=0o700)
        case "open to all":
            usual.mkdir()
            usual.chmod(0o777)
        case "a link":
            (tmp_path / "other").mkdir()
            usual.symlink_to(tmp_path / "other")
        case "a file":
            usual.touch()
    found = Config.from_environment({}).cache_dir
    _own_temporary_dir.cache_clear()
    assert (found == usual) == (make in ("nothing", "private"))
    assert stat.S_IMODE(found.lstat().st_mode) == 0o700


def test_a_home_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def refused(path: object, *args: object, **options: object) -> os.stat_result:
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", refused)
    assert Config.from_environment({"XDG_CACHE_HOME": str(tmp_path)}).cache_dir == tmp_path / "strata"


def test_home_is_expanded() -> None:
    assert Config.from_environment({"STRATA_CACHE_DIR": "~/x"}).cache_dir == Path.home() / "x"


def test_overlay_is_read_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "strata")
    c = Config.from_environment(
        {"STRATA_NUM_THREADS": "3", "STRATA_DEVICE": "cuda:1", "STRATA_LOG": "Debug", "HOME": "/"}
    )
    assert (c.num_threads, c.device, c.log_level) == (3, "cuda:1", "debug")
    assert caplog.messages == [
        "device from the environment: STRATA_DEVICE=cuda:1",
        "log_level from the environment: STRATA_LOG=Debug",
        "num_threads from the environment: STRATA_NUM_THREADS=3",
    ]


def test_empty_variable_is_unset() -> None:
    assert Config.from_environment({"STRATA_DEVICE": "", "STRATA_NUM_THREADS": ""}) == Config.from_environment({})


def test_unknown_variable_is_told(caplog: pytest.LogCaptureFixture) -> None:
    Config.from_environment({"STRATA_NUM_THREAD": "3"})
    assert caplog.messages == ["STRATA_NUM_THREAD is not a setting and has no effect; did you mean STRATA_NUM_THREADS?"]


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("STRATA_NUM_THREADS", "0", "num_threads is a whole number of at least 1, got 0"),
        ("STRATA_NUM_THREADS", "-2", "num_threads is a whole number of at least 1, got '-2'"),
        ("STRATA_NUM_THREADS", "two", "num_threads is a whole number of at least 1, got 'two'"),
        ("STRATA_NUM_THREADS", "2.5", "num_threads is a whole number of at least 1, got '2.5'"),
        ("STRATA_DEVICE", "CPU 0", "device is a backend's name such as 'cpu', 'cpu:avx2' or 'cuda:0', got 'CPU 0'"),
        ("STRATA_LOG", "loud", "log_level is one of debug, info, warning, error, critical, got 'loud'"),
        ("STRATA_CACHE_DIR", __file__, f"cache_dir is a directory, and {__file__!r} is not one"),
    ],
)
def test_bad_variable_is_named(variable: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({variable: value})
    assert str(caught.value).split("\n")[0] == f"{variable}={value!r}: {reason}   [G101]"


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_threads", True), ("num_threads", 1.0), ("device", 0), ("verify", 1), ("cache_limit", 0), ("cache_dir", 7)],
)
def test_bad_field_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*, got {value!r}"):
        Config(**{name: value})  # type: ignore[arg-type]


def test_using_nests_and_restores() -> None:
    before = config()
    with using(num_threads=1) as outer:
        assert config() is outer
        with using(device="reference"):
            assert (config().num_threads, config().device) == (1, "reference")
        assert config() is outer
    assert config() is before


def test_using_restores_after_an_error() -> None:
    before = config()
    with pytest.raises(ZeroDivisionError), using(verify=False):
        1 / 0
    assert config() is before


def test_using_refuses_what_does_not_exist() -> None:
    with pytest.raises(UnknownNameError) as caught, using(num_thread=2):
        pass
    assert str(caught.value).split("\n")[0] == "'num_thread' is not a setting; did you mean num_threads?   [N110]"


def test_using_stays_in_its_thread_and_task() -> None:
    seen: list[int | None] = []
    with using(num_threads=7):
        thread = threading.Thread(target=lambda: seen.append(config().num_threads))
        thread.start()
        thread.join()
    assert seen == [config().num_threads]

    async def task(n: int) -> int | None:
        with using(num_threads=n):
            await asyncio.sleep(0)
            return config().num_threads

    async def both() -> list[int | None]:
        return list(await asyncio.gather(task(1), task(2)))

    assert asyncio.run(both()) == [1, 2]


def test_using_log_level_is_put_back() -> None:
    logger = logging.getLogger("strata")
    before = logger.level
    with using(log_level="debug"):
        assert logger.level == logging.DEBUG
    assert logger.level == before


def test_key_fields_hold_what_changes_code_and_nothing_else() -> None:
    c = Config()
    shown = (
        "attention_mask_threshold=0.5, attention_score_skip=0.0, check_indices=False, deterministic=True, "
        "memory_planner='arena', tune='heuristic', winograd=True"
    )
    assert c.key_fields() == shown
    assert replace(c, num_threads=5, device="cuda", verify=False).key_fields() == c.key_fields()
    assert replace(c, deterministic=False).key_fields() != c.key_fields()


def test_silent_by_default() -> None:
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger("strata").handlers)
