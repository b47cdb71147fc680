"""User-defined ops whose body is the text of a kernel; they fuse like every other op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.config import config
from strata.core import Dim, SymExpr, TensorType, bounds, divide_exactly, f64, substitute, symbols
from strata.errors import CompileError, DTypeError, IndexRangeError, MissingRuleError, OptionError, RunError, ShapeError
from strata.kernel import (
    NOT_READ,
    Kernel,
    check_access,
    check_own_schedule,
    contained,
    element,
    interpret,
    is_plain,
    numbered_reads,
    parse_kernel,
    show_kernel,
    verify_kernel,
    with_batch,
    with_names,
    with_sizes,
)
from strata.kinds import counted
from strata.mir import Op, Sample, Value, op
from strata.ops.indexing.indexing import CheckedIds

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View

Sizes = tuple[tuple[str, Dim], ...]


def kernel_text(source: str | Kernel) -> str:
    """The text of a kernel that is sound, as it is printed: one form, whatever spaces and comments a person wrote."""
    kernel = parse_kernel(source) if isinstance(source, str) else source
    _check(kernel)
    return show_kernel(kernel)


def _check(kernel: Kernel) -> None:
    verify_kernel(kernel)
    check_access(kernel)
    check_own_schedule(contained(kernel))


@lru_cache(maxsize=256)
def _kernel(text: str) -> Kernel:
    kernel = parse_kernel(text)
    _check(kernel)
    return kernel


@lru_cache(maxsize=256)
def _safe(text: str) -> Kernel:
    return contained(_kernel(text))


@op("custom_kernel")
class CustomKernel(Op):
    """A user's kernel. Inputs are its buffers in order; its symbols take the sizes of what it is given.

    `sizes` are those that no input shows. A body whose stores go through the outputs in order is fused with its
    neighbours as any op is; one with other stores, or with a schedule, is a separate kernel.
    """

    body: str
    sizes: Sizes = ()
    flat: bool = False  # its derivative is zero, by the user's word

    multi_output = True
    dtypes = (f64,)

    @property
    def kernel(self) -> Kernel:
        return _kernel(self.body)

    @property
    def called(self) -> str:
        """The name in reports and messages."""
        return self.kernel.name

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        binding = self._binding(types)
        return tuple(TensorType(b.dtype, tuple(substitute(d, binding) for d in b.shape)) for b in self.kernel.outputs)

    def _binding(self, types: Sequence[TensorType]) -> dict[str, Dim]:
        """The sizes that the kernel's symbols have for inputs of some types."""
        kernel = self.kernel
        if len(types) != len(kernel.inputs):
            wanted = ", ".join(map(str, kernel.inputs)) or "nothing"
            raise OptionError(f"{kernel.name}: takes {wanted}, got {counted(len(types), 'input')}", code="O290")
        for buffer, given in zip(kernel.inputs, types, strict=True):
            if given.dtype is not buffer.dtype:
                raise DTypeError(
                    f"{kernel.name}: input {buffer} is given {given}", code="D270",
                    fix=f"{buffer.name}.astype({str(buffer.dtype)!r})",
                )  # fmt: skip
            if given.ndim != len(buffer.shape):
                raise ShapeError(f"{kernel.name}: input {buffer} is given {given}", code="S384")
        known = self._given_sizes()
        pairs = [
            (f"axis {axis} of {b.name}", pattern, actual)
            for b, t in zip(kernel.inputs, types, strict=True)
            for axis, (pattern, actual) in enumerate(zip(b.shape, t.shape, strict=True))
        ]
        source: dict[str, str] = {}
        for is_exact in (True, False):  # plain symbols first, then sizes such as R + 1
            for what, pattern, actual in pairs:
                found = _solved(pattern, actual, known, is_exact)
                if found is not None:
                    known.setdefault(*found)
                    source.setdefault(found[0], what)
        self._check_sizes(known, pairs, source)
        return known

    def _given_sizes(self) -> dict[str, Dim]:
        known = dict(self.sizes)
        unknown = [name for name in known if name not in self.kernel.symbols()]
        if unknown:
            has = ", ".join(self.kernel.symbols()) or "none"
            raise OptionError(f"{self.kernel.name}: no size is called {unknown[0]!r}; it has {has}", code="O291")
        return known

    def _check_sizes(
        self, known: Mapping[str, Dim], pairs: Sequence[tuple[str, Dim, Dim]], source: Mapping[str, str]
    ) -> None:
        kernel = self.kernel
        for name, symbol in kernel.symbols().items():
            if name not in known:
                raise OptionError(
                    f"{kernel.name}: no input shows the size {name}", code="O291", fix=f"{kernel.name}(…, {name}=8)"
                )
            low, high = bounds(known[name])
            if low < symbol.lo or (symbol.hi is not None and (high is None or high > symbol.hi)):
                limits = f"{symbol.lo}..{'' if symbol.hi is None else symbol.hi}"
                where = f" ({source[name]})" if name in source else ""
                raise ShapeError(f"{kernel.name}: {name} is {known[name]}{where}, outside {limits}", code="S385")
        for what, pattern, actual in pairs:
            wanted = substitute(pattern, known)
            if wanted != actual:
                plain = isinstance(pattern, int)
                shown = str(wanted) if plain else f"{pattern} = {wanted}"
                raise ShapeError(f"{kernel.name}: {what} must be {shown}, it is {actual}", code="S384")

    def numpy(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        kernel = self.kernel
        binding = self._binding([TensorType(b.dtype, a.shape) for b, a in zip(kernel.inputs, arrays, strict=True)])
        narrow = [np.asarray(a).astype(b.dtype.np, copy=False) for b, a in zip(kernel.inputs, arrays, strict=True)]
        sizes = {name: int(n) for name, n in binding.items()}
        if not config().check_indices:
            return tuple(interpret(_safe(self.body), narrow, sizes))
        try:
            return tuple(interpret(kernel, narrow, sizes))
        except RunError as error:
            raise IndexRangeError(f"{kernel.name}: {error.summary}", code="I200") from None

    def vjp(self, *inputs: Value, out: Any, ct: Any, **_: Any) -> Any:
        if self.flat:
            return (None,) * len(inputs)
        raise self._no_rule("vjp")

    def jvp(self, *inputs: Value, out: Any, dx: Any, **_: Any) -> Any:
        if self.flat:
            return (None,) * len(out)
        raise self._no_rule("jvp")

    def _no_rule(self, rule: str) -> MissingRuleError:
        return MissingRuleError(
            f"the custom op {self.called!r} has no {rule} rule", code="R211",
            fix=f"custom_op(text, {rule}=...), or differentiable=False",
        )  # fmt: skip

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim, **_: Any) -> Any:
        made, name = with_batch(self.kernel, batched)
        return CustomKernel(show_kernel(made), (*self.sizes, (name, size)), self.flat)(*inputs)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> tuple[Expr, ...]:
        kernel = _safe(self.body)
        size_of = partial(substitute, binding=self._binding([x.type for x in inputs]))
        views = dict(zip(kernel.input_names, inputs, strict=True))
        # an output of another rank is not what is asked for: only one of them has this index
        return tuple(
            element(k, s, index if len(index) == len(s.axes) else k.axes(s.buffer.shape), views, size_of)
            for s in kernel.stores
        )

    def own_kernel(self, *types: TensorType) -> Kernel | None:
        """The kernel as it is, where it must not be taken apart: it has a schedule, or stores of another form."""
        kernel = _safe(self.body)
        if is_plain(kernel) and not kernel.schedule:
            return None
        names = {b.name: f"in{i}" for i, b in enumerate(kernel.inputs)}
        names |= {b.name: f"out{i}" for i, b in enumerate(kernel.outputs)}
        made = with_names(with_sizes(kernel, partial(substitute, binding=self._binding(types))), names)
        try:
            check_own_schedule(made)
        except CompileError:  # it fits the kernel as it is written, and not with an axis of one element, for instance
            return replace(made, schedule="")
        return made

    def with_checks(self, *inputs: Value) -> tuple[Value, ...] | None:
        """The same with an error for an index outside its buffer, where the kernel has an index that may be."""
        found = numbered_reads(self.kernel)
        if found is None or any(isinstance(x.node.op, CheckedIds) and x.node.op.what == self.name for x in inputs):
            return None
        indices, extents, reader = found
        sizes = tuple((name, n) for name, n in self.sizes if name in indices.symbols())
        made = CustomKernel(show_kernel(indices), sizes, flat=True)(*inputs)
        binding = self._binding([x.type for x in inputs])
        checked = [
            CheckedIds((substitute(extent, binding),), False, self.name, "id", NOT_READ)(ids)
            for ids, extent in zip(made, extents, strict=True)
        ]
        return tuple(CustomKernel(show_kernel(reader), self.sizes, self.flat)(*inputs, *checked))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f64[3, 8], body=_BEST, flat=True),
            Sample(f64[0, 4], body=_BEST, flat=True),
            Sample(f64[4], f64[4], body=_WEAVE, flat=True),
        ]


