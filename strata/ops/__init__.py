"""Every op of the catalogue, a family a file, and the front-end functions that apply them to values."""

from strata.ops import complex, elementwise, logic, math, matmul, movement, reduce
