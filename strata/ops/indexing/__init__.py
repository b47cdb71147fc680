"""Gather, scatter, subscripts, sorting, and arrangements of elements."""
