"""CompiledGraph: a graph ready to run, with its parameters. One may be called from many threads at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from strata.backends import Executable
from strata.config import config
from strata.core import TensorType, as_dtype, here
from strata.errors import DTypeError, OptionError, ShapeError, UnknownNameError
from strata.lir import Lir
from strata.mir import infer_binding, leaf_name, near
from strata.runtime.memory import RESULTS
from strata.runtime.options import CompileOptions


class CompiledGraph:
    """Made by `Session.compile`. `run(x=array)` gives a tuple of arrays, one for each output."""

    def __init__(self, lir: Lir, executable: Executable, options: CompileOptions) -> None:
        self.lir = lir
        self.options = options
        self._executable = executable
        self._inputs = tuple((leaf_name(x), x.type) for x in lir.graph.inputs)
        self._params = {leaf_name(x): x.type for x in lir.graph.params}
        self._outputs = tuple(x.type for x in lir.graph.results)
        self._missing = set(self._params)
        self._is_static = not lir.symbols
        self._leaves = lir.graph.inputs
        self._param_binding: dict[str, int] = {}
        self._fast = tuple((name, t.dtype.np, t.shape) for name, t in self._inputs)
        self._fast_outputs = tuple((t.shape, t.dtype.np) for t in self._outputs)

    # signature

    @property
    def signature(self) -> str:
        """Inputs, parameters and outputs with their types."""
        inputs = ", ".join(f"{n}: {t}" for n, t in self._inputs)
        params = "".join(f", param {n}: {t}" for n, t in self._params.items())
        return f"({inputs}{params}) -> {', '.join(map(str, self._outputs))}"

    def __repr__(self) -> str:
        return f"<CompiledGraph {self.lir.name}{self.signature}>"

    # parameters

    def set_param(self, name: str, value: Any) -> None:
        """Give a parameter its value; it is kept until set again, and packed once where kernels want it packed."""
        if name not in self._params:
            known = ", ".join(self._params) or "none"
            raise UnknownNameError(
                f"{self.lir.name!r} has no parameter {name!r}{near(name, self._params)}; it has {known}", code="N115", place=here()
            )
        array = self._checked(name, self._params[name], value, "parameter")
        leaf = self.lir.graph.leaf(name)
        self._param_binding |= infer_binding({leaf: array.shape})
        self._executable.set_param(name, array)
        self._missing.discard(name)

    def set_params(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.set_param(name, value)

    # running

    def run(self, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> tuple[np.ndarray, ...]:
        """Run on arrays by input name; returns new arrays."""
        given = named if feeds is None else {**feeds, **named}
        arrays = self._arrays(given)
        binding: Mapping[str, int] = {} if self._is_static else self._binding(arrays)
        if self._is_static:
            outputs = [RESULTS.empty(shape, dtype) for shape, dtype in self._fast_outputs]  # type: ignore[arg-type]
        else:
            outputs = [RESULTS.empty(t.bind(binding).static_shape, t.dtype.np) for t in self._outputs]
        self._executable.run(arrays, outputs, binding, self._threads())
        return tuple(outputs)

    __call__ = run

    def run_into(self, feeds: Mapping[str, Any], out: Sequence[np.ndarray]) -> None:
        """Run into arrays of the caller: contiguous, of the outputs' types."""
        arrays = self._arrays(feeds)
        binding: Mapping[str, int] = {} if self._is_static else self._binding(arrays)
        if len(out) != len(self._outputs):
            raise OptionError(f"{self.lir.name!r} has {len(self._outputs)} outputs, got {len(out)} arrays", code="O150", place=here())
        for i, (array, kind) in enumerate(zip(out, self._outputs, strict=True)):
            bound = kind.bind(binding) if binding else kind
            if array.dtype != bound.dtype.np or array.shape != bound.shape or not array.flags.c_contiguous:
                raise ShapeError(
                    f"output {i} is {bound}, got {as_dtype(array.dtype)}{list(array.shape)}"
                    + ("" if array.flags.c_contiguous else " that is not contiguous"),
                    code="S107", place=here(),
                )  # fmt: skip
        self._executable.run(arrays, out, binding, self._threads())

    def submit(self, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> Future[tuple[np.ndarray, ...]]:
        """Run in the background."""
        return _background().submit(self.run, feeds, **named)

    def _threads(self) -> int | None:
        return self.options.threads if self.options.threads is not None else config().num_threads

    def _arrays(self, given: Mapping[str, Any]) -> list[np.ndarray]:
        if self._missing:
            name = sorted(self._missing)[0]
            raise UnknownNameError(f"parameter {name!r} : {self._params[name]} has no value yet: use set_param", code="N114", place=here())
        arrays: list[np.ndarray] = []
        for (name, dtype, shape), (_, kind) in zip(self._fast, self._inputs, strict=True):
            value = given.get(name)
            if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape and value.flags.c_contiguous:
                arrays.append(value)
                continue
            if value is None:
                raise UnknownNameError(f"input {name!r} : {kind} is missing; the signature is {self.signature}", code="N114", place=here())
            arrays.append(self._checked(name, kind, value, "input"))
        if len(given) != len(arrays):
            names = [n for n, _ in self._inputs]
            extra = next(n for n in given if n not in names)
            raise UnknownNameError(f"{self.lir.name!r} has no input {extra!r}{near(extra, names)}; the signature is {self.signature}",
                                   code="N112", place=here())  # fmt: skip
        return arrays

    def _checked(self, name: str, kind: TensorType, value: Any, what: str) -> np.ndarray:
        array = np.asarray(value)
        is_python = isinstance(value, (bool, int, float, complex, list, tuple))
        if array.dtype != kind.dtype.np and not is_python:
            raise DTypeError(f"{what} {name!r} is {kind}, got {as_dtype(array.dtype)}{list(array.shape)}", code="D102", place=here())
        fits = len(array.shape) == kind.ndim and all(
            not isinstance(d, int) or d == n for d, n in zip(kind.shape, array.shape, strict=True)
        )
        if not fits:
            raise ShapeError(f"{what} {name!r} is {kind}, got {as_dtype(array.dtype)}{list(array.shape)}", code="S107", place=here())
        return np.ascontiguousarray(array, kind.dtype.np).reshape(array.shape)

    def _binding(self, arrays: Sequence[np.ndarray]) -> dict[str, int]:
        found = infer_binding({x: a.shape for x, a in zip(self._leaves, arrays, strict=True)})
        return {**self._param_binding, **found}

    # seeing

    @property
    def host_steps(self) -> list[str]:
        """Ops that run in Python rather than natively."""
        return list(self._executable.host_steps)

    @property
    def memory(self) -> str:
        from strata.lir import memory_report

        return memory_report(self.lir)


_pool: ThreadPoolExecutor | None = None


def _background() -> ThreadPoolExecutor:
    global _pool  # noqa: PLW0603 - one executor per process, made when first needed
    if _pool is None:
        _pool = ThreadPoolExecutor(4, "strata-submit")
    return _pool
