"""Passes that make one op of several: attention, matmuls that share an operand."""
