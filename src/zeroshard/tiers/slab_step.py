"""The arithmetic of a step over slabs, chunk by chunk, and the device's step of states that rest encoded.

    slab     masters | gradient | state | state        where they rest, or copies; some in another form (tiers/stretch.py)
    chunk    open      scale      open    open         of a size that stays in cache
             step: the optimizer's own class, or a fused kernel (tiers/cpu_kernels.py)
             close                close   close

Only one chunk at a time is in the form that the optimizer steps: fp32 values of states in 8 bits never exist as a whole.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import Tier
from ..engine.inner_optimizer import State, fresh, scaled, step_alone
from ..engine.rest import MemoryRest, Rest
from ..engine.runs import Run
from ..engine.steppers import Job, SlabStep
from ..tensor.state_column import is_column
from ..utils import torch_compat
from ..utils.work import Work
from .cpu_kernels import CHUNK_NUMEL, CODED_CHUNK_NUMEL, Kernel, Team, host_threads, kernel_for, step_stretch
from .forms import CodedRest, SplitRest
from .storage import FurtherTiers
from .stretch import CodedStretch, SplitStretch, Stretch

_STEPPED, _GRADIENT, _VALUES = "(stepped)", "(gradient)", "(values)"  # names of the parts of a slab that are not states
_CLASS_CHUNK_NUMEL = 1 << 18  # for an optimizer's own class, whose step has an overhead of some 0.15 ms
_DEVICE_CHUNK_NUMEL = 1 << 24  # the same, on a device with a memory of its own


@dataclass(eq=False)
class Slab:
    """Elements [begin, end) of a shard, all in one run.

    parts: by name, the tensors that the step uses: views of the memory where they rest, or copies in `buffer`. staged: the copies
    that the step changes, each with the Rest and the position to which it is written back. reads: requests that fill `buffer`.
    """

    job: Job
    begin: int
    end: int
    buffer: Tensor | None = None
    used_nbytes: int = 0
    parts: dict[str, Tensor | Stretch] = field(default_factory=dict)
    staged: list[tuple[Tensor, Rest, int]] = field(default_factory=list)
    reads: list[Work] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int, int]:
        """Key by which a slab of this step is found among those that the last step has read ahead."""
        return id(self.job.run), self.begin, self.end

    def tensor(self, name: str) -> Tensor:
        """Return a part that rests as it is stepped."""
        part = self.parts[name]
        assert isinstance(part, Tensor)
        return part


class SlabStepper(SlabStep):
    """Stepper, on the device, of the runs whose states rest there encoded or whose master weights rest there as two halves.

    Each run is one slab. HostStepper cuts runs into smaller slabs, and copies what rests where the host can not use it.
    """

    def __init__(self, inner: torch.optim.Optimizer, tiers: FurtherTiers, fused: bool, on_host: bool = False) -> None:
        far = tiers.separate and not on_host  # on a device with a memory of its own, which fused kernels can not use
        self.inner, self.tiers, self.fused = inner, tiers, fused and not far
        # a rank that computes on a GPU lets the host's step use its share of the cores, whatever OMP_NUM_THREADS is
        self.threads = threads = host_threads() if tiers.separate and on_host else torch.get_num_threads()
        self.chunk = _DEVICE_CHUNK_NUMEL if far else _CLASS_CHUNK_NUMEL  # elements that the optimizer's own class steps at a time
        self.scratch = torch.empty(max(CHUNK_NUMEL * threads, CODED_CHUNK_NUMEL) if self.fused else 0, device="cpu")
        self.team = Team(1 if tiers.one_thread else threads)

    def step(self, jobs: list[Job]) -> None:
        """Step all jobs, in this order."""
        for slab in self._ready(jobs):
            self._compute(slab)
            self._write_back(slab)

    def _ready(self, jobs: list[Job]) -> Iterator[Slab]:
        """Yield the slabs of all jobs, with the parts that the step uses."""
        for job in jobs:
            slab = Slab(job, job.run.start, job.run.stop)
            self._bring_states(slab)
            self._bring_gradient(slab)
            yield slab

    def _place(self, slab: Slab, rest: Rest, start: int, stop: int, *, read: bool, write: bool) -> Tensor:
        """Return elements [start, stop) of a Rest for a step of the slab: a view, or a copy, read and written back as asked."""
        place = rest.load(start, stop)
        if write and not (isinstance(rest, MemoryRest) and rest.resident):
            slab.staged.append((place, rest, start))
        return place

    def _write_back(self, slab: Slab) -> None:
        """Write the copies that the step has changed to where they rest, and free all copies."""
        for copied, rest, start in slab.staged:
            rest.store(start, copied)
        slab.job.run.states.replace(slab.job.after)
        slab.parts, slab.staged = {}, []

    def _bring(self, slab: Slab, name: str, rest: Rest, *, read: bool, write: bool) -> None:
        """Add a Rest's elements [begin, end) to the slab's parts."""
        begin, end = slab.begin, slab.end
        if isinstance(rest, CodedRest):
            at, stop = rest.column.count(begin), rest.column.count(end)
            coded = self._place(slab, rest.inner, at, stop, read=read, write=write)
            slab.parts[name] = CodedStretch(coded, rest.column, rest.dtype)
            self._renew_noise(slab)
        elif isinstance(rest, SplitRest):
            halves = (self._place(slab, half, begin, end, read=read, write=write) for half in (rest.high, rest.low))
            slab.parts[name] = SplitStretch(*halves)
        else:
            slab.parts[name] = self._place(slab, rest, begin, end, read=read, write=write)

    def _renew_noise(self, slab: Slab) -> None:
        """Give the slab's states the noise of its job's step."""
        for name, part in slab.parts.items():
            if isinstance(part, CodedStretch) and part.column.noisy is not None:
                part.noise = _Noise(slab, name)

    def _bring_states(self, slab: Slab) -> None:
        group = slab.job.run.group
        self._bring(slab, _STEPPED, group.masters.of_runs, read=True, write=True)
        for name, column in slab.job.run.states.columns.items():
            self._bring(slab, name, column, read=True, write=True)

    def _bring_gradient(self, slab: Slab) -> None:
        """Add the gradient, and the values where the step writes them beside the masters."""
        group = slab.job.run.group
        self._bring(slab, _GRADIENT, slab.job.gradient, read=True, write=False)
        if slab.job.publish and group.masters.rest is not None and not group.masters.split:
            self._bring(slab, _VALUES, group.values.rest, read=False, write=True)

    def kernel(self, job: Job) -> Kernel | None:
        """Return the fused kernel that steps a run; None: the optimizer's own class steps it."""
        if not self.fused or job.run.group.masters.stepped.dtype != torch.float32:
            return None
        return kernel_for(self.inner, job.options)

    def _compute(self, slab: Slab) -> None:
        """Step one slab with a kernel, or chunk by chunk with the optimizer's own class."""
        job, kernel, states = slab.job, self.kernel(slab.job), slab.job.run.states
        param, grad, out = slab.parts[_STEPPED], slab.tensor(_GRADIENT), slab.parts.get(_VALUES)
        assert out is None or isinstance(out, Tensor)
        numel, state = max(param.numel(), 1), State()
        if kernel is not None:
            state = fresh(states.scalars)  # every slab of a step begins with the same counters
            if job.fresh:
                state |= self._create(slab, kernel)
            state |= {name: part for name, part in slab.parts.items() if name not in (_STEPPED, _GRADIENT, _VALUES)}
            step_stretch(
                kernel, param, grad, state, job.options,
                scale=job.factor, out=out, scratch=self.scratch, team=self.team, chunk=self.tiers.at_once(numel),
            )  # fmt: skip
            self._take_states(slab, 0, param.numel(), state)
        else:
            chunk = self.tiers.at_once(numel) or self.chunk
            for start in range(0, numel, chunk):
                stop = min(start + chunk, param.numel())
                opened = _opened(param, start, stop)
                columns = {name: _opened(slab.parts[name], start, stop) for name in states.columns}
                state = self._step_class(job, opened, grad[start:stop], fresh(states.scalars) | columns)
                if states.group.plan.coded:
                    _clear_padding(slab, start, opened)  # a class that divides by a state makes it nan
                self._take_states(slab, start, stop, state)
                if isinstance(param, Stretch):
                    param.part(start, stop).close(opened)
            if out is not None:
                out.copy_(slab.tensor(_STEPPED))
        shared = job.run.group.columns  # the Rests of states, of which this run's are ranges; scalars are kept as values
        job.after = {name: shared[name] if name in slab.parts else value for name, value in state.items()}

    def _create(self, slab: Slab, kernel: Kernel) -> State:
        """Create the states of a first step in the slab; return the scalars."""
        param, created = slab.parts[_STEPPED], State()
        numel = max(param.numel(), 1)
        chunk = self.tiers.at_once(numel) or CHUNK_NUMEL
        for start in range(0, numel, chunk):
            stop = min(start + chunk, param.numel())
            created = kernel.create(_opened(param, start, stop))
            self._take_states(slab, start, stop, created)
        return {name: value for name, value in created.items() if name not in kernel.columns}

    def _step_class(self, job: Job, param: Tensor, grad: Tensor, state: State) -> State:
        """Step a chunk with the optimizer's own class; return the states afterwards."""
        grad = scaled(grad, job.factor, param.dtype)
        vars(self.inner).update(fresh(job.attributes))  # as before the step: else each chunk would advance them once more
        return step_alone(self.inner, job.options, param, grad, state)[1]

    def _take_states(self, slab: Slab, start: int, stop: int, state: State) -> None:
        """Put the states of elements [start, stop), as a step or a kernel has made or changed them, into the slab's parts."""
        for name, value in state.items():
            if is_column(value, (stop - start,)):
                if name not in slab.parts:
                    self._bring(slab, name, slab.job.run.states.shared(name, value.dtype), read=False, write=True)
                if isinstance(slab.parts[name], CodedStretch):
                    _clear_padding(slab, start, value)  # where Rprop's first step sizes, say, are not zero
                _put(slab.parts[name], start, stop, value)


