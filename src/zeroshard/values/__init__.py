"""Whole values of a sharded model: made (zs.init), gathered (zs.gathered), streamed tensor by tensor, given back (zs.close)."""
