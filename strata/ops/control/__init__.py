"""Control flow and user code: cond, while, scan, checkpoint, custom functions and kernels."""
