"""The loop generator, nest and schedule to LLVM IR: loops, reductions, transpose tiles, software pipelining."""
