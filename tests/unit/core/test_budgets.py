"""strata/core/budgets.py: limits that are settings, and one error for all of them."""

from __future__ import annotations

import math
import time
from dataclasses import fields

import pytest

from strata.config import Config, using
from strata.core import Deadline, Meter, over_budget, require, show_bytes
from strata.core.budgets import CODES
from strata.errors import BudgetError, ConfigError, StrataError


def test_every_budget_is_a_setting_with_a_code() -> None:
    settings = {f.name for f in fields(Config) if f.name.startswith("max_")}
    assert settings == set(CODES)
    assert len(set(CODES.values())) == len(CODES)


@pytest.mark.parametrize("setting", CODES)
def test_the_error_names_setting_value_and_repair(setting: str) -> None:
    with using(**{setting: 7}):
        error = over_budget(setting, 21, "the file wants 21")
    assert isinstance(error, StrataError)
    assert isinstance(error, ValueError)
    assert (error.setting, error.limit, error.needed, error.code) == (setting, 7, 21, CODES[setting])
    assert f"the file wants 21: more than {setting}, which is 7" in str(error)
    assert f"using({setting}=21)" in str(error)


def test_one_amount() -> None:
    with using(max_nodes=10):
        require("max_nodes", 10, "ten")
        with pytest.raises(BudgetError, match=r"eleven: more than max_nodes, which is 10 "):
            require("max_nodes", 11, "eleven")


def test_amounts_that_add_up() -> None:
    with using(max_folded_bytes=4096):
        meter = Meter("max_folded_bytes", "constants")
    meter.add(4000)
    assert meter.has(96)
    assert not meter.has(97)
    meter.add(96)
    with pytest.raises(BudgetError, match=r"constants: more than max_folded_bytes"):
        meter.add()


def test_seconds() -> None:
    with using(max_seconds=1e-9):
        deadline = Deadline("reading 'x'")
        time.sleep(0.001)
        with pytest.raises(BudgetError, match=r"reading 'x' took more than 1e-09 s: more than max_seconds"):
            deadline.check()
        deadline.extend(3600)
        deadline.check()


@pytest.mark.parametrize("value", [0, -1, True, "3", None, math.nan])
def test_settings_are_checked(value: object) -> None:
    for setting in CODES:
        with pytest.raises(ConfigError, match=setting):
            Config(**{setting: value})  # type: ignore[arg-type]


def test_budgets_come_from_the_environment() -> None:
    assert Config.from_environment({"STRATA_MAX_SECONDS": "2.5"}).max_seconds == 2.5
    for setting in CODES:
        assert getattr(Config.from_environment({f"STRATA_{setting.upper()}": "77"}), setting) == 77


def test_bytes_for_people() -> None:
    assert [show_bytes(n) for n in (5, 1024, 1536, 256 << 20, 1 << 30, 1 << 50)] == [
        "5 bytes", "1 KiB", "1.5 KiB", "256 MiB", "1 GiB", "1024 TiB",
    ]  # fmt: skip
