"""Offload of model states from the device to host and disk: moves between these tiers, the host's step, the memory it takes."""
