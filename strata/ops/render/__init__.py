"""Rendering: Gaussian splats, projected, binned into tiles, rasterised front to back, and their derivative."""
