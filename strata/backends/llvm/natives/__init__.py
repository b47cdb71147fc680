"""Hand-written kernels: sort, top-k, search, scatter, recurrences."""
