"""Utilities without knowledge of sharding: this host, torch's versions, autograd's graph, nested containers of tensors."""
