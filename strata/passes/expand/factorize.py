"""Factorisations and solves as loops over columns."""

from __future__ import annotations
