"""DeepSpeed's Python interface over zeroshard: what `import zeroshard.deepspeed` shows (surface.py), and what is behind it.

Facts about the interface are those of DeepSpeed 0.19.8. There is no second runtime: an engine is a model and an optimizer
of `zs.shard`, and counters.
"""

VERSION = "0.19.8+zeroshard"  # what frameworks compare with the least that they take
