"""DeepSpeed's Python interface over zeroshard: the names of `import zeroshard.deepspeed` (surface.py), and their implementation.

The interface is that of DeepSpeed 0.19.8. There is no second runtime: an engine holds a model and an optimizer that `zs.shard`
has sharded, and counts steps.
"""

VERSION = "0.19.8+zeroshard"  # frameworks compare it with the lowest version that they accept
