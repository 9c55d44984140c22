"""The mesh: Comms made of Comms, for nodes whose links to each other are slower than those inside (ZeRO++, MiCS, HSDP)."""
