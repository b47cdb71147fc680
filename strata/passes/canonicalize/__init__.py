"""Passes that bring a graph to a plain form: fold, simplify, decompose, drop what is unused."""
