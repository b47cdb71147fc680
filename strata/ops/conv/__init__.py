"""Convolutions, pooling, sliding windows, resizing and grid sampling."""
