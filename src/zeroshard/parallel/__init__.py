"""Parallelism beside ZeRO's: the axes of a mesh that split the model itself. zs.shard is called for what each rank then has."""
