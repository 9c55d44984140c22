"""Probes: measure this machine's rates of stepping, disk reads and writes, and copies, under the conditions of a step.

All ranks measure at the same time, since they share cores, memory and disks. The disk gets reads and writes in the step's
proportion, over blocks that have been written before, first alone and then while the host steps. The host steps tensors of its
own, with the arithmetic of the model's optimizer.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ...config import Tier
from ...engine.inner_optimizer import inner_copy
from ...engine.optimizer import OptimizerCore
from ...engine.rest import Tiers
from ...engine.runs import Run
from ...engine.steppers import Job
from ...engine.tensor.state_column import is_column
from ...tiers.cpu_kernels import TEAM_CHUNK_NUMEL, Kernel, step_stretch, stepping_threads
from ...tiers.gradient_offload import NarrowRest
from ...tiers.host_step import HostStepper
from ...tiers.io.async_file import Engine, Handle
from ...tiers.slab_step import SlabStepper, hashed_uniform
from ...tiers.stretch import CodedStretch, SplitStretch, Stretch
from ...utils.aligned import empty_aligned
from ..simulator.disk_bandwidth import hidden_file, noise

_PROBE_S = 0.4
_NUMEL = 1 << 22  # parameters that are stepped: with their states, more than caches hold
_CHUNK_NUMEL = 1 << 18  # stretch that the optimizer's own class steps, as in tiers/host_step.py
_STRETCH_NUMEL = 1 << 20  # stretch that a kernel steps between two polls of the disk (or two chunks for each thread)
_BLOCK_NBYTES, _BLOCKS = 8 << 20, 4  # size of a block; blocks in each half of the file
_DEPTH = 12  # requests in flight: about as many bytes as a step's buffers hold


class Rehearsal:
    """Rehearsal of one run's step on zeros, with its group's options and the threads that will do it; `advance` does a stretch.

    States and masters that rest in another form are opened and closed in it. stepper: of runs that are stepped slab by slab; its
    threads and scratch memory are used. threads: number of threads of each step.
    """

    def __init__(self, core: OptimizerCore, run: Run, options: dict, accumulate: int = 1) -> None:
        """options: those of the run's optimizer group. accumulate: number of backwards in a step."""
        self.inner, self.options = inner_copy(core.inner), dict(options)
        self.plan, masters, values, grads = run.group.plan, run.group.masters, run.group.values, run.group.gradients
        numel = min(_NUMEL, max(run.numel, 1 << 16))
        self.dtype = masters.stepped.dtype  # in which values and states are stepped
        self.param: Tensor | Stretch = torch.zeros(numel, dtype=self.dtype, device="cpu")
        if masters.halves is not None:
            halves = (torch.zeros(numel, dtype=half.dtype, device="cpu") for half in masters.halves)
            self.param = SplitStretch(*halves)
        # a gradient of a single backward is not added to anything, and keeps the dtype in which it was sent
        narrow = grads.rest.narrow.dtype if isinstance(grads.rest, NarrowRest) and accumulate == 1 else grads.dtype
        self.grad = torch.full((numel,), 1e-3, dtype=narrow, device="cpu")
        clips = core.runtime.config.max_grad_norm is not None or core.runtime.progress.scaler is not None
        self.factor = 0.5 if clips and grads.departure is not None else 1.0
        separate = masters.stepped is not values.rest and not masters.split
        self.out = torch.zeros(numel, dtype=values.dtype, device="cpu") if separate else None
        stepper = core.host if run.offloaded else core.device if run.tensor is None else None
        assert stepper is None or isinstance(stepper, SlabStepper)
        self.stepper = stepper
        self.threads = torch.get_num_threads() if self.stepper is None else self.stepper.threads
        self.kernel: Kernel | None = None
        self.chunk = _CHUNK_NUMEL
        if self.stepper is not None:
            job = Job(run, self.options, {}, grads.rest)
            self.kernel = self.stepper.kernel(job)
            if self.kernel is not None:
                self.chunk = max(_STRETCH_NUMEL, 2 * self.threads * TEAM_CHUNK_NUMEL)
                if isinstance(self.stepper, HostStepper):
                    self.chunk = min(self.stepper.slab_numel(job), self.chunk)
        self.columns: dict[str, Tensor | Stretch] = {}
        self.scalars: dict = {}
        starts = range(0, numel, self.chunk)
        self._parts = itertools.cycle([slice(start, min(start + self.chunk, numel)) for start in starts])
        for _ in range(0, numel, self.chunk):
            self.advance()  # makes the states and touches their pages

    @torch.no_grad()
    def advance(self) -> int:
        """Step the next stretch. Return its number of parameters."""
        # it uses the scratch memory and threads of the host's step, and so must not run at the same time
        turn = self.stepper.turn if isinstance(self.stepper, HostStepper) else nullcontext()
        with stepping_threads(self.threads), turn:
            part = next(self._parts)
            param, grad = _part(self.param, part), self.grad[part]
            out = None if self.out is None else self.out[part]
            state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.scalars.items()}
            state |= {name: _part(column, part) for name, column in self.columns.items()}
            if self.kernel is not None:
                assert self.stepper is not None
                step_stretch(
                    self.kernel, param, grad, state, self.options,
                    scale=self.factor, out=out, scratch=self.stepper.scratch, team=self.stepper.team,
                )  # fmt: skip
            else:
                state = self._step_class(param, grad, state)
                if out is not None and isinstance(param, Tensor):
                    out.copy_(param)
            if not self.scalars and not self.columns:  # columns of the states that the first step made
                for name, value in state.items():
                    if is_column(value, (grad.numel(),)):
                        self.columns[name] = self._column(name, value.dtype)
                    else:
                        self.scalars[name] = value
            return grad.numel()

    def _column(self, name: str, dtype: torch.dtype) -> Tensor | Stretch:
        """Return zeros in the form in which a state rests. dtype: as the optimizer has it."""
        column, numel = self.plan.column(name), self.grad.numel()
        if column.plain(dtype):
            return torch.zeros(numel, dtype=dtype, device="cpu")
        coded = torch.zeros(column.count(numel), dtype=column.dtype or dtype, device="cpu")
        return CodedStretch(coded, column, dtype, lambda start, stop: hashed_uniform(0, start, stop, coded.device))

    def _step_class(self, param: Tensor | Stretch, grad: Tensor, state: dict) -> dict:
        closed = {"": param, **state}
        opened = {name: each.open() if isinstance(each, Stretch) else each for name, each in closed.items()}
        leaf = nn.Parameter(opened.pop(""))
        leaf.grad = grad.to(self.dtype) if self.factor == 1.0 else grad.to(self.dtype) * self.factor
        self.inner.param_groups = [{**self.options, "params": [leaf]}]
        self.inner.state = defaultdict(dict, {leaf: opened} if opened else {})
        self.inner.step()
        stepped = self.inner.state[leaf]
        for name, each in closed.items():
            if isinstance(each, Stretch):
                each.close(stepped[name] if name else leaf.detach())
        return stepped


