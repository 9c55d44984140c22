"""What a rank holds, sends and moves: the snapshot, which all outside of the engine read, and `zs.report`, which prints it."""
