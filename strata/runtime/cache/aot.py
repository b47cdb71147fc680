"""AotCache: plans under the caller's names, in a folder that several processes and machines may share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strata.arguments import public
from strata.cache import DiskStore, digest
from strata.config import logger
from strata.core import Target, here
from strata.errors import OptionError
from strata.kinds import shown
from strata.lir import Lir
from strata.mir import Graph, parse
from strata.runtime.cache.templates import specialized
from strata.runtime.compile.options import CompileOptions
from strata.runtime.compile.pipeline import CompilePipeline, CompileResult
from strata.runtime.compile.variant import binding_key
from strata.runtime.execute.compiled import CompiledGraph
from strata.runtime.execute.session import Session
from strata.runtime.storage.stored import DAMAGED, code_version, graph_digest, read_plan, write_plan


@public
class AotCache:
    """Plans on disk by name. An entry that is damaged, or was made by another version, counts as absent."""

    def __init__(self, root: str | os.PathLike[str], limit: int = 4 << 30) -> None:
        self.root = Path(root)
        self.store = DiskStore(self.root, limit)

    def put_lir(self, key: str, lir: Lir) -> str:
        """Keep a plan under a name; returns its fingerprint."""
        plan, mark = write_plan(lir), lir.fingerprint()
        assert plan is not None
        text = str(lir.graph).encode()
        head = f"{mark} {lir.target.name} {len(text)}\n".encode()
        self.store.put(self._key(key), head + text + plan, {"kind": "aot plan", "name": key, "fingerprint": mark})
        return mark

    def get_lir(self, key: str) -> Lir | None:
        """The plan of a name, if there is one that this version can run."""
        data = self.store.get(self._key(key))
        if data is None:
            return None
        try:
            head, _, rest = data.partition(b"\n")
            _, target, length = head.decode().split(" ")
            text = rest[: int(length)].decode()
            return read_plan(rest[int(length) :], None, lambda: parse(text), Target.of_plan(target))
        except DAMAGED as error:
            logger.warning("the plan %r in %s cannot be read: %s", key, self.root, error)
            return None

    def fingerprint(self, key: str) -> str | None:
        """The fingerprint of the plan stored under a name."""
        data = self.store.get(self._key(key))
        return data.partition(b" ")[0].decode() if data is not None else None

    def contains(self, key: str) -> bool:
        return self._key(key) in self.store

    __contains__ = contains

    def compile_graph_cached(
        self, key: str, graph: Graph, device: str | None = None, options: CompileOptions | None = None
    ) -> CompiledGraph:
        """Compile a graph, planning it only if the name has no plan of the same graph, options and target yet."""
        session, mark = Session(device, options), graph_digest(graph)
        if mark is None:  # a user's function is part of it, and no name says which
            return session.compile(graph)
        return self._compiled(f"{key}__{mark}", session, lambda: _planned(session, graph), graph)

    def compile_hir_cached(
        self, key: str, build: Callable[[], Any], device: str | None = None, options: CompileOptions | None = None
    ) -> CompiledGraph:
        """The same for a program that is built only on a miss: the name alone identifies it."""
        session = Session(device, options)
        return self._compiled(key, session, lambda: _planned(session, build()), None)

    def specialize_cached(
        self,
        base: str,
        binding: Mapping[str, int],
        device: str,
        template: CompileResult | Callable[[], CompileResult],
        options: CompileOptions | None = None,
    ) -> CompiledGraph:
        """A template for given sizes, under `base` and the sizes; on a hit the template is not asked for."""
        session = Session(device, options)

        def make() -> CompileResult:
            made = template() if callable(template) else template
            if not isinstance(made, CompileResult):
                raise OptionError(f"template gives a compile result, got {shown(made)}", code="O412", place=here())
            return specialized(made, binding)

        name = f"{base}__{binding_key(binding)}"
        if not callable(template):  # it is at hand, so that the name need not be trusted
            mark = graph_digest(template.source)
            if mark is None:
                return session.compile_lir(make())
            name += f"__{mark} {digest(template.pipeline.options.key)[:16]}"
        return self._compiled(name, session, make, None)

    def keep_specialized(self, base: str, binding: Mapping[str, int], made: CompiledGraph) -> None:
        """See that the plan of a specialised graph is where `specialize_cached` will look for it."""
        name = _plan_name(f"{base}__{binding_key(binding)}", Session(made.device, made.options))
        if name not in self:
            self.put_lir(name, made.lir)

    def _compiled(
        self, key: str, session: Session, make: Callable[[], CompileResult], graph: Graph | None
    ) -> CompiledGraph:
        name = _plan_name(key, session)
        lir = self.get_lir(name)
        if lir is None:
            with self.store.making(self._key(name)):
                lir = self.get_lir(name)
                if lir is None:
                    lir = make().lir
                    self.put_lir(name, lir)
        executable = session.backend.compile(lir)
        return CompiledGraph(lir, executable, session.options, session.compile, source=graph, device=session.device)

    def _key(self, name: str) -> str:
        # a compiler that is being edited shares its plans with no other process
        return digest("aot", name, code_version() or f"process {os.getpid()}")


def _plan_name(key: str, session: Session) -> str:
    return f"{key} {digest(session.plan_key())[:16]}"


def _planned(session: Session, program: Any) -> CompileResult:
    return CompilePipeline(session.device, session.options).compile(program)
