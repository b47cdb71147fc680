"""Native code that runs programs: the worker threads, the dispatch loop, fast calls from Python, interrupts, arenas."""
