"""Element-wise ops: math, comparisons, logic, rounding, special functions, complex numbers, activations."""
