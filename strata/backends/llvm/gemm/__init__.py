"""The matmul template: matching, spec, packing of A and B, micro-kernel, block driver, epilogue."""
