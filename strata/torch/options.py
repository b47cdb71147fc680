"""TorchOptions of `torch.compile(..., backend="strata", options={...})`: those of a compile, and a few of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from strata.core import here
from strata.errors import LowerError, OptionError
from strata.mir import near
from strata.runtime import CompileOptions, Session
from strata.torch.writes import available

_OF_A_COMPILE = {f.name for f in fields(CompileOptions)}
_OWN = ("device", "strict", "freeze", "background")


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """How torch's graphs are compiled."""

    device: str = ""
    """Where programs run; as it is, where their tensors are."""
    strict: bool = False
    """Raise where an op would stay in torch."""
    freeze: bool | None = None
    """Pack parameters once in inference, and again when they change; False reads them in place in every call. None
    packs them where the system tells of every write."""
    background: bool = False
    """Run in torch at once while the program is compiled in the background, then swap."""
    compile: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, options: Mapping[str, Any] | None, others: Mapping[str, Any]) -> TorchOptions:
        given = dict(options or {})
        if others.get("mode") not in (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
            raise OptionError(f"torch.compile: mode {others['mode']!r} is not known", code="O660", place=here())
        if "autotune" in (others.get("mode") or ""):
            given.setdefault("tune", "beam")
        own = {name: given.pop(name) for name in _OWN if name in given}
        for name in _OWN[1:]:
            if not isinstance(own.get(name, False), bool):
                raise OptionError(
                    f"torch.compile: {name} is True or False, got {own[name]!r}", code="O660", place=here()
                )
        known = [*_OF_A_COMPILE, *_OWN]
        for name in given:
            if name not in _OF_A_COMPILE:
                raise OptionError(
                    f"torch.compile: strata has no option {name!r}{near(name, known)}", code="O660", place=here()
                )
        made = cls(**own, compile=given)
        CompileOptions(**given)
        if made.device:
            made.session()  # a device that is not there is an error, not a reason to stay in torch
        return made

    def freezes(self, inputs: Iterable[Any]) -> bool:
        """Whether parameters are packed. A GPU's are: a change is known by torch's count of writes."""
        if self.freeze is not None:
            return self.freeze
        return available() or any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in inputs)

    def session(self, place: Any = None) -> Session:
        """A session on the device that was asked for, or on that of the tensors, which is torch's name of one."""
        if self.device and place is not None and place.type != "cpu" and not self.device.startswith(place.type):
            raise OptionError(
                f"torch.compile: device is {self.device!r}, and the tensors are on {place}", code="O660", place=here()
            )
        return Session(self.device or str(place or "cpu"), CompileOptions(**self.compile))

    def refuse(self, unsupported: Mapping[Any, str]) -> None:
        """With `strict`, the first op that would stay in torch is an error."""
        if self.strict:
            node, reason = next(iter(unsupported.items()))
            raise LowerError(
                f"{node.target} would stay in torch: {reason} ({len(unsupported)} such in this graph)", code="L660"
            )
