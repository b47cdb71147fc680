"""Passes that choose layouts: channels last, separable pools, transposed convolutions."""
