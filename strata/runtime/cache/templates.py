"""Templates: a program with symbolic sizes, planned once, and specialised variants of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strata.arguments import public
from strata.config import config
from strata.core import Counters, Table, here
from strata.errors import OptionError
from strata.lir import BindingManifest
from strata.runtime.compile.device import Device
from strata.runtime.compile.options import CompileOptions
from strata.runtime.compile.pipeline import CompilePipeline, CompileResult
from strata.runtime.compile.profile import CompileProfile, as_profile
from strata.runtime.compile.variant import CompilationMode, ModelComponent
from strata.runtime.execute.compiled import CompiledGraph
from strata.runtime.execute.session import Session

if TYPE_CHECKING:
    from strata.runtime.cache.aot import AotCache

Build = Callable[[], Any]
_DEFAULT = "default"


@public
class DynamicDimCompileCache:
    """One symbolic template, and at most `capacity` executables specialised from it, by key of the caller.

    Options are part of every key: other options have their own template and executables.
    """

    def __init__(
        self,
        device: str | Device | None = None,
        capacity: int = 8,
        policy: str = "lru",
        options: CompileOptions | None = None,
        profile: CompileProfile | str | None = None,
    ) -> None:
        """`profile` is how a kind of model is compiled: a preset's name, a TOML file, or a CompileProfile."""
        self.profile = as_profile(profile)
        self.session = Session(device, options if self.profile is None else self.profile.options(options))
        self._templates: Table[Any, CompileResult] = Table("templates")
        self._entries: Table[Any, tuple[CompiledGraph, dict[str, int]]] = Table("specialised", capacity, policy)

    @property
    def compile_device(self) -> str:
        """The device that entries are compiled for."""
        return self.session.device

    def ensure_template(
        self, build: Build, options: CompileOptions | None = None, model: str = _DEFAULT
    ) -> CompileResult:
        """The template, built once."""
        open_options = self._open(options)

        def make() -> CompileResult:
            return CompilePipeline(self.session.device, open_options).compile(build())

        return self._templates.get_or_make((model, self.session.plan_key(open_options)), make)

    def template_result(self, options: CompileOptions | None = None, model: str = _DEFAULT) -> CompileResult | None:
        return self._templates.get((model, self.session.plan_key(self._open(options))))

    def _open(self, options: CompileOptions | None) -> CompileOptions:
        """Options of a template: its sizes stay symbols."""
        return replace(self.session.chosen(options), dim_binding=None)

    def has_template(self, options: CompileOptions | None = None, model: str = _DEFAULT) -> bool:
        return self.template_result(options, model) is not None

    def get_or_specialize(
        self,
        key: Hashable,
        binding: Mapping[str, int],
        build_hir: Build,
        options: CompileOptions | None = None,
        model: str = _DEFAULT,
        *,
        lazy: bool = False,
    ) -> CompiledGraph:
        """The executable of a key; `build_hir()` runs once, for the template. If `lazy`, a plan: its machine code is
        made when it first runs."""
        chosen = self.session.chosen(options)

        def make() -> CompiledGraph:
            template = self.ensure_template(build_hir, chosen, model)
            return self.session.compile_lir(specialized(template, binding), chosen, lazy=lazy)

        return self._entry((model, key, self.session.entry_key(chosen)), binding, make)

    def _entry(
        self, name: tuple[str, Hashable, str], binding: Mapping[str, int], make: Callable[[], CompiledGraph]
    ) -> CompiledGraph:
        """An entry; its key stands for one set of sizes."""
        made, sizes = self._entries.get_or_make(name, lambda: (make(), dict(binding)))
        if sizes != dict(binding):
            raise OptionError(
                f"the key {name[1]!r} is of an executable for {sizes}, asked for {dict(binding)}", code="O414",
                place=here(), fix="a key for each set of sizes, such as (batch << 32) | seq",
            )  # fmt: skip
        return made

    def get_or_specialize_aot(
        self,
        aot: AotCache,
        disk_base: str,
        key: Hashable,
        binding: Mapping[str, int],
        build_hir: Build,
        options: CompileOptions | None = None,
        model: str | None = None,
    ) -> CompiledGraph:
        """The same, with plans kept on disk: another process that asks for the same sizes builds no template.

        `disk_base` says what is built; bases of one `model` share a template.
        """
        chosen, template = self.session.chosen(options), disk_base if model is None else model

        def make() -> CompiledGraph:
            return aot.specialize_cached(
                disk_base,
                binding,
                self.session.device,
                lambda: self.ensure_template(build_hir, chosen, template),
                chosen,
            )

        made = self._entry((template, key, self.session.entry_key(chosen)), binding, make)
        aot.keep_specialized(disk_base, binding, made)  # one that was made without a folder, or with another
        return made

    def contains(self, key: Hashable, options: CompileOptions | None = None, model: str | None = None) -> bool:
        """Whether there is an executable of a key: of one model, or of any."""
        wanted = self.session.entry_key(self.session.chosen(options))
        if model is not None:
            return (model, key, wanted) in self._entries
        return any(name[1:] == (key, wanted) for name in self._entries)

    __contains__ = contains

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_empty(self) -> bool:
        """Whether there is no executable yet."""
        return len(self) == 0

    @property
    def counters(self) -> Counters:
        return self._entries.counters


