"""Checks and refusals: what a program may not do to a sharded model, and ranks whose data has ended."""
