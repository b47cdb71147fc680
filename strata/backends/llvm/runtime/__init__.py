"""Executables: a plan bound to sizes, its programs, packed weights, calls and archives."""
