"""Integrations with training tools: each folder has one tool's interface, implemented with zeroshard's functions."""
