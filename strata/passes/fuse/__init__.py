"""Passes that make one op of several: attention, matmuls with a shared operand."""
