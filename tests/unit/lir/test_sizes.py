"""Symbolic sizes that met another size are checked when they are known."""

import numpy as np
import pytest

from strata.core import sym
from strata.errors import SymbolError
from strata.mir import Graph
from strata.runtime import Session


def test_a_symbol_beside_a_number() -> None:
    g = Graph("sum")
    x, y = g.input("x", (sym("N"),)), g.input("y", (4,))
    compiled = Session("cpu").compile(g.outputs(x + y))
    ones = np.ones(4, np.float32)
    np.testing.assert_array_equal(compiled.run(x=ones, y=ones)[0], ones + ones)
    with pytest.raises(SymbolError, match="N = 3 and 4 = 4 must be equal"):
        compiled.run(x=ones[:3], y=ones)


def test_two_symbols() -> None:
    g = Graph("sum")
    x, y = g.input("x", (sym("N"),)), g.input("y", (sym("M"),))
    compiled = Session("cpu").compile(g.outputs(x * y))
    ones = np.ones(5, np.float32)
    assert compiled.run(x=ones, y=ones)[0].shape == (5,)
    with pytest.raises(SymbolError, match="must be equal"):
        compiled.run(x=ones, y=ones[:2])


def test_inner_sizes_of_a_product() -> None:
    g = Graph("product")
    x, w = g.input("x", (2, sym("K"))), g.input("w", (8, 3))
    compiled = Session("cpu").compile(g.outputs(x @ w))
    assert compiled.run(x=np.ones((2, 8), np.float32), w=np.ones((8, 3), np.float32))[0].shape == (2, 3)
    with pytest.raises(SymbolError, match="K = 5 and 8 = 8 must be equal"):
        compiled.run(x=np.ones((2, 5), np.float32), w=np.ones((8, 3), np.float32))
