"""The mesh: Comms that work over other Comms, for nodes with slower links between them than inside (ZeRO++, MiCS, HSDP)."""
