"""The ZeRO engine: partitions a model into units, gathers and reduces them, driven by hooks of nn.Module and autograd."""
