"""The training loop of `zeroshard train`, on each rank.

    one step:  [forward, backward] * accumulate -> optimizer step -> heartbeat (loss, memory, clock of all ranks)

The sharding is in `build` alone; the loop is that of plain PyTorch. The heartbeat gives every rank the mean loss and
rank 0's clock, so that all agree on the next learning rate and on the end of the run by the time limit.

Where ranks have only parts of the model (`--mesh` with pp, tp or ep), `zs.parallelize` makes a `run` that takes whole steps:

    run.step(inputs, targets) -> loss      forward and backward of all micro-batches, the optimizer's step; mean loss
    run.evaluate(inputs, targets) -> nats  without gradients; summed loss over the targets that are not IGNORED

Inputs and targets, each (rows, seq), are the part of the batch for this rank's index along dp and ep. Ranks that differ only in
pp or tp pass the same inputs and targets, and get the same result.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs

from ..activations.ulysses import sequence_of
from ..config import Tier
from ..data.sequence import cut
from ..data.text import Batches, Corpus, held_out_windows
from ..planner.measure.forecast import Forecast, forecast
from ..planner.models import GPT
from ..utils.host_memory import resident_nbytes
from .arguments import UsageError
from .mesh_axes import MeshAxes
from .options import OFFLOAD_PATH, TrainOptions
from .ranks import Ranks

WARMUP_FRACTION = 0.05  # share of the run in which the learning rate rises
DECAY_FRACTION = 0.6  # share of the run, at its end, in which it falls linearly to FINAL_LR_FRACTION of its highest value
FINAL_LR_FRACTION = 0.02
SAME_WHEN_RESUMED = ("seed", "global_batch", "seq")  # options that determine the text that a step reads
EVAL_ROWS = 16  # sequences of one forward pass in evaluations
IGNORED = -100  # a target without loss, as in torch's cross_entropy


@dataclass(frozen=True)
class StepResult:
    """The results of a step, which all ranks have."""

    step: int  # steps done
    loss: float  # nats per byte, mean over the global batch
    grad_norm: float
    skipped: bool
    lr: float
    seconds: float  # of training, by rank 0's clock
    step_seconds: float  # of this step, on this rank
    fraction: float  # share of the run that is done, 0..1
    memory_nbytes: tuple[int, ...]  # (world_size,) resident memory (CPU) or allocated memory (GPU) of each rank


def build(options: TrainOptions, ranks: Ranks) -> tuple[GPT, torch.optim.Optimizer]:
    """Build and shard the model and optimizer. The same seed gives every rank the same weights."""
    torch.manual_seed(options.seed)
    config = options.sharding()
    on_meta = config.offload_param.tier is not Tier.DEVICE  # so that no rank ever holds the whole model
    on_meta = on_meta and (ranks.device.type == "cuda") == torch.cuda.is_available()  # zs.shard takes CUDA if available
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = GPT(options.model_config())
    model = model if on_meta else model.to(ranks.device)
    if options.uses_disk and options.offload_path is None:
        Path(OFFLOAD_PATH).mkdir(exist_ok=True)
    if options.tile_max_bytes is not None:
        zs.tile(model, max_bytes=options.tile_max_bytes, dtype=config.compute_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay)
    mesh = {"dp": options.axes.dp, "sp": options.axes.sp} if options.axes.sp > 1 else None
    model, optimizer = zs.shard(model, optimizer, config=config, mesh=mesh)
    if (sequence := sequence_of(model)) is not None:
        sequence.only_in_training = True  # evaluation and samples read whole sequences on each rank
    if options.checkpoints:
        zs.checkpoint_activations(model, offload=options.offload(options.offload_activations))
    return model, optimizer


def parallelize(options: TrainOptions, ranks: Ranks) -> zs.Parallel:
    """Return the run of a model of which each rank has a part. The same seed gives every rank the same weights before the cut."""
    torch.manual_seed(options.seed)
    axes = options.axes
    sizes = axes.planned
    mesh = init_device_mesh(ranks.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    with torch.device("meta" if options.scale == "full" else ranks.device):  # a published model in full may not fit on a rank
        model = GPT(options.model_config())
    make = functools.partial(torch.optim.AdamW, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay)
    run = zs.parallelize(
        model, mesh, optimizer=make, config=options.sharding(), micro_batches=options.accumulate,
        sequence_parallel=options.sequence_parallel, loss_parallel=options.config is not None,  # plans count on loss_parallel
        schedule=options.schedule, experts=["blocks.*.mlp.experts"] if axes.ep > 1 else None,
    )  # fmt: skip
    if options.checkpoints:
        for part in run.models:
            shared: dict[str, Any] = {"partition": run.mesh["tp"]} if options.partition_activations else {}
            zs.checkpoint_activations(part, blocks=("Block",), offload=options.offload(options.offload_activations), **shared)
    return run


def _difference(after: dict, before: dict) -> dict[str, tuple[int, int]]:
    """Return calls and bytes by kind of collective between two readings of `Report.communication`."""
    found = {}
    for kind, traffic in after.items():
        count, nbytes = (before[kind].count, before[kind].nbytes) if kind in before else (0, 0)
        if traffic.count > count:
            found[kind] = (traffic.count - count, traffic.nbytes - nbytes)
    return found


def _explained(error: zs.CheckpointError) -> str:
    """Return on one line why a checkpoint cannot be resumed from, and the remedy."""
    first, *differences = str(error).splitlines()
    shown = "; ".join(line.strip() for line in differences[:3])
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    remedy = ""
    if isinstance(error, zs.CheckpointMismatch):
        remedy = ". Give the options that the run was started with"
    elif isinstance(error, zs.CheckpointCorrupt):
        remedy = f" With {Path(error.file).parent} out of the way, --resume takes what was saved before"
    return f"{first} {shown}{more}".rstrip() + remedy


class Trainer:
    """The run on one rank: `steps()` trains, `held_out_loss()` and `sample()` evaluate the model."""

    model: nn.Module  # sharded; used like any module
    optimizer: torch.optim.Optimizer
    batches: Batches
    step_traffic: dict[str, tuple[int, int]]  # kind of collective -> calls and bytes this rank sent in the last step
    step_moved: dict[str, int]  # link between tiers -> bytes this rank moved over it in the last step
    run: zs.Parallel | None = None  # None where each rank has the whole model

    def __init__(self, options: TrainOptions, ranks: Ranks, corpus: Corpus) -> None:
        self.options, self.ranks = options, ranks
        self.batches = Batches(corpus.train, options.seq, options.global_batch, options.seed)
        self.step, self.seconds = 0, 0.0  # steps done, and seconds of training by rank 0's clock
        self.identity = {"corpus": corpus.digest, **{name: getattr(options, name) for name in SAME_WHEN_RESUMED}}
        self.held_out = corpus.held_out[: options.eval_bytes]
        self.step_traffic, self.step_moved = {}, {}
        self.saving: zs.Save | None = None  # the last save
        self.run = parallelize(options, ranks) if options.axes.cuts_model else None
        self.model, self.optimizer = build(options, ranks) if self.run is None else (self.run.model, self.run.optimizer)

    @property
    def data_place(self) -> tuple[int, int]:
        """The index of the part of each batch that this rank reads, and the number of parts. In evaluation sp reads other parts."""
        axes = self.options.axes
        axes = axes if axes.cuts_model or (axes.sp > 1 and self.model.training) else MeshAxes(dp=self.ranks.world_size)
        return axes.data_place(self.ranks.rank), axes.readers

    def steps(self) -> Iterator[StepResult]:
        """Train until all steps are taken or the time is used up; yield each step's result. Keeps the last step's gradients."""
        started, step, fraction = time.monotonic() - self.seconds, self.step, self._fraction(self.step, self.seconds)
        while fraction < 1.0:
            before, begin = zs.report(self.model), time.monotonic()
            # the learning rate rises, stays, then falls (a trapezoid)
            warmup, decay = min(1.0, (fraction + 1e-3) / WARMUP_FRACTION), min(1.0, (1.0 - fraction) / DECAY_FRACTION)
            lr = self.options.lr * max(FINAL_LR_FRACTION, warmup * decay)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            loss = self._take_step(step)
            step, step_seconds = step + 1, time.monotonic() - begin
            after = zs.report(self.model)
            self.step_traffic = _difference(after.communication, before.communication)
            moved = {link: nbytes - before.moved.get(link, 0) for link, nbytes in after.moved.items()}
            self.step_moved = {link: nbytes for link, nbytes in moved.items() if nbytes}
            device, on_gpu = self.ranks.device, self.ranks.device.type == "cuda"
            nbytes = torch.cuda.memory_allocated(device) if on_gpu else resident_nbytes()
            beat = self.ranks.gather(loss, nbytes, time.monotonic() - started)  # (world, 3)
            seconds = float(beat[0, 2])
            self.step, self.seconds, fraction = step, seconds, self._fraction(step, seconds)
            record = self.optimizer.last_step  # type: ignore[attr-defined]  # sharded optimizers have it
            memory_nbytes = tuple(int(nbytes) for nbytes in beat[:, 1])
            mean = float(beat[:, 0].mean())
            yield StepResult(
                step, mean, float(record.grad_norm), record.skipped, lr, seconds, step_seconds, min(fraction, 1.0),
                memory_nbytes,
            )  # fmt: skip

    @property
    def complete(self) -> bool:
        """True if all steps have been taken, or the time is used up."""
        return self._fraction(self.step, self.seconds) >= 1.0

    def _fraction(self, step: int, seconds: float) -> float:
        """Return the share of the run that is done after so many steps and seconds."""
        fraction = step / self.options.steps
        return fraction if self.options.time_limit is None else max(fraction, seconds / self.options.time_limit)

    def save(self, folder: Path) -> None:
        """Save a checkpoint with all that `resume` needs (collective). `saving` is its handle."""
        traffic = self.ranks.of_first(json.dumps([self.step_traffic, self.step_moved]))  # rank 0's, which reports it
        run = {"step": self.step, "seconds": self.seconds, "traffic": traffic, **self.identity}
        self.saving = zs.save(
            folder, self.model, self.optimizer, extra={"run": run}, step=self.step, keep_last=self.options.keep_last,
            asynchronous=self.options.save_in_background, overwrite=True,
        )  # fmt: skip

    def resume(self, folder: Path) -> Path | None:
        """Load the newest checkpoint of a folder; return its path, None if there is none (collective). Raises UsageError."""
        try:
            found = zs.load(folder, self.model, self.optimizer, extra={"run": None})
        except zs.CheckpointIncomplete as error:
            # do not return None: the run would start anew and overwrite what is there
            raise UsageError(f"--resume: {_explained(error)}") from error
        except zs.CheckpointNotFound:
            return None
        except zs.CheckpointError as error:
            raise UsageError(f"--resume: {_explained(error)}") from error
        run = found.extra["run"]
        other = [f"{name}: was {run[name]}, is {value}" for name, value in self.identity.items() if run[name] != value]
        if other:
            raise UsageError(f"--resume: {found.path} is of a run on other data: {'; '.join(other)}")
        self.step, self.seconds = run["step"], run["seconds"]
        if "traffic" in run:
            self.step_traffic, self.step_moved = json.loads(run["traffic"])
        return found.path

    def forecast(self) -> Forecast | None:
        """Predict the time of a step from a few measurements (collective); None where ranks have parts of the model."""
        if self.run is not None:
            return None
        return forecast(self.model, lambda: self._micro_batch(0, 0), accumulate=self.options.accumulate)

    def _micro_batch(self, step: int, micro: int) -> Tensor:
        """Return the loss of this rank's part of a micro-batch, divided by the number of micro-batches."""
        tokens, targets = self.batches.part(step, *self.data_place, micro, self.options.accumulate)  # each (rows, seq)
        tokens, targets, sp = tokens.to(self.ranks.device), targets.to(self.ranks.device), self.options.axes.sp
        if sp == 1:
            return self.model(tokens, targets) / self.options.accumulate
        own = cut({"input_ids": tokens, "labels": targets}, self.ranks.rank % sp, sp, shift_labels=False)
        return self.model(own["input_ids"], own["labels"], own["position_ids"], tokens) / self.options.accumulate

    def _take_step(self, step: int) -> float:
        """Take one step of the optimizer; return the mean loss of this rank's part of the batch."""
        if self.run is not None:
            inputs, targets = self.batches.part(step, *self.data_place)  # each (rows, seq), all micro-batches
            return float(self.run.step(inputs.to(self.ranks.device), targets.to(self.ranks.device)))
        self.optimizer.zero_grad()
        total = 0.0
        for micro in range(self.options.accumulate):
            loss = self._micro_batch(step, micro)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total

    @torch.no_grad()
    def held_out_loss(self, *, overlap: bool = False) -> float:
        """Return bits per byte of the held-out text; with `overlap`, at least half a sequence precedes each scored byte.

        The first byte, which has no context, counts as 8 bits. All ranks get the same number of windows, padded with
        unscored ones, because at stage 3 each forward pass is collective.
        """
        self.model.eval()
        seq, (place, places) = self.options.seq, self.data_place
        windows, scored = held_out_windows(self.held_out, seq, max(1, seq // 2) if overlap else seq)
        share = math.ceil(len(windows) / places)
        missing = share * places - len(windows)
        windows, scored = F.pad(windows, (0, 0, 0, missing)), F.pad(scored, (0, 0, 0, missing))
        part = slice(place * share, (place + 1) * share)
        nats = self._scored_nats(windows[part].to(self.ranks.device), scored[part].to(self.ranks.device))
        total_nats = float(self.ranks.gather(nats).sum()) * (places / self.ranks.world_size)
        return (total_nats / math.log(2) + 8) / self.held_out.numel()

    def _scored_nats(self, windows: Tensor, scored: Tensor) -> float:  # (count, seq + 1), (count, seq)
        """Return the summed loss. A `run` gets batches of the shape of a training step's, which stages of a pipeline expect."""
        total, count = 0.0, EVAL_ROWS
        if self.run is not None:
            count = self.options.global_batch // self.data_place[1]
            missing = -len(windows) % count
            windows, scored = F.pad(windows, (0, 0, 0, missing)), F.pad(scored, (0, 0, 0, missing))
        for first in range(0, len(windows), count):
            rows, mask = windows[first : first + count], scored[first : first + count]
            if self.run is not None:
                total += float(self.run.evaluate(rows[:, :-1], rows[:, 1:].masked_fill(~mask, IGNORED)))
                continue
            logits = self.model(rows[:, :-1]).float()  # (rows, seq, vocab)
            nats = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")  # (rows * seq,)
            total += float(nats[mask.flatten()].double().sum())
        self.model.train()
        return total

    def sample(self, prompt: str) -> str:
        """Let the model continue `prompt`; return the text, the same on all ranks (collective)."""
        if not self.options.sample_bytes:
            return ""
        tokens = torch.tensor([list(prompt.encode())], device=self.ranks.device)  # (1, prompt)
        generator = torch.Generator().manual_seed(self.options.seed)
        self.model.eval()
        gpt: Any = self.model
        written = gpt.generate(tokens, self.options.sample_bytes, temperature=0.8, top_k=40, generator=generator)
        self.model.train()
        text = bytes(written[0].tolist()).decode("utf-8", errors="replace")
        return "".join(c for c in text if c.isprintable() or c in "\n\t")

    def close(self) -> None:
        """End the sharding without restoring the whole model, which may fit on no rank, and remove offload files (collective)."""
        if self.options.checkpoints:
            zs.checkpoint_activations(self.model, off=True)
        zs.close(self.model, restore=False)
