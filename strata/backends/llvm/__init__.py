"""The CPU backend: kernels to LLVM IR text, machine code in this process, and one native program per graph."""

from strata.backends.llvm.executor.thread_pool import ThreadPool, default_pool
from strata.backends.llvm.jit.jit import VERSION, MachineCode, compile_and_load, compile_text, load
from strata.backends.llvm.runtime.program import Argument, BoundProgram, NativeProgram, ProgramStep, region_table
