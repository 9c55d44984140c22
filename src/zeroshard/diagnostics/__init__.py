"""Diagnostics: the desk that tells peers where a rank stands, and the description of a stall."""
