"""Data: a sampler whose position is saved with a checkpoint, ranks with different numbers of batches, and text as bytes."""