@public
class ModelCompilePipeline:
    """The three steps of a model's compile, each by itself or all at once: template, specialise, machine code."""

    def __init__(
        self,
        device: str | Device | None = None,
        capacity: int = 8,
        options: CompileOptions | None = None,
        profile: CompileProfile | str | None = None,
        aot: AotCache | str | os.PathLike[str] | None = None,
    ) -> None:
        """`aot` is where components of the mode `CompilationMode.AOT` keep their plans: a cache or a folder."""
        self._cache = DynamicDimCompileCache(device, capacity, options=options, profile=profile)
        self.session = self._cache.session
        self._aot = aot

    @property
    def device(self) -> str:
        """The device that entries are compiled for."""
        return self.session.device

    def ensure_template(self, build_hir: Build, options: CompileOptions | None = None) -> CompileResult:
        """The template, built if there is none yet."""
        return self._cache.ensure_template(build_hir, options)

    def has_template(self, options: CompileOptions | None = None) -> bool:
        return self._cache.has_template(options)

    def template_result(self, options: CompileOptions | None = None) -> CompileResult | None:
        """The template, if it has been built."""
        return self._cache.template_result(options)

    def contains(self, key: Hashable | ModelComponent, options: CompileOptions | None = None) -> bool:
        """Whether there is an executable of a key, or of a component."""
        if isinstance(key, ModelComponent):
            return self._cache.contains(key.cache_key(), options or key.options, key.template_key())
        return self._cache.contains(key, options)

    __contains__ = contains

    @property
    def is_empty(self) -> bool:
        """Whether there is no executable yet."""
        return self._cache.is_empty

    def build_template(self, build_hir: Build, options: CompileOptions | None = None) -> CompileResult:
        """Build and plan the program with symbolic sizes; once."""
        return self._cache.ensure_template(build_hir, options)

    def specialize_template(self, binding: Mapping[str, int], options: CompileOptions | None = None) -> CompileResult:
        """The template's plan for given sizes."""
        return specialized(self._template(options), binding)

    def compile_lir(self, result: CompileResult, options: CompileOptions | None = None) -> CompiledGraph:
        """Machine code for a plan."""
        return self.session.compile_lir(result, options)

    def get_or_compile(
        self, key: Hashable, binding: Mapping[str, int], build_hir: Build, options: CompileOptions | None = None
    ) -> CompiledGraph:
        """All three steps on a miss."""
        return self._cache.get_or_specialize(key, binding, build_hir, options)

    def get_or_compile_component(
        self, component: ModelComponent, build_hir: Build, options: CompileOptions | None = None
    ) -> tuple[CompiledGraph, BindingManifest]:
        """A component's executable and what has to be bound to it. Components of one make share a template.

        The mode of the component says when it is compiled: EAGER now, LAZY its machine code when it first runs, AOT
        from plans on disk, which another process may have made.
        """
        if component.mode is CompilationMode.AOT:
            compiled = self.get_or_specialize_component_aot(self._plans(), component, build_hir, options)
        else:
            compiled = self._cache.get_or_specialize(
                component.cache_key(), component.variant.dim_binding(), build_hir, options or component.options,
                component.template_key(), lazy=component.mode is CompilationMode.LAZY,
            )  # fmt: skip
        return compiled, compiled.lir.manifest()

    def get_or_specialize_aot(
        self,
        aot: AotCache,
        disk_base: str | ModelComponent,
        key: Any,
        binding: Mapping[str, int] | CompileOptions | None = None,
        build_hir: Build | None = None,
        options: CompileOptions | None = None,
    ) -> CompiledGraph:
        """The executable of a key by way of plans on disk: `disk_base` says what is built, `binding` its sizes.

        `get_or_specialize_aot(aot, component, build_hir, options)` takes all three from a component.
        """
        if isinstance(disk_base, ModelComponent):
            chosen = options if isinstance(binding, Mapping) or binding is None else binding
            return self.get_or_specialize_component_aot(aot, disk_base, build_hir or key, chosen)
        if not isinstance(binding, Mapping) or build_hir is None:
            raise OptionError(
                f"get_or_specialize_aot: {disk_base!r} needs a key, sizes and a function that builds the program",
                code="O412", place=here(),
            )  # fmt: skip
        return self._cache.get_or_specialize_aot(aot, disk_base, key, binding, build_hir, options)

    def get_or_specialize_component_aot(
        self, aot: AotCache, component: ModelComponent, build_hir: Build, options: CompileOptions | None = None
    ) -> CompiledGraph:
        """A component's executable by way of plans on disk."""
        return self._cache.get_or_specialize_aot(
            aot, component.aot_disk_base(), component.cache_key(), component.variant.dim_binding(), build_hir,
            options or component.options, component.template_key(),
        )  # fmt: skip

    def _plans(self) -> AotCache:
        """Where plans of components are kept; by default beside the machine code."""
        from strata.runtime.cache.aot import AotCache

        if not isinstance(self._aot, AotCache):
            self._aot = AotCache(config().cache_dir / "aot" if self._aot is None else self._aot)
        return self._aot

    def template_binding_manifest(self, options: CompileOptions | None = None) -> BindingManifest:
        """What has to be bound, sizes at their upper bounds."""
        return self._template(options).lir.manifest()

    def binding_manifest_for_binding(
        self, binding: Mapping[str, int], options: CompileOptions | None = None
    ) -> BindingManifest:
        """What has to be bound for given sizes."""
        template = self._template(options)
        return template.lir.manifest(known_sizes(template, binding))

    def binding_manifest_for_component(
        self, component: ModelComponent, options: CompileOptions | None = None
    ) -> BindingManifest:
        """What has to be bound to a component, under its options or others."""
        chosen = options or component.options
        template = self._cache.template_result(chosen, component.template_key())
        if template is None:
            return self.binding_manifest_for_binding(component.variant.dim_binding(), chosen)
        return template.lir.manifest(known_sizes(template, component.variant.dim_binding()))

    def __len__(self) -> int:
        return len(self._cache)

    def _template(self, options: CompileOptions | None) -> CompileResult:
        template = self._cache.template_result(options)
        if template is None:
            raise OptionError(
                "there is no template yet for these options",
                code="O409",
                place=here(),
                fix="build_template(build_hir, options) first",
            )
        return template


def known_sizes(template: CompileResult, binding: Mapping[str, int]) -> dict[str, int]:
    """The sizes that the template has: a variant names batch and seq even where a component has no such axis."""
    return {name: size for name, size in binding.items() if name in template.lir.symbols}


def specialized(template: CompileResult, binding: Mapping[str, int]) -> CompileResult:
    sizes = known_sizes(template, binding)
    return template.specialize(sizes) if sizes else template
