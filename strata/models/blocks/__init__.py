"""Blocks that families of models share: transformer layers by the names of their weights, convolutions with norms."""
