"""CompileOptions: every choice of a compile, as a frozen value that is part of cache keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from strata.arguments import own_checks, public
from strata.backends import ThreadSpread
from strata.config import config
from strata.core import here
from strata.errors import OptionError
from strata.lir import ALIGNMENT, PLANNERS, MemoryPlanOptions
from strata.mir import REGISTRY, near
from strata.passes import PASSES, FusionLimits, parse_passes

if TYPE_CHECKING:
    from strata.passes import PassChoices

POLICIES = ("prefer_native", "force_common", "force_native")
TUNING = ("heuristic", "beam")
BLOCKS = ("direct", "fusable")


@public
@own_checks("fusion")
@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How to compile. Equal options and equal graphs give equal code."""

    precision: str | None = None
    """A precision policy (f16, bf16, mixed_f16, mixed_f16_conservative, mixed_bf16), or `compute=f16+reduction=f32`."""
    fusion: bool | FusionLimits = True
    """False gives each op its own kernel; limits say how many ops and inputs a kernel may have."""
    blocks: str | None = None
    """How the blocks of an HIR module are lowered: direct (fused ops) or fusable (primitives); None: as it says."""
    assert_fusion_clean: bool = False
    """Refuse to compile where a fusion that a kernel exists for was missed."""
    memory_limit: int | None = None
    """Bytes of scratch memory that the plan may use; a plan above it computes cheap values again, or is refused."""
    dim_binding: Mapping[str, int] | None = None
    """Symbolic sizes to fix before compiling."""
    kernel_dispatch: str = "prefer_native"
    """prefer_native; force_common takes every composition apart; force_native refuses to take any apart."""
    force_common: str | tuple[str, ...] = ()
    """Ops to decompose even where the backend has a kernel for them."""
    force_native: str | tuple[str, ...] = ()
    """Ops that must stay as they are: refused where the backend has no kernel for them."""
    tune: str | None = None
    """How schedules are chosen: heuristic, or beam where a backend searches; None follows the settings."""
    deterministic: bool = True
    """Bit-equal results for any number of threads. False allows a backend to give that up; none does."""
    exact: bool = True
    """Leave out rewrite rules that change rounding."""
    control_flow: bool = False
    """Write branches as selections, and loops of at most `unroll` steps as their steps."""
    unroll: int = 64
    rematerialize: bool = False
    """Compute cheap values again in the backward part of a training graph rather than keep them."""
    drop_unused: bool = False
    """Drop inputs and parameters that no result needs from the signature."""
    passes: str | None = None
    """Passes to run instead of the default ones, spelled as on the command line."""
    skip_passes: tuple[str, ...] = ()
    """Names of default passes to leave out, to find the one behind a difference."""
    supported_ops: str | tuple[str, ...] | None = None
    """Ops that may be left for the backend: others are taken apart or refused. None is all that it has."""
    memory_planner: str | None = None
    """How scratch buffers share memory: arena (packed), remap (whole buffers of one type and size), off (none); None
    follows the settings."""
    arena_alignment: int = ALIGNMENT
    """Bytes that every scratch buffer starts at a multiple of: a power of two from 64 to 4096."""
    mesh: Mapping[str, int] | None = None
    """Devices in a grid, by the name and size of its axes, where a backend has several: `{"data": 4, "model": 2}`."""
    shard: Mapping[str, Sequence[str | Sequence[str] | None]] | None = None
    """How inputs and parameters are cut over the mesh: for each axis of an array, an axis of the mesh, several or None.
    What is not named is whole on every device; results are whole."""
    threads: int | None = field(default=None, compare=False)
    """Threads to run on; None follows the settings. Never changes a result."""

    def __post_init__(self) -> None:
        try:
            self._check()
        except OptionError as error:
            error.place = error.place or here()
            raise

    def _check(self) -> None:
        _one_of("kernel_dispatch", self.kernel_dispatch, POLICIES)
        if self.tune is not None:
            _one_of("tune", self.tune, TUNING)
        if self.blocks is not None:
            _one_of("blocks", self.blocks, BLOCKS)
        if self.precision is not None:
            from strata.passes import parse_policy

            parse_policy(self.precision)
        if not isinstance(self.fusion, (bool, FusionLimits)):
            raise OptionError(
                f"compile option fusion is True, False or FusionLimits(...), got {self.fusion!r}", code="O144"
            )
        self._check_binding()
        self._check_spread()
        for name in ("memory_limit", "threads", "unroll"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise OptionError(f"compile option {name} must be a count or None, got {value!r}", code="O144")
        for name in ("force_common", "force_native"):
            object.__setattr__(self, name, _op_names(name, getattr(self, name)))
        if self.supported_ops is not None:
            object.__setattr__(self, "supported_ops", _op_names("supported_ops", self.supported_ops))
        if self._planner not in PLANNERS or self.arena_alignment != ALIGNMENT:
            self.memory  # noqa: B018 - checks both
        both = sorted(set(self.force_common) & set(self.force_native))
        if both:
            raise OptionError(f"compile options: {both[0]!r} is in force_common and in force_native", code="O144")
        if self.passes is not None:
            parse_passes(self.passes)
        for name in self.skip_passes:
            if name not in PASSES:
                raise OptionError(
                    f"compile option skip_passes: no pass is named {name!r}{near(name, PASSES)}", code="O144"
                )

    def _check_binding(self) -> None:
        for name in ("dim_binding", "mesh", "shard"):
            value = getattr(self, name)
            if isinstance(value, Mapping):  # of its own: the caller's may change
                object.__setattr__(self, name, dict(value))
        if self.dim_binding is None:
            return
        for name, size in self.dim_binding.items():
            if size < 0:
                raise OptionError(f"compile option dim_binding: {name} cannot be {size!r}", code="O144")

    def _check_spread(self) -> None:
        if self.shard is not None and self.mesh is None:
            raise OptionError("compile option shard goes with a mesh", code="O144")
        if self.mesh is None:
            return
        if not self.mesh or not all(n.isidentifier() and size > 0 for n, size in self.mesh.items()):
            raise OptionError(f"compile option mesh maps names to sizes, got {self.mesh!r}", code="O144")
        for name, cuts in (self.shard or {}).items():
            used = [axis for cut in _cuts(cuts) for axis in cut]
            odd = next((axis for axis in used if axis not in self.mesh or used.count(axis) > 1), None)
            if odd is not None:
                raise OptionError(
                    f"compile option shard: {name} is cut along {odd!r}, which is not one axis of the mesh", code="O144"
                )

    @property
    def spread(self) -> ThreadSpread | None:
        """The mesh and how arrays are cut over it; None on one device."""
        if self.mesh is None:
            return None
        return ThreadSpread(tuple(self.mesh.items()), {name: _cuts(cuts) for name, cuts in (self.shard or {}).items()})

    @property
    def key(self) -> str:
        """Everything here that can change the code, for fingerprints and cache keys."""
        binding = sorted(self.dim_binding.items()) if self.dim_binding else None
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        if self.mesh is None:
            del shown["mesh"], shown["shard"]
        return ", ".join(f"{name}={binding if name == 'dim_binding' else value!r}" for name, value in shown.items())

    @property
    def memory(self) -> MemoryPlanOptions:
        """How the plan's memory is laid out."""
        return MemoryPlanOptions(self._planner, self.arena_alignment)

    @property
    def _planner(self) -> str:
        """How memory is planned, here or by the settings."""
        return self.memory_planner or config().memory_planner

    @property
    def tuning(self) -> str:
        """How schedules are chosen, here or by the settings."""
        return self.tune or config().tune

    def settled(self) -> CompileOptions:
        """The same with what follows the settings written down: they may be others when it is planned again."""
        return replace(self, tune=self.tuning, memory_planner=self._planner)

    def claims(self, name: str) -> bool:
        """Whether an op may be left for the backend; an empty claim, or none, is all that it has."""
        return not self.supported_ops or name in self.supported_ops

    @property
    def limits(self) -> FusionLimits | None:
        """How far fusion goes; None where nothing limits it."""
        if isinstance(self.fusion, FusionLimits):
            return self.fusion
        return None if self.fusion else FusionLimits(max_steps=1)

    @property
    def choices(self) -> PassChoices:
        """Which optional passes these options ask for."""
        from strata.passes import PassChoices

        return PassChoices(
            fusion=self.fusion is not False, precision=self.precision, unroll=self.unroll,
            control_flow=self.control_flow, drop_unused=self.drop_unused,
            rematerialize=self.rematerialize, check_indices=config().check_indices,
        )  # fmt: skip


def _cuts(given: Any) -> tuple[tuple[str, ...], ...]:
    """For each axis of an array the axes of the mesh that it is cut along."""
    if isinstance(given, str):
        given = (given,)
    return tuple(() if c is None else (c,) if isinstance(c, str) else tuple(c) for c in given)


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(
            f"compile option {name} is one of {', '.join(known)}, got {value!r}{near(str(value), known)}", code="O144"
        )


def _op_names(option: str, names: Any) -> tuple[str, ...]:
    given = (names,) if isinstance(names, str) else tuple(names)
    for name in given:
        if name not in REGISTRY:
            raise OptionError(f"compile option {option}: no op is named {name!r}{near(name, REGISTRY)}", code="O144")
    return given
