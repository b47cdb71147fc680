"""Machine code of a plan's kernels: from memory, the disk cache, a compile, or a schedule search."""
