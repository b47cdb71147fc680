"""From Triton text to what runs: binaries, launches, CUDA graphs, the interpreter of the tests."""
