"""The training loop of `zeroshard train` where ranks have parts of the model, with `zs.parallelize`.

    zs.parallelize(model, mesh, optimizer=make, config=..., micro_batches=..., ...) -> run
        make(parameters) -> optimizer          called with the parameters of this rank's part of the model
        run.model, run.optimizer               this rank's part of the model, and its optimizer; zs.report and zs.save take them
        run.step(inputs, targets) -> loss      forward and backward of all micro-batches, the optimizer's step; mean loss
        run.evaluate(inputs, targets) -> nats  without gradients; summed loss over the targets that are not IGNORED

Inputs and targets, each (rows, seq), are the part of the batch for this rank's index along dp. Ranks that differ only in
pp or tp pass the same inputs and targets, and get the same result.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs

from ..planner.models import GPT
from .mesh_axes import AXES
from .options import TrainOptions
from .ranks import Ranks
from .trainer import Trainer

IGNORED = -100  # a target without loss, as in torch's cross_entropy


def parallelize(options: TrainOptions, ranks: Ranks) -> Any:
    """Return the `zs.Parallel` of the model. The same seed gives every rank the same weights, of which it keeps its part."""
    torch.manual_seed(options.seed)
    axes = options.axes
    mesh = init_device_mesh(ranks.device.type, tuple(getattr(axes, name) for name in AXES), mesh_dim_names=AXES)
    with torch.device("meta" if options.scale == "full" else ranks.device):  # a published model in full may not fit on a rank
        model = GPT(options.model_config())
    make = functools.partial(torch.optim.AdamW, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay)
    return zs.parallelize(
        model, mesh, optimizer=make, config=options.sharding(), micro_batches=options.accumulate,
        sequence_parallel=options.sequence_parallel, loss_parallel=options.config is not None,  # plans count on loss_parallel
        schedule=options.schedule,
    )  # fmt: skip


class MeshTrainer(Trainer):
    """The run on one rank of a mesh. Text is divided along dp; ranks of the same index along dp read the same rows."""

    @property
    def data_place(self) -> int:
        return self.options.axes.data_place(self.ranks.rank)

    @property
    def data_places(self) -> int:
        return self.options.axes.dp

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.run = parallelize(self.options, self.ranks)
        if self.options.checkpoints:
            for part in self.run.models:
                shared = {"partition": self.run.mesh["tp"]} if self.options.partition_activations else {}
                zs.checkpoint_activations(part, blocks=("Block",), offload=self.options.activations(), **shared)
        return self.run.model, self.run.optimizer

    def forecast(self) -> None:
        """Return None: forecasts are for data parallelism only."""

    def _take_step(self, step: int) -> float:
        inputs, targets = self.batches.part(step, self.data_place, self.data_places)  # each (rows, seq), all micro-batches
        return float(self.run.step(inputs.to(self.ranks.device), targets.to(self.ranks.device)))

    def _scored_nats(self, windows: Tensor, scored: Tensor) -> float:  # (count, seq + 1), (count, seq)
        """Return the summed loss. Batches have the shape of a training step's, which the stages of a pipeline expect."""
        rows, total = self.options.global_batch // self.data_places, 0.0
        missing = -len(windows) % rows
        windows, scored = F.pad(windows, (0, 0, 0, missing)), F.pad(scored, (0, 0, 0, missing))
        self.model.eval()
        for first in range(0, len(windows), rows):
            part, mask = windows[first : first + rows], scored[first : first + rows]
            total += float(self.run.evaluate(part[:, :-1], part[:, 1:].masked_fill(~mask, IGNORED)))
        self.model.train()
        return total
