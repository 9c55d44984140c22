"""Shapes of models for imagined ranks, and a block that is checkpointed."""

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroshard.planner.models.gpt import GPTConfig

SMALL = GPTConfig(vocab_size=4096, seq_len=16, dim=512, layers=4, heads=4)
LARGE = GPTConfig(vocab_size=32768, seq_len=16, dim=4096, layers=3, heads=4)  # blocks that 1,024 ranks can share


class Checkpointed(nn.ModuleList):
    """Blocks that recompute their activations in backward."""

    reentrant = False

    def __iter__(self):
        for block in super().__iter__():
            yield functools.partial(checkpoint, block, use_reentrant=self.reentrant)
