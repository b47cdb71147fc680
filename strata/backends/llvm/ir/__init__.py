"""LLVM IR as text: builder, registers, float operations; and what hand-written kernels share, with their registry."""
