"""Activation checkpoints that are partitioned over ranks and offloaded (ZeRO-R; ZeRO-Infinity)."""
