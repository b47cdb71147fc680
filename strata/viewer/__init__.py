"""The viewer: a page with a program at every stage, what the compiler did to it, and where its time and memory go."""

from strata.arguments import public_names
from strata.viewer.open import page_for, view
from strata.viewer.page import page_text
from strata.viewer.plots import Picture, Plot, bars, picture, plot
from strata.viewer.program import likely_sizes

__all__ = ["Picture", "Plot", "bars", "likely_sizes", "page_for", "page_text", "picture", "plot", "view"]

public_names(globals())
