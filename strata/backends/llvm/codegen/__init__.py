"""Machine code of the kernels of a plan: from the process, the disk cache, a compile, or a search for schedules."""
