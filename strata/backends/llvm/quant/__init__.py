"""Matmuls with quantised weights (GGUF blocks, groups) and grouped matmuls of experts."""
