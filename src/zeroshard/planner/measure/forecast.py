"""Forecast of the time of a step with offloaded states, from rates that are measured in a second or two.

    compute   | F B | F B |             measured: forward and backward of a micro-batch, with everything they fetch
    step                  | host step | or the disk's remaining transfers, if these take longer
    disk      | r w r w ..| r w r w r |.. w             buffers let the disk work for the step during forward and backward

In each step the disk moves everything that the optimizer step reads and writes. Buffers determine how much of this overlaps with
forward and backward, and the disk's rate how long the rest takes. The host steps at the same time, if it has cores to spare.

ZeRO-Infinity, arXiv 2104.07857, section 4 (efficiency from bandwidth and arithmetic intensity), here in seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...config import Tier
from ...errors import ConfigError
from ...seam import Engine, Rehearsal, Snapshot, engine_of, exchange_values
from ...tiers import describe_threads, visible_cores
from ...utils.host import ranks_here
from .probe import DiskProbe

HOST_STEP, DISK, DISK_BESIDE = "host step", "disk", "disk while the host steps"


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds of one optimizer step on the slowest rank, and their parts.

    Attributes:
        rates: measured on each rank while all ranks worked: bytes per second by link, parameters per second of the host's step.
        seconds: what each resource would take if it worked alone.
        step_seconds: the prediction for one step.
        bound: the resource that takes longest.
        host: the threads and cores with which the host steps.
    """

    rates: dict[str, float]
    seconds: dict[str, float]
    step_seconds: float
    bound: str
    host: str = ""

    def __str__(self) -> str:
        steps = f"G parameters/s ({self.host})" if self.host else "G parameters/s"
        rates = ", ".join(
            f"{name} {rate / 1e9:.2f} {steps if name == HOST_STEP else 'GB/s'}" for name, rate in self.rates.items()
        )
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        measured = f"measured on each rank: {rates}" if rates else "no model state is offloaded"
        return f"{measured}; a step takes {self.step_seconds:.2f} s ({parts}), bound by {self.bound}"


def forecast(model: nn.Module, micro_batch: Callable[[], Tensor], *, accumulate: int = 1) -> Forecast:
    """Predict the step time of a sharded model with its tiers (collective; takes some seconds, and nothing is stepped).

    Training goes on as if this had not been called: gradients are dropped, and random state and the model's buffers come back.

    Args:
        micro_batch: a function that runs the forward on a batch like those of the training and returns the loss. It is called
            twice.
        accumulate: micro-batches of a step.
    """
    engine = engine_of(model)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"zs.forecast: accumulate: expected a whole number of at least 1, got {accumulate!r}.")
    engine.states.wait()
    snapshot = engine.snapshot()
    work = _Work.of(snapshot, accumulate)
    compute_s = accumulate * _compute_seconds(engine, micro_batch, keep_gradients=accumulate > 1)
    publish_s = 0.0  # of sending replicated parameters to all ranks after a step, measured by sending them
    if snapshot.has_optimizer and not all(each.sharded for each in snapshot.groups):
        engine.ranks.fence_write()
        begin = time.perf_counter()
        engine.publish()
        if engine.ranks.device.type == "cuda":
            torch.cuda.synchronize(engine.ranks.device)
        publish_s = time.perf_counter() - begin
    rehearsal = engine.rehearse_step(accumulate) if work.stepped_numel else None
    rates = _measure_rates(engine, work, rehearsal)
    seconds, step_s = _predict(snapshot, work, rates, compute_s)
    seconds["parameters to all ranks"], step_s = publish_s, step_s + publish_s
    mine = (rates, seconds, step_s, rehearsal.threads if rehearsal is not None else 0)
    everyone = exchange_values(engine.ranks, mine, "forecast: result")
    rates = {name: min(other[0][name] for other in everyone) for name in rates}
    seconds = {name: max(other[1][name] for other in everyone) for name in seconds}
    seconds = {name: value for name, value in seconds.items() if value > 0}
    threads = min(other[3] for other in everyone)
    return Forecast(
        rates, seconds, max(other[2] for other in everyone), max(seconds, key=lambda name: seconds[name]),
        describe_threads(threads) if threads else "",
    )  # fmt: skip


@dataclass
class _Work:
    """Work of one rank in a step.

    stepped_numel: parameters that the host's cores step. reads, writes: bytes that the step's pipeline reads from and writes to
    disk. waited: disk bytes that move while nothing else runs. passing: disk bytes of forward and backward. room: bytes that
    buffers let the disk move for the step during forward and backward. copied: bytes between host and device in the step.
    """

    stepped_numel: int = 0
    reads: int = 0
    writes: int = 0
    waited: int = 0
    passing: int = 0
    room: int = 0
    copied: dict[tuple[Tier, Tier], int] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshot: Snapshot, accumulate: int) -> _Work:
        """Return the work of this rank. accumulate: micro-batches of a step."""
        work = cls(room=_room(snapshot))
        for each in snapshot.groups:
            on_device = each.states_tier is Tier.DEVICE
            if each.gradient is not None and snapshot.has_optimizer and not (on_device and snapshot.separate):
                work.stepped_numel += each.shard_numel
            for link, itemsize in each.moved_by_pass.items():
                if Tier.DISK in link:
                    work.passing += round(accumulate * itemsize * each.shard_numel)
            for link, itemsize in each.moved_by_step.items():
                nbytes = round(itemsize * each.shard_numel)
                if Tier.DISK not in link:
                    work.copied[link] = work.copied.get(link, 0) + nbytes
                elif on_device:  # a step on the device loads its states before and stores them after
                    work.waited += nbytes
                elif link[0] is Tier.DISK:
                    work.reads += nbytes
                else:
                    work.writes += nbytes
        return work


