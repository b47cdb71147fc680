"""Passes that trade time for memory."""
