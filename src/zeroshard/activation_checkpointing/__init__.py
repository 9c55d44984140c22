"""Activations: partitioned and offloaded checkpoints, and tiled operators (ZeRO-R; ZeRO-Infinity)."""
