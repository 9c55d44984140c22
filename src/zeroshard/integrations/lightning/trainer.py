"""The strategy of Lightning's Trainer.

configure_model      zs.init: parameters are sharded from the start
setup                configure_optimizers -> zs.shard(lightning_module, optimizer)
training_step        runs inside the LightningModule's forward hooks, so that its parameters are gathered
accumulation         zs.accumulate; clipping: zs.clip_grad_norm_ (sharding.py); checkpoints: zs.save and zs.load
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard as zs

from .sharding import Sharding, is_sharded, whole_state_dict


class TrainerSharding(Sharding):
    """ZeRO for Lightning's Trainer: ZeroshardStrategy(stage=3, **options of zs.shard), on CPU (gloo) and GPU (NCCL).

    The model stays sharded after a fit, so that it can be saved, validated and fitted again; zs.close(model) makes it an
    ordinary one. precision: all precisions below fp32 except "bf16-true" have fp32 masters; "-mixed" adds autocast.
    """

    optimizers: Any  # defined by Lightning's strategy
    _restored = False  # True if load_checkpoint has loaded model and optimizer: Lightning must not load them again

    # -- precision ---------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin or self._precision_class("32-true", self)

    @precision_plugin.setter
    def precision_plugin(self, given: Any) -> None:
        self._precision_plugin = self._precision_of(given)

    def _plugin(self) -> Any:
        return self.precision_plugin

    # -- set up ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context around configure_model, in which parameters are sharded when they are made."""
        with zs.init(**self.shard_options()):
            yield

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        """Return the device context around configure_model and Trainer.init_module."""
        return torch.device("meta") if empty_init else self.root_device

    def setup(self, trainer: Any) -> None:
        """Shard the model, in a fit with its optimizer (collective). An evaluation keeps a model that is sharded already."""
        self.accelerator.setup(trainer)
        self._restored, model, fitting = False, self.lightning_module, trainer.state.fn == "fit"
        if fitting and self._layer_sync and not is_sharded(model):
            self._layer_sync.apply(model)
        self._to_device(model)
        if fitting:
            if is_sharded(model):
                zs.close(model)
            self._reset_optimizers_and_schedulers()  # those of an earlier fit refer to the closed model
            self.setup_optimizers(trainer)
        if fitting or not is_sharded(model):
            # if configure_optimizers returns None, Lightning makes a _MockOptimizer
            self._shard(model, [each for each in self.optimizers if type(each).__name__ != "_MockOptimizer"] if fitting else [])
        self.optimizers = self.optimizers  # makes Lightning's wrappers again, which imitate the optimizer's new class
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        self._to_device(self.lightning_module)

    def teardown(self) -> None:
        """Tear down the plugins. Unlike Lightning's, do not move the model to the host, since it stays sharded on its device."""
        for each in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            each.teardown()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self, kind: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        module, plugin = self.lightning_module, self.precision_plugin
        with plugin.forward_context():
            if kind == "training_step" and not module.automatic_optimization:  # the step itself calls backward
                return module.training_step(*args, **kwargs)
            return _as_forward(module, kind, args, kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict_step", args, kwargs)

    def block_backward_sync(self) -> Any:
        """Return the context (zs.accumulate) around backwards of micro-batches without an optimizer step."""
        return zs.accumulate(self.lightning_module)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._restored

    def _optimizer(self) -> Any:
        return self.lightning_module._zeroshard.optimizer

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict: slices for a sharded checkpoint, whole tensors for a full one (collective)."""
        module = self.lightning_module
        return module.state_dict() if self._state_dict_type == "sharded" else whole_state_dict(module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return {} for a sharded checkpoint, where zs.save reads the optimizer; the whole state for a full one (collective)."""
        if self._state_dict_type == "sharded" or self._optimizer() is None:
            return {}
        return zs.full_optimizer_state_dict(self.lightning_module, every_rank=True)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder with zs.save, complete or invisible, or (full) a file on rank 0 (collective)."""
        if self._state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        optimizer = self._optimizer() if "optimizer_states" in checkpoint else None  # absent with save_weights_only
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        self._save(filepath, self.lightning_module, optimizer, rest, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder into the model and, in a fit, its optimizer (collective). Of a file, return the content for Lightning."""
        path = Path(self.broadcast(checkpoint_path))
        self._restored = path.is_dir()
        if not self._restored:
            return super().load_checkpoint(path, weights_only=weights_only)
        optimizer = self._optimizer() if self.lightning_module.trainer.state.fn == "fit" else None
        return self._load(path, self.lightning_module, optimizer, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._restored:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states of a file: whole tensors, of which the optimizer takes its slices."""
        for state in checkpoint["optimizer_states"]:
            self._optimizer().load_state_dict(state)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: the package registers its strategies itself, under several names."""


def _as_forward(module: nn.Module, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a method of a module inside the module's forward hooks. Its own forward is restored before the method begins."""
    own = {key: value for key, value in module.__dict__.items() if key == "forward"}  # a compiled module has one in __dict__

    def give_back() -> None:
        module.__dict__.pop("forward", None)
        module.__dict__.update(own)

    def forward(*args: Any, **kwargs: Any) -> Any:
        give_back()
        return getattr(module, name)(*args, **kwargs)

    module.__dict__["forward"] = forward
    try:
        return module(*args, **kwargs)
    finally:
        give_back()  # also if a hook raises
