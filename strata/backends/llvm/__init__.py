"""The CPU backend: kernels to LLVM IR text, machine code in this process, and one native program per graph."""