def _part(whole: Tensor | Stretch, part: slice) -> Tensor | Stretch:
    return whole.part(part.start, part.stop) if isinstance(whole, Stretch) else whole[part]


def step_rate(rehearsal: Rehearsal) -> float:
    """Measure the parameters per second of the host's step."""
    begin, numel = time.perf_counter(), 0
    while numel == 0 or time.perf_counter() - begin < _PROBE_S:
        numel += rehearsal.advance()
    return numel / (time.perf_counter() - begin)


class DiskProbe:
    """A file that is read in one half and written in the other; `read_share` of the bytes are reads."""

    def __init__(self, folder: str | os.PathLike, read_share: float) -> None:
        self.read_share = read_share
        self.engine, self.file = Engine(), hidden_file(folder, 2 * _BLOCKS * _BLOCK_NBYTES)
        self.target = empty_aligned(_BLOCK_NBYTES)  # all reads go here; the data is not used
        self.source = noise(_BLOCK_NBYTES)
        self._count = self._reads = 0
        first = [self.engine.write(self.file, block * _BLOCK_NBYTES, self.source) for block in range(2 * _BLOCKS)]
        for handle in first:  # so that the measured writes overwrite blocks, as those of steps do
            handle.wait()

    def _request(self) -> Handle:
        """Start the next read or write, of blocks in turn."""
        self._count += 1
        if self._reads < self._count * self.read_share:
            self._reads += 1
            return self.engine.read(self.file, self._reads % _BLOCKS * _BLOCK_NBYTES, self.target)
        block = _BLOCKS + (self._count - self._reads) % _BLOCKS
        return self.engine.write(self.file, block * _BLOCK_NBYTES, self.source)

    def rates(self, beside: Callable[[], int] | None) -> tuple[float, float]:
        """Measure the bytes per second, and the sum per second of what `beside` returns when called repeatedly meanwhile."""
        flight = deque(self._request() for _ in range(_DEPTH))
        moved = counted = 0
        begin = time.perf_counter()
        while time.perf_counter() - begin < _PROBE_S or not moved:
            if beside is not None:
                counted += beside()
            else:
                flight[0].wait()
            while flight[0].done():
                flight.popleft().wait()  # raises if the request failed
                moved += _BLOCK_NBYTES
                flight.append(self._request())
        elapsed = time.perf_counter() - begin
        for handle in flight:
            handle.wait()
        return moved / elapsed, counted / elapsed

    def close(self) -> None:
        """Close the file, which has no name any more."""
        self.engine.close()
        self.file.close()


def copy_rates(tiers: Tiers) -> tuple[float, float]:
    """Measure the bytes per second from the device to pinned host memory and back."""
    nbytes = 64 << 20
    host, device = tiers.host_buffer(nbytes), tiers.device_buffer(nbytes)
    rates = []
    for target, source in ((host, device), (device, host)):
        ends = (Tier.DEVICE, Tier.HOST) if source is device else (Tier.HOST, Tier.DEVICE)
        for _ in range(2):  # the first one warms up
            begin = time.perf_counter()
            tiers.copy(target, source, *ends).wait()
            seconds = time.perf_counter() - begin
        rates.append(nbytes / max(seconds, 1e-9))
        tiers.ledger.move(*ends, -2 * nbytes)  # a probe is no traffic of the model
    return rates[0], rates[1]
