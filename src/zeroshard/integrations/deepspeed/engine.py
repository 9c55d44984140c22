"""The engine: a model and an optimizer of `zs.shard`, with the counters and methods of DeepSpeed's training loop.

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loss = engine(batch); engine.backward(loss); engine.step()

Gradients accumulate over micro-steps: stages 0 and 1 sum them locally, inside `zs.accumulate`, until the last micro-step before
an optimizer step (the boundary); stages 2 and 3 reduce after every backward, as DeepSpeed does. zs.shard's optimizer does loss
scaling, clipping and the skipping of steps with an overflow.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...errors import ZeroshardError
from ...public import accumulate, close, offload_states, reload_states
from ...seam import engine_of
from ...utils import torch_compat
from ...utils.dtypes import casts_to
from ...utils.tensor_tree import find_tensors, map_tensors
from ...utils.torch_compat import in_derivative
from . import partition
from .accelerator import always
from .checkpoints import Checkpoints
from .ds_config import DeepSpeedConfig
from .engine_optimizer import wrap
from .logs import logger, warning_once
from .moe import has_moe_layers
from .monitor import Event, ThroughputTimer

R = TypeVar("R")
_scaled: set[int] = set()  # graph tasks (autograd's ids) of running backwards whose loss `engine.backward` has scaled already


def _one_thread(method: Callable[..., R]) -> Callable[..., R]:
    """Decorator: raise ZeroshardError if another thread is inside the engine; collectives and gradients of both would mix."""

    @functools.wraps(method)
    def call(self: DeepSpeedEngine, *args: object, **kwargs: object) -> R:
        if not self._turn.acquire(blocking=False):
            raise ZeroshardError(
                f"engine.{method.__name__}: another thread is inside of this engine. Train from one thread, or hold a lock around "
                "forward, backward and step."
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._turn.release()

    return call


def _is_loss(value: object) -> bool:
    """Return whether a value is a tensor of one element with a grad_fn."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None


def halved(inputs: R) -> R:
    """Return inputs with their floating-point tensors cast to fp16: fp16.auto_cast."""
    return map_tensors(lambda tensor: tensor.to(casts_to(tensor.dtype, torch.half)), inputs)


