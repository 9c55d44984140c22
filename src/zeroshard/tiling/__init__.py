"""Tiling: cut operators that are too large to gather whole into tiles (ZeRO-Infinity, arXiv 2104.07857, 5.1.3)."""
