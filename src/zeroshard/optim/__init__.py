"""The sharded optimizer: steps flat shards with any elementwise torch.optim optimizer, and whole parameters with others."""
