"""The loop generator: a nest and its schedule as LLVM IR: loops, loads and stores, reductions, transposed tiles,
software pipelining.
"""
