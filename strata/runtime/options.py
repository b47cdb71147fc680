"""CompileOptions: every choice that a compile can be given, as a frozen value that is part of cache keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How to compile. Equal options and equal graphs give equal code."""

    memory_limit: int | None = None
    """Bytes of scratch memory that the plan may use; more is refused at compile time."""
    dim_binding: Mapping[str, int] | None = None
    """Symbolic sizes to fix before compiling."""
    passes: str | None = None
    """Passes to run instead of the default ones, spelled as on the command line."""
    deterministic: bool = True
    """Bit-equal results for any number of threads."""
    threads: int | None = field(default=None, compare=False)
    """Threads to run on; None follows the settings. Never changes a result."""
