"""The simulator: when each task of a step runs, from traces of its ranks and the hardware."""
