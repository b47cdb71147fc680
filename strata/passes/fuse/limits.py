"""FusionLimits: how many ops and inputs a kernel may have, for whoever groups ops into kernels."""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class FusionLimits:
    """How far fusion goes: the most ops that one kernel computes, and the most buffers that it reads.

    An op alone is a kernel whatever its inputs. The body of a loop is planned on its own, without limits."""

    max_steps: int = 32
    max_inputs: int = 16

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_inputs"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(f"fusion limits: {name} must be a count, got {value!r}", code="O143")

    def allow(self, steps: int, inputs: int) -> bool:
        """Whether so many ops that read so many buffers may be one kernel."""
        return steps <= 1 or (steps <= self.max_steps and inputs <= self.max_inputs)