def _opened(part: Tensor | Stretch, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) of a part as the optimizer has them: a view, or a copy of what rests in another form."""
    return part.part(start, stop).open() if isinstance(part, Stretch) else part[start:stop]


def _clear_padding(slab: Slab, start: int, values: Tensor) -> None:
    """Set padding to zero in values (n,) that begin at element `start` of a slab, so that it never sets the scale of a block.

    Checkpoints hold no padding: with a scale that comes from it, a loaded state would be encoded to other values.
    """
    group, first = slab.job.run.group, slab.begin + start
    for index, begin, end in _located(slab.job.run, first, first + values.numel()):
        held = group.layout.slots[index].numel if group.masters.whole else group.homes[index].piece.numel
        if begin + held < end:
            values[max(begin + held - first, 0) : end - first] = 0


def _located(run: Run, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return (parameter, [begin, end) in the shard, padding included) for each parameter of a run in [start, stop) of the shard."""
    slots, masters = run.group.layout.slots, run.group.masters
    before = 0 if masters.whole else run.group.layout.shard_range(run.group.comm.rank)[0]
    low, high = (bisect_right(run.indices, before + at, key=lambda index: slots[index].offset) for at in (start, stop - 1))
    found = [(index, *masters.range(index)) for index in run.indices[max(low - 1, 0) : high]]
    return [each for each in found if each[1] < each[2]]  # others have no element on this rank


