"""StableHLO both ways: graphs as text for XLA and IREE, and modules that JAX and others export as graphs."""

from strata.arguments import public_names
from strata.io.stablehlo.reading import load
from strata.io.stablehlo.writing import export

public_names(globals())
