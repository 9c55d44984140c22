"""Memory: the ledger of bytes by category, pools of buffers of constant size, and what a host must hold."""
