"""The strategy of Lightning's Trainer.

configure_model      zs.init: parameters are sharded from the start
setup                configure_optimizers -> zs.shard(lightning_module, optimizer)
training_step        runs inside the LightningModule's forward hooks, so that its parameters are gathered
accumulation         zs.accumulate; clipping: zs.clip_grad_norm_ (sharding.py); checkpoints: zs.save and zs.load
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import zeroshard as zs

from ...seam import engine_of
from ...utils.lightning_compat import synchronise_layers
from .sharding import Sharding, is_sharded, whole_state_dict

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class TrainerSharding(Sharding):
    """ZeRO for Lightning's Trainer: ZeroshardStrategy(stage=3, **options of zs.shard), on CPU (gloo) and GPU (NCCL).

    The model stays sharded after a fit, so that it can be saved, validated and fitted again; zs.close(model) makes it an
    ordinary one. precision: all precisions below fp32 except "bf16-true" have fp32 masters; "-mixed" adds autocast.
    """

    precision_name = "precision_plugin"
    precision_plugin = Sharding._plugin
    optimizers: list[torch.optim.Optimizer]  # a property of Lightning's strategy
    lr_scheduler_configs: list[Any]
    _restored = False  # True if load_checkpoint has loaded model and optimizer: Lightning must not load them again

    # -- set up ------------------------------------------------------------------------------------------------------

    def model_sharded_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context around configure_model, in which parameters are sharded when they are made."""
        return zs.init(**self.shard_options())

    def tensor_init_context(self, empty_init: bool | None = None) -> torch.device:
        """Return the device context around configure_model and Trainer.init_module."""
        return torch.device("meta") if empty_init else self.root_device

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, in a fit with its optimizer (collective). An evaluation keeps a model that is sharded already."""
        self.accelerator.setup(trainer)
        self._restored, model, fitting = False, self.lightning_module, trainer.state.fn == "fit"
        if fitting and not is_sharded(model):
            synchronise_layers(self, model)
        self.module_to_device(model)
        if fitting:
            if is_sharded(model):
                zs.close(model)
            self.optimizers, self.lr_scheduler_configs = [], []  # those of an earlier fit refer to the closed model
            self.setup_optimizers(trainer)
        if fitting or not is_sharded(model):
            # if configure_optimizers returns None, Lightning makes an optimizer without parameters
            self._shard(model, [each for each in self.optimizers if each.param_groups] if fitting else [])
        self.optimizers = self.optimizers  # makes Lightning's wrappers again, which imitate the optimizer's new class
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        self.module_to_device(self.lightning_module)

    def teardown(self) -> None:
        """Tear down the plugins. Unlike Lightning's, do not move the model to the host, since it stays sharded on its device."""
        for each in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            each.teardown()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self, kind: str, /, *args: object, **kwargs: object) -> object:
        module, plugin = self.lightning_module, self.precision_plugin
        with plugin.forward_context():
            if kind == "training_step" and not module.automatic_optimization:  # the step itself calls backward
                return module.training_step(*args, **kwargs)
            return _as_forward(module, kind, args, kwargs)

    training_step = functools.partialmethod(_step, "training_step")
    validation_step = functools.partialmethod(_step, "validation_step")
    test_step = functools.partialmethod(_step, "test_step")
    predict_step = functools.partialmethod(_step, "predict_step")

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return the context (zs.accumulate) around backwards of micro-batches without an optimizer step."""
        return zs.accumulate(self.lightning_module)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._restored

    def _optimizer(self) -> torch.optim.Optimizer | None:
        return engine_of(self.lightning_module).optimizer

    def lightning_module_state_dict(self) -> dict[str, object]:
        """Return the module's state dict: slices for a sharded checkpoint, whole tensors for a full one (collective)."""
        module = self.lightning_module
        return module.state_dict() if self._state_dict_type == "sharded" else whole_state_dict(module)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        """Return {} for a sharded checkpoint, where zs.save reads the optimizer; the whole state for a full one (collective)."""
        if self._state_dict_type == "sharded" or self._optimizer() is None:
            return {}
        return zs.full_optimizer_state_dict(self.lightning_module, every_rank=True)

    def save_checkpoint(self, checkpoint: dict[str, object], filepath: str | os.PathLike, storage_options: object = None) -> None:
        """Write a folder with zs.save, complete or invisible, or (full) a file on rank 0 (collective)."""
        if self._state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        optimizer = self._optimizer() if "optimizer_states" in checkpoint else None  # absent with save_weights_only
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        self._save(filepath, self.lightning_module, optimizer, rest, storage_options)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder into the model and, in a fit, its optimizer (collective). Of a file, return the content for Lightning."""
        path = Path(self.broadcast(checkpoint_path))
        self._restored = path.is_dir()
        if not self._restored:
            return super().load_checkpoint(path, weights_only=weights_only)
        optimizer = self._optimizer() if self.lightning_module.trainer.state.fn == "fit" else None
        return self._load(path, self.lightning_module, optimizer, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        if not self._restored:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states of a file: whole tensors, of which the optimizer takes its slices."""
        for state in checkpoint["optimizer_states"]:
            optimizer = self._optimizer()
            assert optimizer is not None
            optimizer.load_state_dict(state)


def _as_forward(module: nn.Module, name: str, args: tuple, kwargs: dict[str, object]) -> object:
    """Call a method of a module inside the module's forward hooks. Its own forward is restored before the method begins."""
    own = {key: value for key, value in module.__dict__.items() if key == "forward"}  # a compiled module has one in __dict__

    def give_back() -> None:
        module.__dict__.pop("forward", None)
        module.__dict__.update(own)

    def forward(*args: object, **kwargs: object) -> object:
        give_back()
        return getattr(module, name)(*args, **kwargs)

    module.__dict__["forward"] = forward
    try:
        return module(*args, **kwargs)
    finally:
        give_back()  # also if a hook raises
