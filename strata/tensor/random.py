"""Random tensors from explicit keys: the same key gives the same numbers on every device."""

from __future__ import annotations

from typing import Any

from strata import ops
from strata.tensor.tensor import lifted

_random: Any = ops.random  # a module, though `ops` serves functions by name

key = lifted(_random.key)
split = lifted(_random.split)
fold_in = lifted(_random.fold_in)
uniform = lifted(_random.uniform)
normal = lifted(_random.normal)
exponential = lifted(_random.exponential)
gumbel = lifted(_random.gumbel)
randint = lifted(_random.randint)
bernoulli = lifted(_random.bernoulli)
categorical = lifted(_random.categorical)
permutation = lifted(_random.permutation)
