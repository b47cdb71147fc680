"""Packed small elements: an invocation that writes a whole word needs no atomics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strata.kernel import Axis, Buffer, Compute, LoopBlock, Store, StoreStep, linear, parallel_chain

WORD = 4  # bytes
MOST_STEPS = 128  # of a block that is written out once for each element of a word


@dataclass(frozen=True, slots=True)
class Words:
    """Like points, but `each` neighbours along the last loop are one invocation's."""

    loops: int
    each: int
    size: int = 64

    def __str__(self) -> str:
        return f"words {self.loops} of {self.each} by {self.size}"


def find_words(nest: LoopBlock, is_packed: Callable[[Buffer], bool]) -> Words | None:
    """The schedule by words of a nest without inner loops; None where elements of a word may be of several rows."""
    chain = parallel_chain(nest)
    if not chain or not all(isinstance(s, (Compute, StoreStep)) for s in chain[-1].body.steps):
        return None
    if len(chain[-1].body.steps) > MOST_STEPS:
        return None
    stores = [s.store for s in chain[-1].body.steps if isinstance(s, StoreStep) and is_packed(s.store.buffer)]
    if not stores:
        return None
    each = max(WORD // s.buffer.dtype.itemsize for s in stores)
    fits = all(_fits(s, chain[-1].axis, each) for s in stores)
    return Words(len(chain), each) if fits else None


def _fits(store: Store, last: Axis, each: int) -> bool:
    """Whether elements at regular distances along the axis, from the first on, are separate words."""
    form = linear(store.index[0])
    others = {atom: step for atom, step in form.terms.items() if atom is not last}
    if form.terms.get(last) != 1 or any(last in atom.free for atom in others):
        return False
    if not others and form.constant == 0 and (last.extent,) == store.buffer.shape:
        return True  # what is after the last element belongs to nobody
    steps = [form.constant, last.extent, *others.values()]
    return all(isinstance(step, int) and step % each == 0 for step in steps)
