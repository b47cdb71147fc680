"""Kernels as Triton programs: text by `render`, binaries by `compile`, and the `cuda` device that launches them."""
