"""Model parallelism along mesh axes (tensor, pipeline); zs.shard is then called for each rank's part of the model."""
