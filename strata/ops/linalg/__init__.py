"""Matmul, einsum, factorizations, solves and functions of matrices."""
