"""Fewer bytes on the wire (ZeRO++): Comms that quantize, send in hops, or leave sums to the backend; codecs pack values."""
