"""Rehearsals: rates at which this machine steps and copies, measured with a model's own steppers, forms and buffers.

The host steps tensors of its own, with the arithmetic of the model's optimizer, so nothing of the model changes.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ..config import Tier
from ..engine.inner_optimizer import inner_copy, scaled
from ..engine.optimizer import OptimizerCore
from ..engine.rest import Tiers
from ..engine.runs import Run
from ..engine.steppers import Job
from ..tensor.state_column import is_column
from .cpu_kernels import TEAM_CHUNK_NUMEL, Kernel, step_stretch, stepping_threads
from .gradient_offload import NarrowRest
from .host_step import HostStepper
from .slab_step import SlabStepper, hashed_uniform
from .stretch import CodedStretch, SplitStretch, Stretch

_PROBE_S = 0.4
_NUMEL = 1 << 22  # parameters that are stepped: with their states, more than caches hold
_CHUNK_NUMEL = 1 << 18  # stretch that the optimizer's own class steps, as in host_step.py
_STRETCH_NUMEL = 1 << 20  # stretch that a kernel steps between two polls of the disk (or two chunks for each thread)


def rehearsal(core: OptimizerCore, accumulate: int = 1) -> Rehearsal:
    """Return a rehearsal of the longest run that the host's cores step."""
    runs = [
        (run, options)
        for runs, options in zip(core.runs, core.outer.param_groups, strict=True)
        for run in runs
        if run.offloaded or not core.runtime.tiers.separate
    ]
    run, options = max(runs, key=lambda pair: pair[0].numel)
    return Rehearsal(core, run, options, accumulate)


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

    def rate(self) -> float:
        """Measure the parameters per second of the host's step."""
        begin, numel = time.perf_counter(), 0
        while numel == 0 or time.perf_counter() - begin < _PROBE_S:
            numel += self.advance()
        return numel / (time.perf_counter() - begin)

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
        leaf.grad = scaled(grad, self.factor, self.dtype)
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
