"""The host's step over offloaded states, slab by slab (ZeRO-Offload, arXiv 2101.06840, 5.1; ZeRO-Infinity, 2104.07857, 5.2.2).

    read    | s2 | s3 | s4 |             a slab: a part of one run, of at most buffer_nbytes
    step    | s1 | s2 | s3 | s4          master weights, gradient and states, in chunks that stay in cache
    write   |    | s1 | s2 | s3 | s4     states that rest on the host are stepped in place and need no buffer

Slabs pass through one arena of constant size. At the end of a step, `read_ahead` reads the first slabs of the next step into
the arena's free memory, so that the disk also works while forward and backward run.

The arithmetic is that of the optimizer's own class, run on chunks (equal in bits to a step without offload), or torch's
fused kernels (tiers/cpu_kernels.py).

In a delayed update (`DelayedStep`; ZeRO-Offload, section 4.3) the step overlaps with the next forward and backward:

    device  | F1 B1 | F2 B2 | F3 B3 |            forward 3 uses the parameters of step 1
    host            | step 1 | step 2 |          in a thread, the only one that uses masters and states while it runs

Gradients that rest as shards are not copied for it: a group then has two resting places, and while the step reads one of
them, backward writes into the other (engine/reduction.py:hand_over).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from ..config import Offload, Tier
from ..engine.flat_layout import round_up
from ..engine.rest import MemoryRest, Rest
from ..engine.steppers import DelayedUpdate, HostStep, Job
from ..errors import ZeroshardError
from ..utils.one_thread import Turn, one_thread
from ..utils.work import Work
from .cpu_kernels import stepping_threads
from .estimate import PAGE_NBYTES
from .forms import CodedRest, SplitRest
from .pool import Arena
from .slab_step import Slab, SlabStepper
from .storage import FurtherTiers

_FLIGHT = 4  # times buffer_count: most slabs whose reads have started and that are not stepped yet, also if they need no buffer
_SLAB_MULTIPLE = 4096  # elements: slabs begin at page boundaries in any dtype


class _All(Work):
    """Several moves as one `Work`."""

    def __init__(self, parts: list[Work]) -> None:
        self.parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def wait(self) -> None:
        for part in self.parts:
            part.wait()


class HostStepper(SlabStepper, HostStep):
    """Stepper, on the host, of the runs whose states rest on the host or on disk.

    Threads: one at a time, else ThreadsMet is raised: the rank's own thread or, during a delayed step, the thread of that step.
    engine/write_gate.py calls `DelayedStep.wait` before the rank's own thread uses the stepper again.
    """

    def __init__(self, inner: torch.optim.Optimizer, offload: Offload, tiers: FurtherTiers, fused: bool) -> None:
        super().__init__(inner, tiers, fused, on_host=True)
        self.offload = offload
        self.turn = Turn("the host's step of offloaded states")
        pin = offload.pin_memory
        limit_nbytes = offload.buffer_count * offload.buffer_nbytes
        self.pool = Arena(tiers.ledger, limit_nbytes, PAGE_NBYTES, lambda n: tiers.host_buffer(n, pin), Tier.HOST, self.turn)
        self._ahead: deque[Slab] = deque()  # slabs that are read ahead for the next step
        self._next: deque[Slab] = deque()  # the next step's slabs that are not read yet
        self._following: deque[Slab] = deque()  # in a step: the slabs of the next one, if it steps the same runs
        self._uploads: list[Work] = []  # copies to the device in this step

    # -- the pipeline ----------------------------------------------------------------------------------------

    @one_thread
    def step(self, jobs: list[Job]) -> None:
        """Step all jobs, in this order. Writes to disk may still be running when it returns."""
        with stepping_threads(self.threads):
            super().step(jobs)
            for upload in self._uploads:
                upload.join()  # the device computes next with the new parameters
            self._uploads = []
            for job in jobs:
                job.run.states.replace(job.after)
            self.drop_ahead()
            self._next, self._following = self._following, deque()
        self.read_ahead()

    def _ready(self, jobs: list[Job]) -> Iterator[Slab]:
        plan = deque(slab for job in jobs for slab in self._slabs(job))
        self._following = deque(Slab(slab.job, slab.begin, slab.end) for slab in plan)
        sizes = [self._staged_nbytes(slab) for slab in plan]
        useful_nbytes = sum(sizes) + max(sizes, default=0)  # one more: the arena's end may be too short for a slab
        if self.pool.lacks(useful_nbytes):
            self.drop_ahead()  # slabs read ahead are in the memory that a larger one replaces
        self.pool.reserve(useful_nbytes)
        flight: deque[Slab] = deque()  # slabs whose parts are being read, in the order of the step
        while plan or flight:
            while plan and len(flight) < _FLIGHT * self.offload.buffer_count and self._start(plan[0], wait=not flight):
                flight.append(plan.popleft())
            slab = flight.popleft()
            for pending in slab.reads:
                pending.wait()
            yield slab

    def _compute(self, slab: Slab) -> None:
        with self.tiers.streams.stepping(slab.end - slab.begin, sum(part.nbytes for part in slab.parts.values())):
            super()._compute(slab)

    @one_thread
    def read_ahead(self) -> None:
        """Read the next step's first slabs into free memory of the arena; never wait."""
        while self._next:
            slab = self._next[0]
            nbytes = self._staged_nbytes(slab)
            if not nbytes:
                self._next.popleft()  # stepped in place: nothing to read
                continue
            slab.buffer = self.pool.take(nbytes)
            if slab.buffer is None:
                return
            self._bring_states(slab)
            self._ahead.append(self._next.popleft())
            self._count_ahead(slab, 1)

    @one_thread
    def drop_ahead(self) -> None:
        """Drop the slabs that were read ahead: the caller is about to change the states, or will not step them next."""
        self._drop_first(len(self._ahead))
        self._next = deque()

    def _drop_first(self, count: int) -> None:
        """Drop the first `count` slabs that were read ahead."""
        for _ in range(count):
            slab = self._ahead.popleft()
            self._count_ahead(slab, -1)
            assert slab.buffer is not None
            self.pool.give(slab.buffer, _All(slab.reads))

    def _count_ahead(self, slab: Slab, sign: int) -> None:
        for copied, rest, _ in slab.staged:
            self.tiers.ledger.read_ahead(rest.tier, Tier.HOST, sign * copied.nbytes)

    @one_thread
    def give_back(self) -> None:
        """Free the arena's memory; the next step allocates it again."""
        self.drop_ahead()
        self.pool.give_back()

    @one_thread
    def close(self) -> None:
        """Drop all memory and end the threads."""
        self.drop_ahead()
        self.pool.close()
        self.team.close()

    def _start(self, slab: Slab, wait: bool) -> bool:
        """Start to read a slab's parts. Return False if the arena has no memory for them; with `wait`, wait for memory."""
        position = next((number for number, other in enumerate(self._ahead) if other.key == slab.key), None)
        if position is not None:
            self._drop_first(position)  # slabs ahead of this one in the queue belong to runs that are not stepped this time
            ready = self._ahead.popleft()
            self._count_ahead(ready, -1)
            slab.buffer, slab.used_nbytes = ready.buffer, ready.used_nbytes
            slab.parts, slab.staged, slab.reads = ready.parts, ready.staged, ready.reads
            self._renew_noise(slab)
        else:
            if nbytes := self._staged_nbytes(slab):
                slab.buffer = self.pool.take(nbytes)
                if slab.buffer is None and wait:  # no other slab is started
                    self.drop_ahead()  # slabs read ahead hold all memory, and are not needed now
                    self.pool.reserve(nbytes)  # a first step may make more states than were foreseen at its beginning
                    slab.buffer = self.pool.take(nbytes, wait=True)
                    if slab.buffer is None:
                        raise ZeroshardError(
                            f"host step: a slab of {nbytes:,} bytes does not fit the {self.pool.nbytes:,} bytes of buffers "
                            f"(at most {self.pool.limit_nbytes:,}); raise buffer_nbytes of offload_optimizer."
                        )
                if slab.buffer is None:
                    return False
            self._bring_states(slab)
        self._bring_gradient(slab)
        return True

    def _slabs(self, job: Job) -> Iterator[Slab]:
        """Yield the slabs of a run. A run without elements on this rank has one: its `step` must advance as on other ranks."""
        slab_numel, begin, stop = self.slab_numel(job), job.run.start, job.run.stop
        while True:
            # slabs begin at multiples of slab_numel of the shard (page boundaries), not of the run
            end = min(stop, (begin // slab_numel + 1) * slab_numel)
            yield Slab(job, begin, end)
            if end == stop:
                return
            begin = end

    def _away(self, job: Job) -> list[float]:
        """Return the bytes per element of each tensor that a step of this run copies through the arena."""
        group = job.run.group
        masters = group.masters.rest
        rests: list[Rest] = [group.masters.stepped, job.gradient, group.values.rest, *group.columns.values()]
        if isinstance(masters, SplitRest):
            rests[0] = masters.low
        resting = {id(rest): (rest.inner if isinstance(rest, CodedRest) else rest, rest) for rest in rests}
        away = [rest.nbytes / rest.numel for memory, rest in resting.values() if memory.view(0, 0) is None]
        if group.offload.tier is Tier.DISK and not group.columns:  # a first step: its states are not made yet
            kernel = self.kernel(job)
            # without a kernel the class is unknown: two states are foreseen, as Adam has
            names = kernel.columns if kernel is not None else ("", "")
            away += [
                column.nbytes(column.elements, group.masters.stepped.dtype) / column.elements
                for column in map(group.plan.column, names)
            ]
        return away

    def slab_numel(self, job: Job) -> int:
        """Return the elements of a slab: as many as fit buffer_nbytes, or the whole run if the host steps it in place."""
        away = self._away(job)
        if not away:
            return max(job.run.stop, 1)
        room = self.offload.buffer_nbytes - 2 * PAGE_NBYTES * len(away)  # `_bring` skips at most two pages for each tensor
        return max(int(room / sum(away)) // _SLAB_MULTIPLE, 1) * _SLAB_MULTIPLE

    def _staged_nbytes(self, slab: Slab) -> int:
        """Return the bytes that a slab needs in the arena; 0 if the host steps it in place."""
        away = self._away(slab.job)
        if not away or slab.end == slab.begin:
            return 0
        return min(math.ceil((slab.end - slab.begin) * sum(away)) + 2 * PAGE_NBYTES * len(away), self.offload.buffer_nbytes)

    # -- moving ----------------------------------------------------------------------------------------------

    def _place(self, slab: Slab, rest: Rest, start: int, stop: int, *, read: bool, write: bool) -> Tensor:
        numel, itemsize = stop - start, rest.dtype.itemsize
        view = rest.view(start, stop)
        if not numel:
            return torch.empty(0, dtype=rest.dtype, device="cpu")
        if view is not None:
            return view
        begin = round_up(slab.used_nbytes, PAGE_NBYTES)
        if not isinstance(rest, MemoryRest):
            begin += start * itemsize % PAGE_NBYTES  # the offset within a page in the file: O_DIRECT needs no copy
        end = begin + numel * itemsize
        if slab.buffer is None or end > slab.buffer.numel():  # a first step may make more states than `_away` foresaw
            place = torch.empty(numel, dtype=rest.dtype, device="cpu")
        else:
            slab.used_nbytes, place = end, slab.buffer[begin:end].view(rest.dtype)
        if write:
            slab.staged.append((place, rest, start))
        if read:
            slab.reads.append(rest.read(start, place))
        return place

    def _write_back(self, slab: Slab) -> None:
        writes = []
        for copied, rest, start in slab.staged:
            writes.append(rest.write(start, copied))
            if rest.tier is Tier.DEVICE:
                self._uploads.append(writes[-1])
        if slab.buffer is not None:
            self.pool.give(slab.buffer, _All(writes))
        slab.parts, slab.buffer = {}, None


class DelayedStep(DelayedUpdate):
    """Runs a HostStepper in a thread, one step at a time.

    Threads: the rank's own thread calls all methods. From `start` to the end of `wait`, only the step's thread uses the stepper,
    the masters, the states and the gradients of the jobs. It never uses the Comm: `wait`, on the rank's own thread, reports a
    failure to the peers.
    """

    def __init__(self, host: HostStepper) -> None:
        self.host = host
        self.unpublished: list[Job] = []  # jobs stepped, or being stepped, whose parameters are not written yet
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.ticket: object = None  # in a dry run, in place of the thread

    def start(self, jobs: list[Job]) -> None:
        """Step the jobs in the background. The caller publishes the result (`take`) before it calls `start` again."""
        assert self._thread is None and not self.unpublished
        self.unpublished = jobs
        num_threads = torch.get_num_threads()

        def body() -> None:
            torch.set_num_threads(num_threads)  # OpenMP keeps the number per thread
            try:
                with torch.no_grad(), self.host.tiers.beside_comm():
                    self.host.step(jobs)
            except BaseException as error:
                self._error = error

        if self.host.tiers.one_thread:
            self.ticket = self.host.tiers.streams.run_beside(lambda: self.host.step(jobs))[1]
            return
        self._thread = threading.Thread(target=body, name="zeroshard-delayed-step", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """True while masters and states belong to the step's thread."""
        return self._thread is not None

    def wait(self) -> None:
        """Wait until the running step is done. If it failed, every call raises its error, since masters are then half stepped."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.ticket is not None:
            self.host.tiers.streams.join(self.ticket)
        self.host.tiers.check()  # raises an I/O error of the step, and reports it to the peers
        if self._error is not None:
            raise self._error

    def take(self) -> list[Job]:
        """Wait for the running step; return its jobs, whose masters the caller must now write into the parameters."""
        self.wait()
        jobs, self.unpublished = self.unpublished, []
        return jobs
