"""Factorizations and solves of stacks of matrices by LAPACK."""
