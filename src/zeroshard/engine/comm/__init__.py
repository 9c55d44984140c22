"""Communication: the interface of a communicator, torch.distributed behind it, streams, staging buffers, failures."""
