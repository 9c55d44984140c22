"""Interfaces of other tools that train on zeroshard, each in its own vocabulary."""
