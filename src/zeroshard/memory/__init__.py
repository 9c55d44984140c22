"""Memory: the ledger of bytes by category, the limits and the allocator of host memory, and file I/O (io/)."""
