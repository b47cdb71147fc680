"""Attention and rotary embeddings. What has no reader here is read through the body that the standard gives."""

from __future__ import annotations
