"""Random tensors from explicit keys: the same key gives the same numbers on every device."""

from __future__ import annotations

from strata import ops
from strata.tensor.tensor import lifted

key = lifted(ops.random.key)
split = lifted(ops.random.split)
fold_in = lifted(ops.random.fold_in)
uniform = lifted(ops.random.uniform)
normal = lifted(ops.random.normal)
exponential = lifted(ops.random.exponential)
gumbel = lifted(ops.random.gumbel)
randint = lifted(ops.random.randint)
bernoulli = lifted(ops.random.bernoulli)
categorical = lifted(ops.random.categorical)
permutation = lifted(ops.random.permutation)
