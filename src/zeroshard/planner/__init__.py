"""Know before you run: the runtime on imagined ranks, and what that says of memory, communication and time."""
