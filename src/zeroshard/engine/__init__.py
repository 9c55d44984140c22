"""Ring 0, the engine: stages 0 to 3 over one process group, with states on the device."""
