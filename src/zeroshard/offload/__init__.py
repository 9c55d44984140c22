"""Offload: where model states rest (device, host, disk), and how reduced gradients get there (ZeRO-Offload, ZeRO-Infinity)."""
