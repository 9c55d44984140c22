"""The engine of a PipelineModule: `train_batch` and `eval_batch` run all micro-batches of a step, by zs.Pipeline.

    rank of the first stage     next(data_iter) for each micro-batch: its inputs             F0 F1 ... B0 B1 ...
    of a stage in between       no data                                                         F0 F1 ...
    rank of the last stage      next(data_iter) for each micro-batch: its labels                   F0 B0 F1 B1 ...

Inputs and labels stay on the ranks that have read them. zs.Pipeline gets the numbers of the micro-batches as its input, and the first
stage and the loss look up the inputs and labels of a number. So a micro-batch may be any tuple of tensors, also of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ZeroshardError
from ...public import Pipeline
from ...seam import engine_of, exchange_values
from ...utils.axes import PP
from ...utils.tensor_tree import cast_floating, find_tensors, map_tensors
from .accelerator import always
from .engine import DeepSpeedEngine, halved
from .pipe import PipelineError, PipelineModule
from .stand_ins import NotSupported


class _Pipeline(Pipeline):
    """A pipeline whose forward on zeros, which tells the shapes, does not count among those that layers are seeded by."""

    def _build(self, *args: Any) -> Any:
        (module,) = self.stages
        before = module.micro_offset
        built = super()._build(*args)
        module.micro_offset = before
        return built


class PipelineEngine(DeepSpeedEngine):
    """The engine that `initialize` returns for a PipelineModule."""

    module: PipelineModule

    def __init__(self, module: PipelineModule, *args: Any, **known: Any) -> None:
        super().__init__(module, *args, **known)
        self.grid = self.mpu = module._grid
        self.num_stages, self.stage_id = module.num_stages, module.stage_id
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.micro_batch_size = self.train_micro_batch_size_per_gpu()
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.agg_train_loss: Tensor | None = None
        self._inputs: list[Any] = []
        self._labels: list[Any] = []
        self._outputs: list[Any] = []  # of the last stage: a loss for each micro-batch, and in an evaluation the logits
        self._computes_loss = True
        interval = self._config.pipeline.activation_checkpoint_interval
        if interval > 0:
            module.set_checkpoint_interval(interval)
        # 1F1B needs as many micro-batches as there are stages, since all stages compute different ones at a time
        schedule = "1F1B" if self.micro_batches >= self.num_stages else "GPipe"
        self.pipeline = _Pipeline(
            module, module._grid.mesh[PP], micro_batches=self.micro_batches, loss=self._score, schedule=schedule
        )
        if self.is_first_stage():
            module.load = lambda number: self._inputs[int(number)]

    @property
    def micro_batches(self) -> int:
        return self.gradient_accumulation_steps()

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    # -- data ----------------------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Let `train_batch` read a loader, on the ranks of the first and the last stage."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader, self.data_iterator = loader, iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader, self.data_iterator = None, iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Call `fn` on each micro-batch that is read, and use what it returns."""
        self.batch_fn = fn

    def _read(self, iterator: Iterator[Any] | None, count: int, what: str) -> str:
        """Read `count` micro-batches, and return a text with the shapes and dtypes of all ranks (collective).

        Raises StopIteration on every rank if the data of one have ended, and ZeroshardError if one could not read.
        """
        ended, failure, shapes = False, None, None
        try:
            if self.is_first_stage() or self.is_last_stage():
                if iterator is None:
                    raise ValueError("no data: pass an iterator, or call engine.set_dataloader")
                batches = [self._to_device(next(iterator)) for _ in range(count)]
                self._inputs, self._labels = [batch[0] for batch in batches], [batch[1] for batch in batches]
                different = {repr([(tuple(x.shape), x.dtype) for x in find_tensors(inputs)]) for inputs in self._inputs}
                if len(different) > 1:
                    raise ValueError(
                        f"micro-batches of one step have different shapes: {sorted(different)}. Drop the last batch (drop_last)."
                    )
                shapes = different.pop()
        except StopIteration:
            ended = True
        except Exception as error:
            failure = error
        mine = None if failure is None else f"{type(failure).__name__}: {failure}"
        told = exchange_values(engine_of(self.module).world, (ended, mine, shapes, count), f"engine.{what}: data")
        if failure is not None:
            raise failure
        for rank, (_, text, _, theirs) in enumerate(told):
            if text is not None or theirs != count:
                reason = text or f"it was asked for {theirs}, and rank {self.global_rank} for {count}"
                raise ZeroshardError(f"engine.{what}: rank {rank} could not read its micro-batches: {reason}")
        if any(over for over, *_ in told):
            raise StopIteration(f"engine.{what}: the data of ranks {[n for n, (over, *_) in enumerate(told) if over]} have ended")
        return repr(told)

    def _to_device(self, batch: Any) -> Any:
        batch = self.batch_fn(batch) if self.batch_fn is not None else batch
        inputs, labels = (tuple(part) if isinstance(part, list) else part for part in batch)
        inputs, labels = map_tensors(lambda x: x.to(self.device), (inputs, labels))
        if self.fp16_auto_cast():  # here, since the model's own inputs are the micro-batches' numbers
            inputs = halved(inputs)
        elif (dtype := engine_of(self.module).input_dtype) is not None:
            inputs = cast_floating(inputs, dtype)
        return inputs, labels

    # -- a step --------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on `gradient_accumulation_steps` micro-batches, (inputs, labels) each, and step the optimizer (collective).

        data_iter: an iterator that the ranks of the first and of the last stage read, which must yield the same on both; None: the
        loader given to `set_dataloader`. Return the mean loss over micro-batches and data-parallel ranks. Raises StopIteration, on every rank, when data end.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        assert self.optimizer is not None, "must provide optimizer during init in order to use train_batch"
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        self.tput_timer.start()
        self._computes_loss, self._step_applied = True, False
        loss = self._run(self.data_iterator, self.micro_batches, "train_batch")
        self.agg_train_loss = self._loss = self._mean(loss)
        self._backwards = self.micro_batches
        self._take_model_step({})
        self.tput_timer.stop(global_step=True, report_speed=not self.global_rank)
        return self.agg_train_loss

    @torch.no_grad()
    def eval_batch(
        self, data_iter: Iterator[Any], return_logits: bool = False, compute_loss: bool = True, reduce_output: str | None = "avg",
        bcast_loss: bool = True, num_micro_batches: int | None = None,
    ) -> Any:  # fmt: skip
        """Run the forward of `num_micro_batches` (None: as many as in a step) micro-batches (collective).

        Return the mean loss over micro-batches and data-parallel ranks. With bcast_loss=False, compute_loss=False or
        reduce_output=None only ranks of the last stage return a value, others None. compute_loss=False: the mean of the outputs.
        reduce_output=None: a list with the value of each micro-batch. return_logits: a pair (value, outputs of the last micro-batch).
        """
        if reduce_output not in ("avg", None):
            raise NotImplementedError(f"reduction type {reduce_output} not supported.")
        self.module.eval()
        self._computes_loss = compute_loss
        loss = self._run(data_iter, num_micro_batches or self.micro_batches, "eval_batch")
        outputs, self._outputs = self._outputs, []
        logits = outputs[-1][1] if outputs else None
        value: Any = self._mean(loss)
        if not self.is_last_stage() and (not compute_loss or reduce_output is None or not bcast_loss):
            value = None
        elif reduce_output is None:
            value = [score for score, _ in outputs]
        elif not compute_loss:
            value = self._mean(torch.stack([output for output, _ in outputs]).mean(dim=0))
        return (value, logits) if return_logits else value

    def _run(self, iterator: Iterator[Any] | None, count: int, what: str) -> Tensor:
        """Run the pipeline on `count` micro-batches; return the mean loss of this pipeline."""
        if count < self.num_stages and self.pipeline.schedule != "GPipe":
            raise ValueError(
                f"engine.{what}: {count} micro-batches for {self.num_stages} stages: give {self.num_stages} or more."
            )
        self.pipeline.micro_batches, self.pipeline.variant = count, self._read(iterator, count, what)
        self._outputs = []
        numbers = torch.arange(count)
        run = self.pipeline.step if self.module.training else self.pipeline.evaluate
        try:
            with self._autocast(), engine_of(self.module).telling(f"engine.{what}"):
                return run(numbers, target=numbers)
        finally:
            self._inputs, self._labels = [], []

    def _score(self, output: Any, number: Tensor) -> Tensor:
        """Return the loss of a micro-batch, at the last stage."""
        function = self.module.loss_fn if self._computes_loss else None
        loss = output if function is None else function(output, self._labels[int(number)])
        if not self.module.training:
            self._outputs.append((loss, output))
        return loss if self._computes_loss else torch.zeros((), device=self.device)

    def _mean(self, value: Tensor) -> Tensor:
        """Return the mean over data-parallel ranks (collective over these)."""
        if self.dp_world_size > 1:
            value = value.clone()
            dist.all_reduce(value, group=self.grid.get_data_parallel_group())
            value /= self.dp_world_size
        return value

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes are compared in every step."""

    set_has_attention_mask = always(None)

    def save_16bit_model(self, *args: object, **options: object) -> NoReturn:
        raise NotSupported(
            "engine.save_16bit_model of a PipelineModule: save_checkpoint, then zero_to_fp32, or zs.export, write whole weights."
        )

    save_fp16_model = save_16bit_model

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise PipelineError("Only train_batch() and eval_batch() are accessible in pipeline mode.")

    forward = backward = step = _refuse
