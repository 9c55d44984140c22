"""What stands apart from training: this host, torch's versions, autograd's graph, nested containers of tensors."""
