"""FusionLimits: how many ops and inputs a kernel may have, for whoever groups ops into kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata.errors import OptionError

_ANY = 1 << 30


@dataclass(frozen=True, kw_only=True)
class FusionLimits:
    """How far fusion goes: the most ops that one kernel computes, and the most buffers that it reads.

    An op alone is a kernel whatever its inputs. The body of a loop is planned on its own, within the same limits.
    Devices may bound what a kernel reads and writes together (`max_buffers`)."""

    max_steps: int = 32
    max_inputs: int = 16
    max_buffers: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_inputs", "max_buffers"):
            value = getattr(self, name)
            if name == "max_buffers" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(f"fusion limits: {name} must be a count, got {value!r}", code="O143")

    @property
    def most_inputs(self) -> int:
        """Buffers that a kernel may read: it writes at least one."""
        return self.max_inputs if self.max_buffers is None else min(self.max_inputs, self.max_buffers - 1)

    def allow(self, steps: int, inputs: int, outputs: int) -> bool:
        """Whether this many ops that read and write this many buffers may be one kernel."""
        fits = self.max_buffers is None or inputs + outputs <= self.max_buffers
        return steps <= 1 or (steps <= self.max_steps and inputs <= self.most_inputs and fits)

    @staticmethod
    def within(most: int | None, asked: FusionLimits | None) -> FusionLimits | None:
        """What was asked for, on a device whose kernels take this many buffers."""
        if most is None:
            return asked
        known = asked or FusionLimits(max_steps=_ANY, max_inputs=_ANY)
        own = known.max_buffers
        return replace(known, max_buffers=most if own is None else min(own, most))
