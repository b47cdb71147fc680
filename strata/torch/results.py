"""What a call gives: new tensors, views of them and of its arguments as they are in torch, arguments, sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from strata.core import Dim, SymExpr, substitute
from strata.torch.kinds import TorchSizes, memory_order, size_now
from strata.torch.strides import lay


@dataclass(frozen=True, slots=True)
class Result:
    """A result of the program, its axes in the order in which they are to lie in memory."""

    at: int
    order: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Viewed:
    """A result that is a view of another one, as it is in torch."""

    of: int
    size: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    offset: Dim


@dataclass(frozen=True, slots=True)
class ArgumentView:
    """A result that is a view of an argument, `offset` elements behind its first; `strides` are the argument's."""

    at: int
    strides: tuple[Dim, ...]
    size: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    offset: Dim


@dataclass(frozen=True, slots=True)
class Passed:
    """A result that is an argument of the call."""

    at: int


@dataclass(frozen=True, slots=True)
class SizeResult:
    """A result that is a size."""

    dim: Dim


AnyResult = Result | Viewed | ArgumentView | Passed | SizeResult | None

# ---------------------------------------------------------------------------------------------------- finding views


class Views:
    """Which results of a graph are views, of what. Those of one memory that nothing else gives get a result more."""

    def __init__(self, nodes: Sequence[Any], sizes: TorchSizes, places: Mapping[fx.Node, int]) -> None:
        self.sizes, self.places = sizes, places
        self.bases: list[fx.Node] = []  # results that nobody asks for, behind the others
        self.of: dict[int, Viewed | ArgumentView] = {}  # by the number of the result
        groups: dict[tuple[fx.Node, int], list[int]] = {}
        for number, node in enumerate(nodes):
            t = node.meta.get("val") if isinstance(node, fx.Node) and node not in places else None
            if isinstance(t, torch.Tensor) and t.layout is torch.strided and not any(size_now(n) == 0 for n in t.shape):
                storage = t.untyped_storage()._cdata
                groups.setdefault((_maker(node, storage), storage), []).append(number)
        for (maker, _), numbers in groups.items():
            if maker in places:
                self._of_argument(maker, numbers, nodes)
            else:
                self._of_result(maker, numbers, nodes)

    def _of_argument(self, argument: fx.Node, numbers: Iterable[int], nodes: Sequence[Any]) -> None:
        base: torch.Tensor = argument.meta["val"]
        for number in numbers:
            t: torch.Tensor = nodes[number].meta["val"]
            if t.dtype is base.dtype and (t.is_conj(), t.is_neg()) == (base.is_conj(), base.is_neg()):
                start = self.sizes.dim(t.storage_offset()) - self.sizes.dim(base.storage_offset())
                strides = self.sizes.shape(base.stride())
                self.of[number] = ArgumentView(self.places[argument], strides, *self._as_strided(t), start)

    def _of_result(self, maker: fx.Node, numbers: Sequence[int], nodes: Sequence[Any]) -> None:
        kinds = [nodes[number].meta["val"] for number in numbers]
        whole = next((number for number, t in zip(numbers, kinds, strict=True) if _is_whole(t)), None)
        if whole is None:
            if not _is_whole(maker.meta.get("val")) or not _share(kinds):
                return
            whole = len(nodes) + len(self.bases)
            self.bases.append(maker)
        base = maker if whole >= len(nodes) else nodes[whole]
        for number, t in zip(numbers, kinds, strict=True):
            if nodes[number] is not base and t.dtype is base.meta["val"].dtype and not t.is_conj() and not t.is_neg():
                self.of[number] = Viewed(whole, *self._as_strided(t), self.sizes.dim(t.storage_offset()))

    def _as_strided(self, t: torch.Tensor) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
        return self.sizes.shape(t.shape), self.sizes.shape(t.stride())


