"""Variants of a compiled model: sizes, phase, options. Keys are the same in every process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from strata.arguments import public
from strata.cache import digest
from strata.core import here
from strata.errors import SymbolError
from strata.runtime.compile.options import CompileOptions


@public
class Phase(Enum):
    """What a model is run for: prefill, decode, an encoder, any inference."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"
    INFERENCE = "inference"


@public
class CompilationMode(Enum):
    """When a component is compiled: at once, on first use, or ahead of time from disk."""

    EAGER = "eager"
    LAZY = "lazy"
    AOT = "aot"


@public
@dataclass(frozen=True, slots=True)
class ModelVariant:
    """The sizes that a model is specialised for."""

    batch: int
    seq: int
    past_seq: int | None = None
    phase: Phase = Phase.INFERENCE
    extra: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name, size in (*self.dim_binding().items(), ("past_seq", self.past_seq or 0)):
            if size < 0:
                raise SymbolError(f"a model variant: the size {name} cannot be {size}", code="S153", place=here())

    @staticmethod
    def prefill(batch: int, seq: int) -> ModelVariant:
        return ModelVariant(batch, seq, phase=Phase.PREFILL)

    @staticmethod
    def decode(batch: int, past: int, new: int = 1) -> ModelVariant:
        return ModelVariant(batch, new, past, Phase.DECODE)

    @staticmethod
    def encoder(batch: int, seq: int) -> ModelVariant:
        return ModelVariant(batch, seq, phase=Phase.ENCODER)

    def with_extra(self, name: str, size: int) -> ModelVariant:
        """One more symbolic size; a name given twice takes the last value."""
        return replace(self, extra=tuple(sorted({**dict(self.extra), name: size}.items())))

    def dim_binding(self) -> dict[str, int]:
        """Values of the symbols batch, seq, past_seq (when decoding) and the extra ones."""
        past = {"past_seq": self.past_seq or 0} if self.phase is Phase.DECODE else {}
        return {"batch": self.batch, **past, "seq": self.seq, **dict(self.extra)}

    def cache_key(self) -> str:
        return stable_key("variant", self.phase.value, *(f"{k}={v}" for k, v in sorted(self.dim_binding().items())))


@public
@dataclass(frozen=True)
class ModelComponent:
    """A part of a model with its sizes, its options, and what it is made of."""

    variant: ModelVariant
    options: CompileOptions = field(default_factory=CompileOptions)
    mode: CompilationMode = CompilationMode.LAZY
    profile_key: str = ""
    quant: str | None = None
    layer_composition_key: str = ""

    def template_key(self) -> str:
        """A key over what is the same for all sizes."""
        open_options = replace(self.options, dim_binding=None)
        return stable_key("template", open_options.key, self.profile_key, self.quant or "", self.layer_composition_key)

    def cache_key(self) -> str:
        """A key over everything."""
        return stable_key("component", self.variant.cache_key(), self.template_key(), self.mode.value)

    def aot_disk_base(self) -> str:
        """The name of its entries in an ahead-of-time cache."""
        return f"strata_{self.cache_key()}"


def stable_key(*parts: str) -> str:
    """Sixteen hexadecimal digits that depend on the parts alone, not on the process."""
    return digest(*parts)[:16]


def binding_key(binding: Mapping[str, int]) -> str:
    """Of sizes in any order."""
    return stable_key("binding", *(f"{name}={size}" for name, size in sorted(binding.items())))
