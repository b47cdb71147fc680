"""Running: sessions, compiled graphs, their state and memory, active extents."""
