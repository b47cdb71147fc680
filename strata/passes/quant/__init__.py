"""Passes about precision and quantisation."""
