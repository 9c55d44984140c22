"""Memory: the ledger of bytes by category, and the pools of constant size."""
