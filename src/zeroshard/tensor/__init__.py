"""Sharded tensors, a module's parameters at rest: the tensor subclass, its home, norms, and forms of resting optimizer states."""
