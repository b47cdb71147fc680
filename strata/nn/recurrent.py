"""LSTM and GRU with torch's parameters: weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0, …"""

from __future__ import annotations

from math import sqrt
from typing import Any, ClassVar

import strata.tensor as tensors
from strata.nn import initial
from strata.nn.module import Module
from strata.tensor import random

ops: Any = tensors


class _Recurrent(Module):
    gates: ClassVar[int]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        bidirectional: bool = False,
        *,
        key: Any = None,
        dtype: Any = "f32",
    ) -> None:
        self.num_layers, self.has_bias, self.batch_first = num_layers, bias, batch_first
        self.bidirectional = bidirectional
        rows, bound = self.gates * hidden_size, 1 / sqrt(hidden_size)
        names: list[str] = []
        parent = initial.key_or_next(key)
        for layer in range(num_layers):
            columns = input_size if layer == 0 else hidden_size * (2 if bidirectional else 1)
            for suffix in (f"l{layer}", f"l{layer}_reverse")[: 2 if bidirectional else 1]:
                shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, columns), "weight_hh": (rows, hidden_size)}
                shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if bias else {}
                for kind, shape in shapes.items():
                    name = f"{kind}_{suffix}"
                    setattr(self, name, initial.uniform(random.fold_in(parent, len(names)), shape, bound, dtype))
                    names.append(name)
        self.names = tuple(names)

    def _run(self, x: Any, state: Any) -> Any:
        run = ops.lstm if self.gates == 4 else ops.gru
        return run(
            x, state, [getattr(self, n) for n in self.names], bias=self.has_bias, num_layers=self.num_layers,
            bidirectional=self.bidirectional, batch_first=self.batch_first,
        )  # fmt: skip


class LSTM(_Recurrent):
    """(output, (h, c)) of a sequence [T, B, I], or [B, T, I] with `batch_first`."""

    gates = 4

    def __call__(self, x: Any, state: Any = None) -> Any:
        return self._run(x, state)


class GRU(_Recurrent):
    """(output, h) of a sequence."""

    gates = 3

    def __call__(self, x: Any, state: Any = None) -> Any:
        return self._run(x, state)