class _UnscaledGradient(torch.autograd.Function):
    """Multiply x by a factor, and pass its gradient unscaled: the runtime multiplies gradients of outputs by the loss scale."""

    @staticmethod
    def forward(ctx: object, x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class DeepSpeedEngine(Checkpoints, nn.Module):
    """The engine that `initialize` (setup.py) returns. Attributes that it lacks are looked up in the module.

    module: the sharded model. basic_optimizer: the sharded optimizer, a subclass of the given optimizer's class. optimizer: its
    wrapper with DeepSpeed's interface (engine_optimizer.py); None for inference.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, config: DeepSpeedConfig, **known: Any) -> None:
        super().__init__()
        self.module = module
        self._config, self.config = config, config._param_dict
        self.basic_optimizer: Any = optimizer
        self.optimizer = wrap(optimizer, config)
        self.device, self.local_rank = known["device"], known["local_rank"]
        self.mpu, self.collate_fn, self.monitor = known["mpu"], known["collate_fn"], known["monitor"]
        ranks, world = engine_of(module).ranks, engine_of(module).world
        self.dp_world_size, self.world_size, self.global_rank = ranks.world_size, world.world_size, world.rank
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.inside_no_sync_ctxt = self.is_compiled = self._destroyed = False
        self._is_gradient_accumulation_boundary: bool | None = None
        self._running_engine_step = self._step_applied = False
        self._global_grad_norm: float | None = None
        self._backwards = 0  # backwards since the last step
        self._loss: Tensor | float = 0.0  # sum of the losses of these backwards, for the monitor
        self._turn = threading.RLock()
        self.client_optimizer, self.client_lr_scheduler, self._client_name = known["client"]
        self.param_names = {param: name for name, param in module.named_parameters()}
        self.has_moe_layers, self.num_experts = has_moe_layers(module)
        self.mp_world_size, self.sparse_tensor_module_names = 1, set[str]()
        timed = SimpleNamespace(enabled=config.timers_config.enabled, synchronized=False)  # do not wait for the device
        self.tput_timer = ThroughputTimer(timed, config.train_batch_size, steps_per_output=config.steps_per_print)
        self._held: contextlib.AbstractContextManager | None = None
        self._gc_was_on = False
        if self.fp16_auto_cast():  # of positional arguments, as DeepSpeed; `engine.module(x)` casts them, too
            engine_of(module).also_remove([module.register_forward_pre_hook(lambda _, args: halved(args))])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = torch_compat.early_modules(self).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}. engine.config is the configuration, engine.module the model; "
                "docs/how-to/from-deepspeed.md says what to use."
            ) from None

    # -- forward and backward ------------------------------------------------------------------------------------

    @_one_thread
    def forward(self, *args: object, **kwargs: object) -> Any:
        if self.module.training:
            self.tput_timer.start()
        self._hold(self._sums_locally())
        with self._autocast(), engine_of(self.module).telling("the forward"):
            output = self.module(*args, **kwargs)

        # for programs that call loss.backward() instead of engine.backward(loss)
        def scale_unless_scaled(grad: Tensor) -> Tensor | None:
            scaled = torch_compat.graph_task() in _scaled
            return None if scaled else grad * (self._ranks_summed() / self.gradient_accumulation_steps())

        factor = self._ranks_summed() / self.gradient_accumulation_steps()
        if factor != 1 and torch.is_grad_enabled() and self.optimizer is not None and not in_derivative():
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(scale_unless_scaled)
        return output

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return torch.autocast with the options of the section torch_autocast; without it, disable the caller's and warn once."""
        kind, dtype = self.device.type, self.torch_autocast_dtype()
        if self.torch_autocast_enabled() and dtype is not None:
            return torch.autocast(kind, dtype)
        if not torch.is_autocast_enabled(kind):
            return contextlib.nullcontext()
        warning_once(
            "torch.autocast is enabled outside of the engine, whose configuration does not ask for it: inside it is off, as in DeepSpeed. "
            'Say {"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}, or {"bf16": {"enabled": true}} alone.'
        )
        return torch.autocast(kind, enabled=False)

    def _ranks_summed(self) -> int:
        """Return the factor from the mean gradient over ranks to the configured one: the number of ranks for a sum, else 1."""
        return self.dp_world_size if self._config.gradient_allreduce_op == "sum" else 1

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Return the loss times the loss scale, for a program's own `.backward()`; its gradients are not scaled twice.

        retain_graph: no effect; pass it to `.backward()`.
        """
        assert self.optimizer is not None, "must provide optimizer during init in order to use scale"
        assert _is_loss(loss), "loss must be a scalar tensor with grad_fn. For non-scalar tensors, use tensor.backward(grad)"
        factor = engine_of(self.module).progress.loss_scale
        return loss if factor == 1.0 else _UnscaledGradient.apply(loss, factor)

    @_one_thread
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run backward of loss / gradient_accumulation_steps (scale_wrt_gas=False: of the loss), and return that quotient."""
        assert self.optimizer is not None, "must provide optimizer during init in order to use backward"
        assert _is_loss(loss), "loss must be a scalar tensor. If you need to pass output gradients, backward() of output tensors"
        self._hold(self._sums_locally())
        self._backwards += 1
        steps = self.gradient_accumulation_steps()
        tasks: list[int] = []

        def mark(grad: Tensor) -> Tensor:
            tasks.append(torch_compat.graph_task())  # the hooks of `forward` recognise this backward by it
            _scaled.add(tasks[-1])
            return grad * self._ranks_summed()

        scaled = loss / steps if scale_wrt_gas and steps > 1 else loss.view_as(loss)  # its hook runs before those of loss
        handle = scaled.register_hook(mark)
        try:
            scaled.backward(retain_graph=retain_graph)
        finally:
            handle.remove()
            _scaled.difference_update(tasks)
        if self.monitor is not None and self.monitor.enabled:
            self._loss = scaled.detach() + self._loss
        return scaled

    # when backward() returns, everything that DeepSpeed does after a backward has been done
    _backward_epilogue = always(None)

    # -- accumulation --------------------------------------------------------------------------------------------

    def _sums_locally(self) -> bool:
        """Return whether the next backward accumulates gradients without reducing them."""
        if self.optimizer is None:
            return False
        if self.inside_no_sync_ctxt:
            return True
        return not self.zero_optimization_partition_gradients() and not self.is_gradient_accumulation_boundary()

    def _hold(self, yes: bool) -> None:
        """Enter `zs.accumulate` if it is not entered, or leave it. It stays entered from one micro-step to the next."""
        if yes and self._held is None:
            self._held = accumulate(self.module)
            self._held.__enter__()
        elif not yes and self._held is not None:
            held, self._held = self._held, None
            held.__exit__(None, None, None)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last before an optimizer step."""
        if self._is_gradient_accumulation_boundary is not None:
            return self._is_gradient_accumulation_boundary
        if not self.managed_gradient_accumulation():
            return self._running_engine_step
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next backward is the last before an optimizer step. None: let the engine count micro-batches."""
        assert self.managed_gradient_accumulation(), (
            "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation=False; "
            "the caller owns the boundary by calling step()"
        )
        self._is_gradient_accumulation_boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backwards accumulate locally (`zs.accumulate`), at stages whose gradients are not partitioned."""
        stage = self.zero_optimization_stage()
        assert not self.zero_optimization_partition_gradients(), (
            f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}; zs.accumulate "
            "(engine.module) sums locally at every stage"
        )
        assert not self.inside_no_sync_ctxt, "no_sync context manager reentry is unsupported"
        with self._local_sums():
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Context whose backwards sum gradients locally; its end reduces the sums (stages 1 to 3)."""
        assert self.managed_gradient_accumulation(), (
            "coalesce_grad_reduction is not supported with managed_gradient_accumulation=False; "
            "the caller already owns the accumulation boundary via step()"
        )
        if not self.zero_optimization():
            raise NotImplementedError("coalesce_grad_reduction requires ZeRO stage 1/2/3, got stage 0")
        assert not self.inside_no_sync_ctxt, "coalesce_grad_reduction cannot be nested inside another no_sync context"
        with self._local_sums():
            yield
        self.allreduce_gradients()

    @contextlib.contextmanager
    def _local_sums(self) -> Iterator[None]:
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = False
            self._hold(False)

    def allreduce_gradients(self, bucket_size: object = None) -> None:
        """Reduce the gradients that were accumulated locally (collective)."""
        self._hold(False)
        engine_of(self.module).flush()

    _flush_coalesced_reduction_zero3 = allreduce_gradients

    # -- step ----------------------------------------------------------------------------------------------------

    @_one_thread
    def step(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        """Count a micro-step. At the boundary, step the optimizer and the scheduler, and drop the gradients (collective)."""
        assert not self.inside_no_sync_ctxt, "It is illegal to call Engine.step() inside no_sync context manager"
        assert self.optimizer is not None, "must provide optimizer during init in order to use step"
        self._step_applied = False
        self._running_engine_step = True
        try:
            boundary = self.is_gradient_accumulation_boundary()
            if boundary:
                self._take_model_step(lr_kwargs or {})
        finally:
            self._running_engine_step = False
        self.tput_timer.stop(global_step=boundary, report_speed=not self.global_rank)
        self.micro_steps += 1

    def _take_model_step(self, lr_kwargs: Mapping[str, object]) -> None:
        self._hold(False)
        if self.zero_optimization_stage() == 2 and not self.zero_ignore_unused_parameters():
            self._check_used()
        self.optimizer.step()
        record = self.basic_optimizer.last_step
        self._step_applied = math.isfinite(record.grad_norm) or not record.skipped  # a step without gradients counts as applied
        shown = record.grad_norm if self._step_applied or not self.zero_optimization() else math.inf  # inf as in DeepSpeed
        self._global_grad_norm = shown if self.zero_compute_grad_norm() else None
        self.optimizer.zero_grad()  # as DeepSpeed's step does: its programs need not call zero_grad
        if not self._step_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:  # not after a skipped step
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        if self.managed_gradient_accumulation():
            self.global_samples += self.train_batch_size()
        else:
            self.global_samples += self.train_batch_size() // self.gradient_accumulation_steps() * self._backwards
        self._tell()
        self._backwards, self._loss = 0, 0.0

    def _check_used(self) -> None:
        """Raise AssertionError on all ranks if no rank has a gradient for some trained parameter."""
        if unused := engine_of(self.module).unused_parameters():
            raise AssertionError(
                f"parameters without a gradient: {', '.join(unused[:5])} ({len(unused)} in all); let the loss depend on them, freeze "
                'them, or leave {"zero_optimization": {"ignore_unused_parameters": false}} out.'
            )

    def _tell(self) -> None:
        every = self.steps_per_print()
        if self.global_rank:
            return
        if every and math.isfinite(every) and self.global_steps % int(every) == 0:
            logger.info(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}")
        if self.monitor is not None and self.monitor.enabled:
            events: list[Event] = [("Train/Samples/lr", self.get_lr()[0], self.global_samples)]
            if isinstance(self._loss, Tensor):  # only if engine.backward() was used: this rank's mean over micro-batches
                events.append(("Train/Samples/train_loss", self._loss, self.global_samples))
            if self.fp16_enabled():
                events.append(("Train/Samples/loss_scale", engine_of(self.module).progress.loss_scale, self.global_samples))
            self.monitor.write_events(events)

    def was_step_applied(self) -> bool:
        """Return whether the latest step() changed parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm, before clipping, of the mean gradient over all ranks in the latest optimizer step."""
        return self._global_grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.basic_optimizer is not None:
            self.basic_optimizer.zero_grad()

    # -- the model -----------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.module.train(mode)
        self.training = mode
        return self

    def compile(
        self, backend: object = None, compile_kwargs: Mapping[str, object] | None = None, schedule: object = None,
        **unknown: object,
    ) -> None:  # fmt: skip
        """Compile the module in place with torch.compile. Raises ZeroshardError for `schedule`, which needs DeepCompile."""
        if schedule is not None:
            raise ZeroshardError("engine.compile(schedule=...): there is no DeepCompile here; leave it out.")
        options = dict(compile_kwargs or {})
        if backend is not None:
            options["backend"] = backend
        self.module.compile(**options)
        self.is_compiled = True

    def offload_states(
        self, include: Iterable[str] | None = None, device: str = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move states off the device until `reload_states` (collective). include: members of OffloadStateTypeEnum; None: all."""
        names = None if include is None else [getattr(state, "value", state) for state in include]
        offload_states(self.module, names, getattr(device, "value", device), pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back the states that `offload_states` has moved, and wait until they are there (collective)."""
        reload_states(self.module)

    def empty_partition_cache(self) -> None:
        """Free memory that allocators cache. Only parameters that the configuration keeps are gathered between steps."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def destroy(self) -> None:
        """Close the engine: the module becomes an ordinary one again (collective). A second call does nothing."""
        if self._destroyed:
            return
        self._destroyed = True
        self._hold(False)
        if self._gc_was_on:
            gc.enable()
        if getattr(self.module, "_zeroshard", None) is not None and not engine_of(self.module).closed:
            partition.detach(self.module)
            close(self.module)
