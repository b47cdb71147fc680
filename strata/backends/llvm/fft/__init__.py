"""Fourier transforms: complex, real, long."""
