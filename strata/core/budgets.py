"""Budgets: limits on what reading a file, a text or a template may cost.

Each budget is a setting of `Config`, so that `using(max_nodes=…)` raises it where a big model is known to be good.
`require` checks one amount, a `Meter` adds amounts up, a `Deadline` counts seconds. All of them raise the same error.
"""

from __future__ import annotations

import math
import time

from strata.config import config
from strata.errors import BudgetError

CODES = {
    "max_nodes": "B100",
    "max_depth": "B101",
    "max_folded_bytes": "B102",
    "max_tensor_bytes": "B103",
    "max_unpacked_bytes": "B104",
    "max_steps": "B105",
    "max_seconds": "B106",
    "max_growth": "B107",
    "max_terms": "B110",
    "max_template_bytes": "B111",
    "max_template_seconds": "B112",
    "max_tokenizer_seconds": "B113",
}
_POWERS = ("KiB", "MiB", "GiB", "TiB")


def over_budget(setting: str, needed: float, what: str, *, is_all: bool = True) -> BudgetError:
    """The error of something that needs more than a setting allows: `what` says who needs how much of what.

    `is_all` is False where counting stopped at the limit, so that nobody knows how much would be needed.
    """
    limit = getattr(config(), setting)
    more = math.ceil(needed) if is_all else "…"
    return BudgetError(
        f"{what}: more than {setting}, which is {_shown(setting, limit)}",
        code=CODES[setting],
        setting=setting,
        limit=limit,
        needed=needed,
        fix=f"with strata.config.using({setting}={more}), if you trust where it comes from",
    )


def require(setting: str, needed: int, what: str) -> None:
    """Refuse what needs more than a setting allows."""
    if needed > getattr(config(), setting):
        raise over_budget(setting, needed, what)


def show_bytes(count: int) -> str:
    """A number of bytes as people read it."""
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, len(_POWERS))
    return f"{count / 1024**power:.4g} {_POWERS[power - 1]}"


class Meter:
    """Adds up against one setting, as it was when the meter was made; `what` begins the error."""

    __slots__ = ("limit", "setting", "spent", "what")

    def __init__(self, setting: str, what: str) -> None:
        self.setting, self.what = setting, what
        self.limit: int = getattr(config(), setting)
        self.spent = 0

    def add(self, amount: int = 1) -> None:
        self.spent += amount
        if self.spent > self.limit:
            raise over_budget(self.setting, self.spent, self.what, is_all=False)

    def has(self, amount: int) -> bool:
        """Whether this much more would fit."""
        return self.spent + amount <= self.limit


class Deadline:
    """Seconds since it was made, less those that were given back, against `max_seconds`."""

    __slots__ = ("end", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.end = time.monotonic() + config().max_seconds

    def check(self) -> None:
        if time.monotonic() > self.end:
            seconds = config().max_seconds
            raise over_budget("max_seconds", seconds, f"{self.what} took more than {seconds:g} s", is_all=False)

    def extend(self, seconds: float) -> None:
        """Do not count these seconds: they were spent on something else."""
        self.end += seconds


def _shown(setting: str, limit: float) -> str:
    if setting.endswith("_bytes"):
        return show_bytes(int(limit))
    return f"{limit:g} s" if setting.endswith("_seconds") else f"{limit:,}"