def _solved(pattern: Dim, actual: Dim, known: Mapping[str, Dim], is_exact: bool) -> tuple[str, Dim] | None:
    """The one symbol that a size of the text leaves open, and its value, where the size is c * symbol + known ones."""
    left = [symbol for name, symbol in symbols(pattern).items() if name not in known]
    if not isinstance(pattern, SymExpr) or len(left) != 1 or (is_exact and str(pattern) != left[0].name):
        return None
    slope, rest = 0, actual
    for factors, count in pattern.terms:
        if factors == (left[0],):
            slope = count
        elif left[0].name in symbols(term := SymExpr(((factors, count),))):
            return None
        else:
            rest = rest - (substitute(term, known) if factors else count)
    value = divide_exactly(rest, slope) if slope else None
    return None if value is None else (left[0].name, value)


_BEST = """kernel @best(x: f64[R, C]) -> place: i64[R], size: f64[R, C] {
  size C in 0..
  size R in 0..
  axis i in R
  axis j in C
  axis k in C
  %0 = x[i, k]
  %1 = argmax %0 over k
  %2 = x[i, j]
  %3 = round(%2)
  store place[i] = %1 over i
  store size[i, j] = %3 over i, j
}"""
_WEAVE = """kernel @weave(a: f64[N], b: f64[N]) -> y: f64[2*N] {
  size N in 0..
  axis i in N
  %0 = a[i]
  %1 = floor(%0)
  %2 = b[i]
  %3 = ceil(%2)
  %4 = mul(i, 2)
  %5 = add(%4, 1)
  store y[%4] = %1 over i
  store y[%5] = %3 over i
}"""
