"""The second axis: Comms made of Comms, for nodes that are joined by slower links than their ranks are (ZeRO++, MiCS, HSDP)."""
