"""Every front-end function can be called by its name, on tensors as on graph values: no module hides one."""

import numpy as np

import strata as st
from strata import ops
from strata.mir import METHODS


def test_functions_are_functions() -> None:
    assert [name for name in METHODS if not callable(getattr(ops, name, None))] == []
    assert [name for name in METHODS if not callable(getattr(st, name, None)) and name not in st._MODULES] == []


def test_repeat() -> None:
    np.testing.assert_array_equal(st.repeat(st.tensor([1, 2]), 2, 0).numpy(), [1, 1, 2, 2])
