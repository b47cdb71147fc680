"""The matmul template: matching, spec and its planning, packing of A and B, micro-kernel, block driver, epilogue."""
