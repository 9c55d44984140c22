"""Reports of a sharded model's memory and communication, and forecasts of its step time from measured rates."""