def _maker(node: fx.Node, storage: int) -> fx.Node:
    """The node that made the memory of a result; of what a higher-order op gives, each result is one of its own,
    since torch may state one tensor for several calls of one graph."""
    while not isinstance(node.target, torch._ops.HigherOrderOperator):
        before = [s for s in node.all_input_nodes if node.target is operator.getitem or _is_in(s, storage)]
        if not before or isinstance(before[0].target, torch._ops.HigherOrderOperator):
            break
        node = before[0]
    return node


def _is_in(node: fx.Node, storage: int) -> bool:
    kept = node.meta.get("val")
    return isinstance(kept, torch.Tensor) and kept.layout is torch.strided and kept.untyped_storage()._cdata == storage


def _is_whole(t: Any) -> bool:
    """Whether a tensor is all of its memory, without gaps."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if not isinstance(t, torch.Tensor) or t.is_conj() or t.is_neg() or memory_order(t) is None:
        return False
    return statically_known_true(t.untyped_storage().nbytes() == t.numel() * t.itemsize)


def _share(kinds: Sequence[torch.Tensor]) -> bool:
    """Whether two views of one memory have an element in common, in the sizes of now."""
    if len(kinds) < 2:
        return False
    room = np.empty(max(map(_end, kinds)), np.int8)  # never touched
    views = []
    for t in kinds:
        shape, steps = tuple(map(size_now, t.shape)), [size_now(s) * t.itemsize for s in t.stride()]
        start = size_now(t.storage_offset()) * t.itemsize
        views.append(np.lib.stride_tricks.as_strided(room[start:], shape, steps, writeable=False))
    for i, a in enumerate(views):
        for b in views[:i]:
            try:
                if np.shares_memory(a, b, max_work=1 << 16):  # type: ignore[arg-type]
                    return True
            except np.exceptions.TooHardError:
                return True
    return False


def _end(t: torch.Tensor) -> int:
    last = sum((size_now(n) - 1) * size_now(s) for n, s in zip(t.shape, t.stride(), strict=True))
    return (size_now(t.storage_offset()) + last + 1) * t.itemsize


# ------------------------------------------------------------------------------------------------------- giving them


def given(
    results: Sequence[AnyResult], made: Sequence[torch.Tensor], args: Sequence[Any], sizes: Callable[[], dict[str, int]]
) -> list[Any]:
    """The results of a call from the tensors that the program made. `sizes` gives the sizes by their names."""
    found: list[Any] = []
    views: list[tuple[int, Viewed]] = []
    for r in results:
        if type(r) is Result:
            t = made[r.at]
            found.append(t if r.order is None else t.permute(_inverse(r.order)))
        elif type(r) is Viewed:
            views.append((len(found), r))
            found.append(None)
        elif type(r) is ArgumentView:
            found.append(_part(r, args[r.at].detach(), sizes))
        elif type(r) is Passed:
            found.append(args[r.at])
        elif type(r) is SizeResult:
            found.append(substitute(r.dim, sizes()) if isinstance(r.dim, SymExpr) else r.dim)
        else:
            found.append(None)
    for number, r in views:
        found[number] = found[r.of].as_strided(_now(r.size, sizes), _now(r.stride, sizes), *_now((r.offset,), sizes))
    return found


def _part(view: ArgumentView, base: torch.Tensor, sizes: Callable[[], dict[str, int]]) -> torch.Tensor:
    strides, size, stride = (_now(dims, sizes) for dims in (view.strides, view.size, view.stride))
    if base.stride() != strides:
        base = lay(base, strides)
    return base.as_strided(size, stride, base.storage_offset() + _now((view.offset,), sizes)[0])


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(i) for i in range(len(order)))


def _now(dims: tuple[Dim, ...], sizes: Callable[[], dict[str, int]]) -> tuple[int, ...]:
    return tuple(substitute(d, sizes()) if isinstance(d, SymExpr) else d for d in dims)  # type: ignore[misc]
