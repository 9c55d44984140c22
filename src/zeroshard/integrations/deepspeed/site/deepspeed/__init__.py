"""The package `deepspeed` that door.py puts on the path: it replaces itself by zeroshard.deepspeed."""

import sys

import zeroshard.deepspeed

sys.modules[__name__] = zeroshard.deepspeed
