"""Input arrays of commands: from files, or random."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from strata.cli.parser import Mistake
from strata.core import TensorType, as_dtype

TYPICAL = 16  # of a symbolic size that is not given, within its bounds


def read_arrays(given: Sequence[str], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Arrays by input name from `x=x.npy`, `x.npy` (of the only input), `arrays.npz`, `arrays.safetensors`."""
    found: dict[str, np.ndarray] = {}
    for text in given:
        name, has_name, path = text.partition("=")
        if not has_name:
            name, path = "", text
        if Path(path).suffix == ".npy":
            if not name and len(names) != 1:
                raise Mistake(f"--input {text}: say which of {', '.join(names)} it is, as NAME={path}")
            found[name or names[0]] = _load(path)
        elif name:
            raise Mistake(f"--input {text}: NAME= goes with a .npy file")
        else:
            found |= read_mapping(path)
    for name in found:
        if name not in names:
            raise Mistake(f"--input: there is no input {name!r}; the inputs are {', '.join(names) or 'none'}")
    return found


def read_mapping(path: str) -> dict[str, np.ndarray]:
    """Arrays by name from .npz or .safetensors."""
    if Path(path).suffix == ".safetensors":
        from strata.io import load_safetensors

        file = load_safetensors(path)
        return {name: np.asarray(file[name]) for name in file}
    if Path(path).suffix != ".npz":
        raise Mistake(f"{path}: arrays come from .npy, .npz or .safetensors")
    from strata.io import load_npz

    return load_npz(path)


def _load(path: str) -> np.ndarray:
    from strata.io import load_npy

    return load_npy(path)


def read_sizes(given: Sequence[str]) -> dict[str, int]:
    """`batch=4` as a binding."""
    found = {}
    for text in given:
        name, _, number = text.partition("=")
        if not name or not number.isdigit():
            raise Mistake(f"--size {text}: write NAME=N, as in batch=4")
        found[name] = int(number)
    return found


def binding_for(
    types: Sequence[TensorType], sizes: Mapping[str, int], given: Sequence[tuple[TensorType, np.ndarray]] = ()
) -> dict[str, int]:
    """A number for every symbol: as asked for, as arrays have it, or a typical one within its bounds."""
    symbols = {name: s for kind in types for name, s in kind.symbols().items()}
    for name in sizes:
        if name not in symbols:
            raise Mistake(f"--size {name}: the sizes are {', '.join(symbols) or 'all fixed'}")
    binding = dict(sizes)
    for kind, array in given:
        binding |= {str(d): n for d, n in zip(kind.shape, array.shape, strict=False) if str(d) in symbols}
    for name, symbol in symbols.items():
        high = TYPICAL if symbol.hi is None else min(TYPICAL, symbol.hi)
        binding.setdefault(name, max(high, symbol.lo))
    return binding


def random_array(kind: TensorType, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers; for whole numbers 0 and 1, which any table of ids and any mask can take."""
    shape, dtype = kind.static_shape, as_dtype(kind.dtype).np
    if kind.dtype.is_float:
        return rng.standard_normal(shape).astype(dtype)
    if kind.dtype.is_inexact:
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def random_weight(kind: TensorType, rng: np.random.Generator) -> np.ndarray:
    """As an input, but scaled so that a matmul with it keeps its size."""
    made = random_array(kind, rng)
    shape = kind.static_shape
    return (
        (made / math.sqrt(shape[-2])).astype(made.dtype)
        if kind.dtype.is_float and len(shape) > 1 and shape[-2]
        else made
    )