def _room(snapshot: Snapshot) -> int:
    """Return the bytes that the disk can move for the step during forward and backward.

    Free buffers are filled ahead with the states of the next step's first slabs (not with gradients, which do not exist yet),
    and the last slab is still being written when a step returns (earlier ones are done, since the disk serves in order). With
    parameters on disk this gains nothing, since the first parameters needed would be read after all that.
    """
    offload = snapshot.config.offload_optimizer
    if snapshot.config.offload_param.tier is Tier.DISK:
        return 0
    slabs = []  # for each slab: bytes that can be read ahead, bytes of buffers, bytes written
    for each, numel in snapshot.host_runs:
        reads, writes = (each.moved_by_step.get(link, 0) for link in ((Tier.DISK, Tier.HOST), (Tier.HOST, Tier.DISK)))
        early = reads - (each.gradient.itemsize if each.gradient is not None and each.gradient_tier is Tier.DISK else 0)
        count = max(math.ceil(numel * max(reads, writes) / offload.buffer_nbytes), 1)
        slabs += [tuple(round(numel // count * nbytes) for nbytes in (early, max(reads, writes), writes))] * count
    left, ahead = offload.buffer_count * offload.buffer_nbytes, 0
    for early, held, _ in slabs:
        left -= held
        ahead += early if left >= 0 else 0
    return ahead + sum(writes for *_, writes in slabs[-1:])


def _predict(snapshot: Snapshot, work: _Work, rates: dict[str, float], compute_s: float) -> tuple[dict[str, float], float]:
    """Return the seconds by resource, and of the whole step."""
    host_s = work.stepped_numel / rates[HOST_STEP] if HOST_STEP in rates else 0.0
    copied = work.copied.items()
    copy_s = max((nbytes / rates[f"{source.value} -> {target.value}"] for (source, target), nbytes in copied), default=0.0)
    disk, beside = rates.get(DISK, 1.0), rates.get(DISK_BESIDE, 1.0)  # 1.0 where not measured, since no bytes move there
    total = work.reads + work.writes
    idle_s = max(0.0, compute_s - work.passing / beside)  # time in forward and backward in which the disk is idle
    left = total - min(work.room, idle_s * beside)
    step_s = max(host_s + max(0.0, left - host_s * beside) / disk, copy_s) + work.waited / disk
    if snapshot.config.delayed_update is None:
        whole_s = compute_s + step_s
    else:
        busy_s = max(compute_s, host_s) if _cores_to_spare(snapshot) else compute_s + host_s
        whole_s = max(busy_s, busy_s + (total - busy_s * beside) / disk, copy_s)
    seconds = {
        "forward and backward": compute_s,
        "host step": host_s,
        "disk": (total + work.waited + work.passing) / disk,
        "host <-> device": copy_s,
    }
    return seconds, whole_s


def _cores_to_spare(snapshot: Snapshot) -> bool:
    """Return whether the host can step during forward and backward without taking their cores."""
    return snapshot.separate or visible_cores() >= 2 * ranks_here(snapshot.world_size) * torch.get_num_threads()


def _compute_seconds(engine: Engine, micro_batch: Callable[[], Tensor], keep_gradients: bool) -> float:
    """Return the seconds of forward and backward of a micro-batch: of the second one, since the first touches new memory.

    keep_gradients: let the second one add to the gradients of the first.
    """
    model, device, comm = engine.model, engine.ranks.device, engine.ranks
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    seconds = 0.0
    with torch.random.fork_rng(devices=devices):
        for _ in range(2):
            comm.exchange(b"", "forecast: begin")  # ranks that are threads have all saved the shared generator's state by now
            begin = time.perf_counter()
            micro_batch().backward()
            if devices:
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - begin
            if not keep_gradients:
                engine.zero_grad()
        engine.zero_grad()
        comm.exchange(b"", "forecast: end")
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return seconds


def _measure_rates(engine: Engine, work: _Work, rehearsal: Rehearsal | None) -> dict[str, float]:
    """Measure the rates of the links and cores that this model uses, on all ranks at the same time (collective)."""
    config, rates = engine.config, {}
    offloads = (config.offload_optimizer, config.offload_gradient, config.offload_param)
    path = next((offload.path for offload in offloads if offload.tier is Tier.DISK), None)
    engine.ranks.exchange(b"", "forecast: probes")
    if path is not None:
        moved = max(work.reads + work.writes, 1)
        probe = DiskProbe(path, work.reads / moved if work.reads else 0.5)
        rates[DISK], _ = probe.rates(None)
        engine.ranks.exchange(b"", "forecast: disk beside the step")
        advance = rehearsal.advance if rehearsal is not None else lambda: 0
        rates[DISK_BESIDE], rates[HOST_STEP] = probe.rates(advance)
        probe.close()
    elif rehearsal is not None:
        rates[HOST_STEP] = rehearsal.rate()
    if engine.separate and any(offload.tier is not Tier.DEVICE for offload in offloads):
        engine.ranks.exchange(b"", "forecast: copies")
        rates["device -> host"], rates["host -> device"] = engine.copy_rates()
    return {name: rate for name, rate in rates.items() if rate > 0}
