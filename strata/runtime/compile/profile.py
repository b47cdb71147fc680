"""CompileProfile: how a kind of model is compiled, as a preset by name or a TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from strata.arguments import public
from strata.core import here, read_text
from strata.errors import FileError, OptionError
from strata.mir import near
from strata.runtime.compile.options import CompileOptions

_COMPUTE = {"f32": None, "f16": "f16", "bf16": "bf16"}
_MIXED = {"none": None, "auto": "mixed_f16"}
_DIRECT = ("prefill", "encoder", "vision")  # heavy matmuls: blocks keep their fused form
_FUSABLE = ("decode",)  # one token: the fuser sees every op
_UNFUSED = ("diffusion", "memory_attention")


@public
@dataclass(frozen=True, slots=True)
class CompileProfile:
    """Choices for a kind of model; `options()` are the compile options that they mean."""

    name: str = "default"
    blocks: str | None = None
    """How HIR blocks are lowered: direct (fused ops), fusable (primitives), None (as the module says)."""
    skip_fusion: bool = False
    assert_clean: bool = False
    drop_unused: bool = False
    fold_constants: bool = True
    precision: str | None = None
    target: str | None = None
    """The device that programs of this kind are compiled for; None is the caller's."""

    PRESETS: ClassVar[tuple[str, ...]] = ("default", *_DIRECT, *_FUSABLE, *_UNFUSED)

    @staticmethod
    def preset(name: str) -> CompileProfile:
        """One of `CompileProfile.PRESETS`: prefill, decode, encoder, vision, diffusion, memory_attention, default."""
        if name not in CompileProfile.PRESETS:
            raise OptionError(
                f"no compile profile is named {name!r}; known: {', '.join(CompileProfile.PRESETS)}"
                f"{near(name, CompileProfile.PRESETS)}", code="O144", place=here(),
            )  # fmt: skip
        blocks = "direct" if name in _DIRECT else "fusable" if name in _FUSABLE else None
        return CompileProfile(name, blocks, skip_fusion=name in _UNFUSED)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> CompileProfile:
        """A profile from a TOML file: tables `fusion` {policy, target, assert_clean, skip}, `passes` {dce,
        constant_folding} and `precision` {compute, mixed}."""
        place = Path(path)
        try:
            found = tomllib.loads(read_text(place))
        except (OSError, ValueError, tomllib.TOMLDecodeError) as error:
            raise FileError(f"{place}: not a compile profile: {error}", code="F407", place=here()) from None
        return CompileProfile.of(found, place.name.partition(".")[0])

    @staticmethod
    def of(tables: Mapping[str, Any], name: str = "profile") -> CompileProfile:
        """A profile from the tables that a file has."""
        known: dict[str, dict[str, Any]] = {
            "fusion": {"policy": ("direct", "fusable"), "target": str, "assert_clean": bool, "skip": bool},
            "passes": {"dce": bool, "constant_folding": bool, "verbose": bool},
            "precision": {"compute": tuple(_COMPUTE), "mixed": tuple(_MIXED)},
        }
        for table, fields in tables.items():
            if table not in known or not isinstance(fields, Mapping):
                raise OptionError(
                    f"compile profile: no table {table!r}; known: {', '.join(known)}", code="O144", place=here()
                )
            for key, value in fields.items():
                _check_field(table, key, value, known[table])
        fusion, passes, precision = (tables.get(table, {}) for table in known)
        target = fusion.get("target", "auto")
        return CompileProfile(
            name, fusion.get("policy"), fusion.get("skip", False), fusion.get("assert_clean", False),
            passes.get("dce", False), passes.get("constant_folding", True),
            _MIXED[precision.get("mixed", "none")] or _COMPUTE[precision.get("compute", "f32")],
            None if target == "auto" else target,
        )  # fmt: skip

    def options(self, base: CompileOptions | None = None) -> CompileOptions:
        """The profile over given options: what it does not name stays."""
        made = base or CompileOptions()
        skipped = made.skip_passes if self.fold_constants else tuple(dict.fromkeys((*made.skip_passes, "fold")))
        return replace(
            made,
            blocks=self.blocks or made.blocks,
            fusion=False if self.skip_fusion else made.fusion,
            assert_fusion_clean=self.assert_clean or made.assert_fusion_clean,
            drop_unused=self.drop_unused or made.drop_unused,
            precision=self.precision or made.precision,
            skip_passes=skipped,
        )

    @property
    def key(self) -> str:
        """Everything here that can change the code."""
        return f"{self.name}; {self.options().key}"


def _check_field(table: str, key: str, value: Any, known: Mapping[str, Any]) -> None:
    if key not in known:
        raise OptionError(
            f"compile profile: {table} has no {key!r}; it has {', '.join(known)}{near(key, known)}",
            code="O144", place=here(),
        )  # fmt: skip
    wanted = known[key]
    if isinstance(wanted, tuple) and value not in wanted:
        raise OptionError(
            f"compile profile: {table}.{key} is one of {', '.join(wanted)}, got {value!r}", code="O144", place=here()
        )
    if isinstance(wanted, type) and not isinstance(value, wanted):
        kind = "True or False" if wanted is bool else "a name"
        raise OptionError(f"compile profile: {table}.{key} is {kind}, got {value!r}", code="O144", place=here())


def as_profile(given: CompileProfile | str | os.PathLike[str] | None) -> CompileProfile | None:
    """A profile, the name of a preset, or a file."""
    if given is None or isinstance(given, CompileProfile):
        return given
    text = os.fspath(given)
    return CompileProfile.load(text) if text.endswith(".toml") else CompileProfile.preset(text)
