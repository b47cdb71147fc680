"""Canonicalization passes: fold, simplify, decompose, drop what is unused."""
