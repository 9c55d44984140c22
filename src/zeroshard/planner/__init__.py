"""The planner: dry runs of the runtime on imagined ranks tell the memory, communication and time of a run before it starts."""
