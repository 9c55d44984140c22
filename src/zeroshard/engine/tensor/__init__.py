"""Sharded tensors, which stand in a module at rest: the tensor subclass for slices, its home, norms, and forms in which states rest."""
