"""The sharded optimizer: any elementwise torch.optim optimizer, stepping flat shards; others, whole parameters in turns."""
