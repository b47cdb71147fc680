"""From LLVM IR text to machine code in this process: code generator, loader, worker processes, cached code."""