def _put(part: Tensor | Stretch, start: int, stop: int, value: Tensor) -> None:
    if isinstance(part, Stretch):
        part.part(start, stop).close(value)
        return
    place = part[start:stop]
    # a state that the class has updated in place is there already
    if torch_compat.storage_id(place.untyped_storage()) != torch_compat.storage_id(value.untyped_storage()):
        place.copy_(value)


class _Noise:
    """Noise for the stochastic rounding of one state in a slab: a hash of step, parameter, state and element.

    So the noise does not depend on how parameters are cut, and checkpoints need not keep the state of a generator.
    """

    def __init__(self, slab: Slab, state: str) -> None:
        self.run, self.begin, self.state, self.number = slab.job.run, slab.begin, state, slab.job.number

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return numbers from 0 to 1 for elements [start, stop) of the slab."""
        group, first, last = self.run.group, self.begin + start, self.begin + stop
        out = torch.empty(stop - start, device=group.comm.device if group.offload.tier is Tier.DEVICE else "cpu")
        for index, begin, end in _located(self.run, first, last):
            key = zlib.crc32(f"{self.number} {self.state} {group.specs[index].name}".encode())
            low, high = max(begin, first), min(end, last)
            at = low - begin + (0 if group.masters.whole else group.homes[index].start)  # number of the element in the parameter
            out[low - first : high - first] = hashed_uniform(key, at, at + high - low, out.device)
        return out


def hashed_uniform(key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return numbers from 0 to 1 (stop - start,) that depend on the key and on each element's number alone.

    The hash is lowbias32 (C. Wellons, "Prospecting for hash functions", 2018), in 32-bit integers.
    """
    step, first = _signed(key * 0x9E3779B1 | 1), _signed(key * 0x85EBCA77 + 0x165667B1)
    bits = torch.arange(start, stop, device=device).to(torch.int32).mul_(step).add_(first)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        bits ^= (bits >> shift) & (0xFFFFFFFF >> shift)
        bits *= _signed(factor)
    return (bits >> 8 & 0xFFFFFF).float().mul_(2.0**-24)


def _signed(value: int) -> int:
    """Return the lowest 32 bits of a number as a signed integer."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
