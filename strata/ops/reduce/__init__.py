"""Reductions, cumulative ops and softmax."""
