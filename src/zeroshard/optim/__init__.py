"""Optimizers: the user's object while its model is sharded, Muon and Lion, averages, optimizers that come late or from elsewhere."""
