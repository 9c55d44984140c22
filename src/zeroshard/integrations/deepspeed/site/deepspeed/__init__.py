"""zeroshard in DeepSpeed's place: this module becomes zeroshard.deepspeed."""

import sys

import zeroshard.deepspeed

sys.modules[__name__] = zeroshard.deepspeed
