"""The loader of `deepspeed.initialize(training_data=...)` draws what DeepSpeed's does."""

import pytest
import torch
from torch.utils.data import DistributedSampler

from zeroshard.integrations.deepspeed.setup import DeepSpeedDataLoader

DATA = list(range(12))


def drawn(epoch: int) -> list[int]:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=True)
    sampler.set_epoch(epoch)
    return [DATA[index] for index in sampler]


@pytest.mark.parametrize("given", [False, True], ids=["its own sampler", "a sampler of the program"])
def test_the_program_alone_says_the_epoch(given):
    """Two passes, set_epoch(5), a third pass: epochs 0, 0 and 5."""
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0) if given else None
    loader = DeepSpeedDataLoader(DATA, 2, rank=0, world_size=2, data_sampler=sampler)

    def one_pass() -> list[int]:
        return torch.cat(list(loader)).tolist()

    assert [one_pass(), one_pass()] == [drawn(0), drawn(0)]
    loader.data_sampler.set_epoch(5)
    assert one_pass() == drawn(5) != drawn(0)
