"""`initialize` starts a process group where there is none: each test ends without, and without an installed deepspeed."""

import os

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def as_it_was():
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
