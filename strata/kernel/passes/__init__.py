"""Kernel passes: the normal form first, then rewrites that make loops simple, short and vectorisable."""
