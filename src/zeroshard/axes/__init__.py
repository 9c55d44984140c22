"""Axes of a mesh: which ranks shard, replicate or cut the model, and parameters that are parts of larger ones."""
