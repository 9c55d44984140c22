"""The snapshot of a rank, which all outside of the engine read, and `zs.report`, which prints it beside the formulas."""
