"""Optimizers that look at more than single elements would be others on flat slices: they are refused by class."""

import pytest
import torch
from torch import nn

import zeroshard as zs


class Lamb(torch.optim.AdamW):
    """Stands for the classes of this name."""


class FusedLAMB(torch.optim.AdamW):
    """Another spelling."""


class Adafactor(torch.optim.AdamW):
    """Another library's, of which nobody has said how it steps."""


class MyAdafactor(Adafactor):
    """Derived from one that is refused."""


REFUSED = [getattr(torch.optim, name) for name in ("LBFGS", "SparseAdam") if hasattr(torch.optim, name)]


@pytest.mark.parametrize("cls", [*REFUSED, Lamb, FusedLAMB, Adafactor, MyAdafactor], ids=lambda cls: cls.__name__)
def test_an_optimizer_that_is_not_elementwise_is_refused(cls):
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    optimizer = cls(model.parameters())
    for stage in (0, 3):
        with pytest.raises(zs.ConfigError, match=rf"optimizer: {cls.__name__} .*takes an elementwise optimizer.*AdamW"):
            zs.shard(model, optimizer, stage=stage)
    assert type(optimizer) is cls and "_zeroshard" not in model.__dict__
    zs.shard(model, torch.optim.AdamW(model.parameters()))  # the remedy


def test_names_of_elementwise_ones_are_not_taken_for_them():
    class AdafactorLike(torch.optim.SGD):
        pass

    model = nn.Linear(3, 2)
    zs.shard(model, AdafactorLike(model.parameters(), lr=0.1))
