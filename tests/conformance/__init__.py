"""Suites of others, run on ours."""
