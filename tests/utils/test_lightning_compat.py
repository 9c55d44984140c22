"""Each name of Lightning that is no interface of it: the installed release has it; without it what needs it is refused by name."""

import sys

import pytest
from torch import nn

import zeroshard as zs
from zeroshard.utils import lightning_compat


def test_the_trainer_tells_a_strategy_whether_to_synchronise_layers():
    strategies = pytest.importorskip("lightning.pytorch").strategies
    plugins = pytest.importorskip("lightning.pytorch.plugins")
    strategy, model = strategies.DDPStrategy(), nn.Sequential(nn.BatchNorm1d(2))
    assert list(lightning_compat.NAMES) == ["_layer_sync", "fabric.strategies.model_parallel", "_has_dtensor_modules"]
    lightning_compat.synchronise_layers(strategy, model)
    assert type(model[0]) is nn.BatchNorm1d
    strategy._layer_sync = plugins.TorchSyncBatchNorm()
    lightning_compat.synchronise_layers(strategy, model)
    assert type(model[0]) is nn.SyncBatchNorm
    del strategy._layer_sync
    with pytest.raises(zs.ConfigError, match=r"sync_batchnorm.*lightning .* has no _layer_sync.*pip install 'lightning>=2.6"):
        lightning_compat.synchronise_layers(strategy, model)
    lightning_compat.synchronise_layers(strategy, nn.Linear(2, 2))


@pytest.mark.parametrize("missing", ["fabric.strategies.model_parallel", "_has_dtensor_modules"])
def test_checkpoints_of_model_parallel_strategies_know_models_of_the_door(monkeypatch, missing):
    fabric, trainer = (pytest.importorskip(f"lightning.{name}.strategies") for name in ("fabric", "pytorch"))
    module, wanted = sys.modules["lightning.fabric.strategies.model_parallel"], nn.Linear(2, 2)
    monkeypatch.setattr(module, "_has_dtensor_modules", lambda module: False)
    monkeypatch.setattr(module, "_shows_zeroshard", False, raising=False)
    kinds = fabric.ModelParallelStrategy, trainer.ModelParallelStrategy
    for kind in kinds:
        for name in ("save_checkpoint", "load_checkpoint"):
            monkeypatch.setattr(kind, name, getattr(kind, name))
    lightning_compat.show_models(lambda given: given is wanted)
    lightning_compat.show_models(lambda given: True)  # once for the process
    assert module._has_dtensor_modules(wanted) and not module._has_dtensor_modules(nn.Linear(2, 2))
    monkeypatch.setattr(module, "_shows_zeroshard", False)
    if missing == "_has_dtensor_modules":
        monkeypatch.delattr(module, missing)
    else:
        monkeypatch.delitem(sys.modules, f"lightning.{missing}")
    lightning_compat.show_models(lambda given: given is wanted)
    for kind in kinds:
        for name in ("save_checkpoint", "load_checkpoint"):
            with pytest.raises(
                zs.ConfigError, match=r"ModelParallelStrategy.*has no _has_dtensor_modules.*pip install 'lightning>=2.6"
            ):
                getattr(kind, name)(None, "path")
