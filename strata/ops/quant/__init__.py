"""Quantised weights and integer arithmetic: GGUF blocks, schemes, dequantised matmul, quantisation-aware training."""
