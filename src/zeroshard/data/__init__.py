"""Data: a sampler whose position is saved with a checkpoint, ranks with unequally many batches, text that ships with Python."""
