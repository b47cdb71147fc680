"""Convolutions and pools: matching, the templates of each layout, Winograd, gradients."""
