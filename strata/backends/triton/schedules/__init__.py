"""Schedules of Triton kernels as data, and the measured winners that ship."""
