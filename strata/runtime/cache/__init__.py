"""Compiled graphs kept by key: caches, templates, compile contracts, ahead-of-time folders, bundles."""
