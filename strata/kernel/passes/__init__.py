"""Rewrites of kernels: normal form first, then what makes loops plain, short and vectorisable."""
