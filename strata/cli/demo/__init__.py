"""`strata demo`: a tour of a minute or two, and the examples, by name or from a menu."""

from strata.cli.demo.menu import demo
