"""Formats in which optimizer states rest: int8, fp8, bf16 and others, with scales for blocks."""
