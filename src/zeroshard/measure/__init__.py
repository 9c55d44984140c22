"""What a sharded model holds and sends, and, by rehearsal, how long its step will take."""
