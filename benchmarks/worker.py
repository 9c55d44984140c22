"""The worker process of one rank of one contender: it sleeps on a pipe until the controller asks it to step.

Messages from the controller and their answers (an exception is answered by `Failure`, then the process ends):

    ("turn", first_step, steps, lead_in)  -> Turn     timed steps, after `lead_in` untimed ones
    ("memory", first_step, steps)         -> Memory   untimed steps, after a reset of the memory's high-water mark
    ("overlap", first_step, steps)        -> Overlap  untimed steps under the profiler (CUDA)
    ("disk", phase)                       -> Burst    reads, writes, or both, as fast as possible
    ("save" | "load" | ..., path)         -> seconds; see checkpoints.py
    ("quit",)                             -> (none)
    at the start                          -> seconds since its begin, settings, number of parameters

Output of the libraries goes to the rank's log file.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from zeroshard.planner.simulator.disk_bandwidth import Burst, DiskBursts, write_bulk
from zeroshard.tiers import host_threads

from . import contenders, memory, parallel, sequences
from .contenders import Keeper
from .micro import divert_output, one_line
from .overlap import Overlap
from .plan import Contender, Workload
from .workload import batch, build_model


@dataclass(frozen=True)
class Turn:
    """The timed steps of one rank. Times are CLOCK_MONOTONIC, so those of ranks of a host can be compared."""

    start: float
    ends: tuple[float, ...]  # one per step; on CUDA one per turn, since a sync per step would slow it
    losses: tuple[float, ...]
    cpu_s: float  # of all threads of this rank, user and system
    moved: dict[str, float] = field(default_factory=dict)  # bytes a step between tiers, by link


@dataclass(frozen=True)
class Memory:
    """The memory of one rank while stepping: resident, and allocated on CUDA; its model states between steps."""

    peak_rss: int | None
    cuda_peak: int | None
    at_rest: dict[str, dict[str, int]] | None
    losses: tuple[float, ...]
    rss_before: int | None = None  # resident when the steps began


@dataclass(frozen=True)
class Failure:
    """The answer of a worker that failed; its log has the traceback."""

    summary: str


def serve(pipe: Connection, contender: Contender, workload: Workload, rank: int, meeting_file: str, log_file: str) -> None:
    """Run the worker process: answer messages until "quit". meeting_file: of the group's file store."""
    divert_output(log_file)
    worker = None
    try:
        worker = _Rank(pipe, contender, workload, rank, meeting_file)
        while (message := pipe.recv())[0] != "quit":
            pipe.send(getattr(worker, message[0])(*message[1:]))
    except EOFError:
        pass  # the controller is gone
    except BaseException as error:
        traceback.print_exc()
        pipe.send(Failure(one_line(error)))
    finally:
        if worker is not None:
            try:
                worker.trainer.close()
            except Exception:
                traceback.print_exc()
        # Skip destructors: those of a process group may wait for a peer that has ended.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class _Rank:
    """The state of a worker between messages; a message names the method that answers it."""

    def __init__(self, pipe: Connection, contender: Contender, workload: Workload, rank: int, meeting_file: str) -> None:
        begun = time.monotonic()
        self.rank, self.workload, self._on_cuda = rank, workload, workload.device == "cuda"
        if workload.pin_cores:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        if contender.kind in ("ds", "ulysses"):
            os.environ["DS_ACCELERATOR"] = workload.device
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))  # as torchrun sets them
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(workload.ranks))
        torch.set_num_threads(host_threads() if self._on_cuda else 1)
        if self._on_cuda:
            torch.cuda.set_device(rank)
        backend, method = "nccl" if self._on_cuda else "gloo", f"file://{meeting_file}"
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=workload.ranks)
        build = sequences.build if workload.long else parallel.build if workload.mesh else contenders.BUILDERS[contender.kind]
        self.trainer = build(contender, workload)
        if workload.limit_nbytes and self._on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(workload.limit_nbytes / torch.cuda.mem_get_info()[1])
        self._probe: DiskBursts | None = None
        pipe.send((time.monotonic() - begun, self.trainer.settings, parameter_count(workload)))

    def turn(self, first_step: int, steps: int, lead_in: int = 0) -> Turn:
        batches = self._batches(first_step, lead_in + steps)
        moved_before, ends = self.trainer.moved(), []
        losses = [self.trainer.step(*pair) for pair in batches[:lead_in]]
        start, cpu_before = time.monotonic(), time.process_time()
        for tokens, targets in batches[lead_in:]:
            losses.append(self.trainer.step(tokens, targets))
            if not self._on_cuda:
                ends.append(time.monotonic())
        if self._on_cuda:
            torch.cuda.synchronize()
            ends.append(time.monotonic())
        cpu_s = time.process_time() - cpu_before
        self.trainer.quiet()
        if self._on_cuda:
            torch.cuda.empty_cache()  # the other contenders use the same device
        moved = {link: (now - moved_before.get(link, 0)) / len(batches) for link, now in self.trainer.moved().items()}
        return Turn(start, tuple(ends), tuple(float(x) for x in losses), cpu_s, moved)

    def memory(self, first_step: int, steps: int) -> Memory:
        memory.trim()  # what earlier steps have freed would hide what these take
        memory.reset_peak_rss()
        before = memory.peak_rss_nbytes()
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
        losses = tuple(float(self.trainer.step(*b)) for b in self._batches(first_step, steps))
        cuda_peak = torch.cuda.max_memory_allocated() if self._on_cuda else None
        return Memory(memory.peak_rss_nbytes(), cuda_peak, self.trainer.at_rest(), losses, before)

    def overlap(self, first_step: int, steps: int) -> Overlap:
        batches = self._batches(first_step, steps)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for pair in batches:
                self.trainer.step(*pair)
            torch.cuda.synchronize()
        return Overlap.of(recorded.events())

    def disk(self, phase: str) -> Burst:
        assert self.workload.swap_path is not None
        self._probe = self._probe or DiskBursts(self.workload.swap_path)
        return self._probe.burst(phase)

    @functools.cached_property
    def keeper(self) -> Keeper:
        """The functions that save and load. Making them is collective."""
        assert self.trainer.keeper is not None
        return self.trainer.keeper()

    def save(self, path: str) -> tuple[float, float]:
        """Save a checkpoint; return begin and end, by CLOCK_MONOTONIC."""
        keeper = self.keeper
        begin = time.monotonic()
        keeper.save(path)
        return begin, time.monotonic()

    def load(self, path: str) -> None:
        """Load the checkpoint at a path."""
        self.keeper.load(path)

    def save_in_background(self, path: str) -> float:
        """Save in the background of a step; return the seconds for which training was held up, when the save is complete."""
        (pair,) = self._batches(0, 1)
        held, wait = self.keeper.in_background(path)  # type: ignore[misc]
        self.trainer.step(*pair)
        wait()
        return held()

    def copy_states(self) -> float:
        """Return the seconds of copying this rank's states to touched memory: once, as in a save; repeated copies are faster."""
        states = self.keeper.states()  # type: ignore[misc]
        copies = [torch.empty_like(state).zero_() for state in states]
        begin = time.monotonic()
        for copy, state in zip(copies, states, strict=True):
            copy.copy_(state)
        return time.monotonic() - begin

    def write_bulk(self, nbytes: int) -> Burst:
        """Write a new file of `nbytes` with the file engine."""
        assert self.workload.swap_path is not None
        return write_bulk(self.workload.swap_path, nbytes)

    def _batches(self, first_step: int, steps: int) -> list:
        place = self.rank if self.trainer.place is None else self.trainer.place
        return [batch(self.workload, first_step + i, place) for i in range(steps)]


def parameter_count(workload: Workload) -> int:
    """Return the number of elements of the whole model, from one on the meta device, since contenders shard theirs."""
    model = build_model(dataclasses.replace(workload, meta=True))
    return sum(p.numel() for p in model.parameters())
