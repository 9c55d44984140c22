"""A step in time: traces, hardware, what each task waits for."""
