"""Each name of Lightning that is no interface of it: the installed release has it; without it what needs it is refused by name."""

import pytest
from torch import nn

import zeroshard as zs
from zeroshard.utils import lightning_compat


def test_the_trainer_tells_a_strategy_whether_to_synchronise_layers():
    strategies = pytest.importorskip("lightning.pytorch").strategies
    plugins = pytest.importorskip("lightning.pytorch.plugins")
    strategy, model = strategies.DDPStrategy(), nn.Sequential(nn.BatchNorm1d(2))
    assert list(lightning_compat.NAMES) == ["_layer_sync"]
    lightning_compat.synchronise_layers(strategy, model)
    assert type(model[0]) is nn.BatchNorm1d
    strategy._layer_sync = plugins.TorchSyncBatchNorm()
    lightning_compat.synchronise_layers(strategy, model)
    assert type(model[0]) is nn.SyncBatchNorm
    del strategy._layer_sync
    with pytest.raises(zs.ConfigError, match=r"sync_batchnorm.*lightning .* has no _layer_sync.*pip install 'lightning>=2.6"):
        lightning_compat.synchronise_layers(strategy, model)
    lightning_compat.synchronise_layers(strategy, nn.Linear(2, 2))
