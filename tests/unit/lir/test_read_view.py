"""Views that steps in Python read: of every element type, also those that NumPy does not know by name."""

import numpy as np
import pytest

from strata.core import ALL_DTYPES, DType
from strata.lir.views import Spacing, read_view


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_type_is_read_where_it_lies(dtype: DType) -> None:
    x = np.arange(6).astype(dtype.np)
    seen = read_view(x, Spacing(1, (1, 2)), (2, 2), {})
    assert seen.dtype == dtype.np
    np.testing.assert_array_equal(seen.astype(np.complex128), x[[[1, 3], [2, 4]]].astype(np.complex128))
