"""Lazy tensors beside NumPy arrays: views, changes in place, copies, pickles, donation.

No tensor sees what is done to another. What was not computed when its source was donated may refuse to be read.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

import strata
from strata.errors import RunError

COPIES: dict[str, Callable[[strata.Tensor], strata.Tensor]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "tensor": strata.tensor,
    "plus": lambda x: +x,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),  # noqa: S301 - our own
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "turned": lambda x: x[::-1],
    "column": lambda x: x[:, :1],
    "flat": lambda x: x.reshape(-1).reshape(x.shape),
    "transposed": lambda x: x.T,
    "row": lambda x: x[1:2],
    "same shape": lambda x: x.reshape(x.shape),
    "all": lambda x: x[...],
    "same type": lambda x: x.astype("float32"),
}
CHANGES: dict[str, Callable[[Any, float], None]] = {
    "row": lambda x, v: x.__setitem__(0, v),
    "column": lambda x, v: x.__setitem__((slice(None), -1), v),
    "all": lambda x, v: x.__setitem__(..., v),
    "step": lambda x, v: x.__setitem__((slice(None, None, 2),), v),
}


class LazyMachine(RuleBasedStateMachine):
    """Tensors by number, each with the array that it must be; None where it was donated."""

    tensors = Bundle("tensors")
    slice = 20

    @initialize()
    def start(self) -> None:
        self.tensor: list[strata.Tensor] = []
        self.model: list[np.ndarray | None] = []
        self.sources: list[frozenset[int]] = []  # tensors that one was made of, and itself
        self.refusing: set[int] = set()  # those that may
        self.shown: list[tuple[np.ndarray, np.ndarray]] = []  # arrays that were handed out, and what they show
        self.step = strata.jit(lambda w: w * 2.0 + 1.0, donate_argnums=(0,))
        self.plain = strata.jit(lambda w: w * 2.0 + 1.0)

    def add(self, tensor: strata.Tensor, array: np.ndarray, *sources: int) -> int:
        number = len(self.tensor)
        self.tensor.append(tensor)
        self.model.append(array)
        self.sources.append(frozenset({number}).union(*(self.sources[i] for i in sources)))
        return number

    def check(self, i: int) -> None:
        model = self.model[i]
        try:
            found = self.tensor[i].numpy()
        except RunError:
            assert model is None or i in self.refusing
        else:
            assert model is not None, "a donated tensor was read"
            np.testing.assert_array_equal(found, model)

    @rule(target=tensors, rows=st.integers(2, 3), columns=st.sampled_from([2, 700]), first=st.integers(-3, 3))
    def new(self, rows: int, columns: int, first: int) -> int:
        array = np.arange(first, first + rows * columns).reshape(rows, columns).astype("f4")
        made = strata.tensor(array)
        expected = array.copy()
        array[...] = -77  # the tensor has memory of its own
        return self.add(made, expected)

    @rule(target=tensors, i=tensors, name=st.sampled_from(sorted(COPIES)))
    def copied(self, i: int, name: str) -> int:
        model = self.model[i]
        if model is None or i in self.refusing:
            return i
        return self.add(COPIES[name](self.tensor[i]), model.copy(), i)

    @rule(target=tensors, i=tensors, name=st.sampled_from(sorted(VIEWS)))
    def viewed(self, i: int, name: str) -> int:
        model = self.model[i]
        if model is None or i in self.refusing:
            return i
        return self.add(VIEWS[name](self.tensor[i]), VIEWS[name](model).copy(), i)

    @rule(target=tensors, i=tensors, j=tensors)
    def summed(self, i: int, j: int) -> int:
        a, b = self.model[i], self.model[j]
        if a is None or b is None or a.shape != b.shape or self.refusing & {i, j}:
            return i
        return self.add(self.tensor[i] + self.tensor[j] * 0.5, a + b * np.float32(0.5), i, j)

    @rule(i=tensors, name=st.sampled_from(sorted(CHANGES)), value=st.integers(-9, 9))
    def change(self, i: int, name: str, value: int) -> None:
        model = self.model[i]
        if model is not None and i not in self.refusing:
            CHANGES[name](self.tensor[i], float(value))
            model = model.copy()
            CHANGES[name](model, float(value))
            self.model[i] = model

    @rule(i=tensors, j=tensors)
    def assign(self, i: int, j: int) -> None:
        a, b = self.model[i], self.model[j]
        if a is not None and b is not None and a.shape == b.shape and not self.refusing & {i, j}:
            self.tensor[i].assign(self.tensor[j])
            self.model[i] = b.copy()
            self.sources[i] |= self.sources[j]

    @rule(i=tensors)
    def add_in_place(self, i: int) -> None:
        model = self.model[i]
        if model is not None and i not in self.refusing:
            self.tensor[i] += 1.0
            self.model[i] = model + np.float32(1)

    @rule(i=tensors)
    def realize(self, i: int) -> None:
        if self.model[i] is not None and i not in self.refusing:
            self.tensor[i].realize()

    @rule(i=tensors)
    def show(self, i: int) -> None:
        model = self.model[i]
        if model is not None and i not in self.refusing:
            array = self.tensor[i].numpy()
            assert not array.flags.writeable
            self.shown.append((array, model.copy()))

    @rule(target=tensors, i=tensors, donates=st.booleans())
    def called(self, i: int, donates: bool) -> int:
        model = self.model[i]
        if model is None or i in self.refusing:
            return i
        tensor = self.tensor[i]
        made = (self.step if donates else self.plain)(tensor)
        if donates:
            for k, other in enumerate(self.tensor):
                if other is tensor:
                    self.model[k] = None
                elif i in self.sources[k]:
                    self.refusing.add(k)
        return self.add(made, model * np.float32(2) + np.float32(1))

    @rule(i=tensors)
    def read(self, i: int) -> None:
        self.check(i)

    @invariant()
    def arrays_that_were_handed_out_stay(self) -> None:
        for array, expected in getattr(self, "shown", ()):
            np.testing.assert_array_equal(array, expected)

    def teardown(self) -> None:
        for i in range(len(getattr(self, "model", ()))):
            self.check(i)
