"""Sharded tensors: the flat layout, the tensor subclass, tiles and chunks. Arithmetic and tensor subclasses, no communication."""
