"""Ops without a kernel as ops that have one: transforms, recurrences, factorisations."""
