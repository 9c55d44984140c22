"""Tensors that are cut: the flat layout, the sharded tensor, tiles and chunks. Arithmetic and tensor subclasses; no communication."""
