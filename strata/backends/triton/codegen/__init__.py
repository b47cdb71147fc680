"""Kernel IR as Triton text: element-wise loops, reductions, matmuls, attention, quantised weights."""
