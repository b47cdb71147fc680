"""Random tensors from explicit keys: the same key gives the same numbers on every device."""

from __future__ import annotations

from typing import Any

from strata import ops
from strata.tensor.creation import created

_random: Any = ops.random  # a module, though `ops` serves functions by name

key = created(_random.key)
split = created(_random.split)
fold_in = created(_random.fold_in)
uniform = created(_random.uniform)
normal = created(_random.normal)
exponential = created(_random.exponential)
gumbel = created(_random.gumbel)
randint = created(_random.randint)
bernoulli = created(_random.bernoulli)
categorical = created(_random.categorical)
permutation = created(_random.permutation)
