"""The host's step over offloaded states, slab by slab (ZeRO-Offload, arXiv 2101.06840, 5.1; ZeRO-Infinity, 2104.07857, 5.2.2).

    read    | s2 | s3 | s4 |             a slab: a stretch of one run, of at most buffer_nbytes
    step    | s1 | s2 | s3 | s4          master weights, gradient and states, in chunks that stay in cache
    write   |    | s1 | s2 | s3 | s4     states that rest on the host are stepped in place and need no buffer

Slabs pass through one arena of constant size. At the end of a step, `poll` reads the first slabs of the next step into
the arena's free memory, so that the disk also works while forward and backward run.

The arithmetic is that of the optimizer's own class, run on chunks (equal in bits to a step without offload), or torch's
fused kernels (optim/cpu_kernels.py).

In a delayed update (`DelayedStep`; ZeRO-Offload, section 4.3) the step overlaps with the next forward and backward:

    device  | F1 B1 | F2 B2 | F3 B3 |            forward 3 uses the parameters of step 1
    host            | step 1 | step 2 |          a thread, which alone uses masters and states while it runs

Gradients that rest as shards are not copied for it: a group then has two resting places, and while the step reads one of
them, backward writes into the other (zero/flat_buffer.py:hand_over).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..comm.pool import Arena
from ..config import Offload, Tier
from ..errors import ZeroshardError
from ..offload.storage import PAGE_NBYTES, MemoryRest, Rest, Tiers
from ..tensor.flat_layout import round_up
from ..tensor.state_column import is_column
from ..utils import torch_compat
from ..utils.one_thread import Turn, one_thread
from ..utils.work import Work
from .cpu_kernels import CHUNK_NUMEL, Kernel, Team, host_threads, kernel_for, step_stretch, stepping_threads
from .inner_optimizer import Options, State, fresh
from .segments import Run
from .state_storage import ColumnStates

_STEPPED, _GRADIENT, _VALUES = "(stepped)", "(gradient)", "(values)"  # names of the parts of a slab that are not states
_CLASS_CHUNK_NUMEL = 1 << 18  # for an optimizer's own class, whose step has an overhead of some 0.15 ms
_FLIGHT = 4  # most slabs started ahead, per buffer: a limit for slabs in place, which no lack of memory holds back
_SLAB_MULTIPLE = 4096  # elements: slabs begin at page boundaries in any dtype


@dataclass(eq=False)
class Job:
    """The host's step of one run.

    options: of the run's parameter group; attributes: the numbers that the optimizer's class keeps on itself; both as they were
    before the step. gradient: where the gradient rests, not yet multiplied by `factor`. publish: also write the parameters.
    names, scalars: of the run's states after the step (names None: no chunk of a first step has been computed).
    """

    run: Run
    options: Options
    attributes: Options
    gradient: Rest
    factor: float = 1.0
    publish: bool = True
    names: list[str] | None = None
    scalars: State = field(default_factory=dict)

    @property
    def states(self) -> ColumnStates:
        assert isinstance(self.run.states, ColumnStates)
        return self.run.states

    @property
    def fresh(self) -> bool:
        """True in the first step of the run."""
        return self.states.names is None


@dataclass(eq=False)
class Slab:
    """Elements [begin, end) of a shard, all in one run.

    parts: by name, the tensors that the step uses: views of memory where they rest, or copies in `buffer`. staged: for each
    copy that the step changes, the Rest to which it must be written back.
    """

    job: Job
    begin: int
    end: int
    buffer: Tensor | None = None
    used_nbytes: int = 0
    parts: dict[str, Tensor] = field(default_factory=dict)
    staged: dict[str, Rest] = field(default_factory=dict)
    reads: list[Work] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int, int]:
        """Key by which a slab of this step is found among those that the last step has read ahead."""
        return id(self.job.run), self.begin, self.end


class _All(Work):
    """Several moves as one `Work`."""

    def __init__(self, parts: list[Work]) -> None:
        self.parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def wait(self) -> None:
        for part in self.parts:
            part.wait()


class HostStepper:
    """Steps the runs whose states rest on the host or on disk.

    Threads: one at a time, else ThreadsMet is raised: the rank's own thread or, during a delayed step, the thread of that step.
    zero/write_gate.py calls `DelayedStep.wait` before the rank's own thread uses the stepper again.
    """

    def __init__(self, inner: torch.optim.Optimizer, offload: Offload, tiers: Tiers, fused: bool) -> None:
        self.inner, self.offload, self.tiers, self.fused = inner, offload, tiers, fused
        self.turn = Turn("the host's step of offloaded states")
        pin = offload.pin_memory
        limit_nbytes = offload.buffer_count * offload.buffer_nbytes
        self.pool = Arena(tiers.ledger, limit_nbytes, PAGE_NBYTES, lambda n: tiers.host_buffer(n, pin), Tier.HOST, self.turn)
        self._ahead: deque[Slab] = deque()  # slabs that are read ahead for the next step
        self._next: deque[Slab] = deque()  # the next step's slabs that are not read yet
        self._uploads: list[Work] = []  # copies to the device in this step
        # a rank that computes on a GPU lets the host's step use its share of the cores, whatever OMP_NUM_THREADS is
        self.threads = host_threads() if tiers.separate else torch.get_num_threads()
        self.scratch = torch.empty(CHUNK_NUMEL * self.threads, device="cpu")
        self.team = Team(1 if tiers.comm.imagined else self.threads)  # fake tensors belong to one thread

    # -- the pipeline ----------------------------------------------------------------------------------------

    @one_thread
    def step(self, jobs: list[Job]) -> None:
        """Step all jobs, in this order. Writes to disk may still be running when it returns."""
        with stepping_threads(self.threads):
            plan = deque(slab for job in jobs for slab in self._slabs(job))
            following = [(slab.job, slab.begin, slab.end) for slab in plan]
            sizes = [self._staged_nbytes(slab) for slab in plan]
            useful_nbytes = sum(sizes) + max(sizes, default=0)  # one more: the arena's end may be too short for a slab
            if self.pool.lacks(useful_nbytes):
                self.forget()  # slabs read ahead are in the memory that a larger one replaces
            self.pool.reserve(useful_nbytes)
            flight: deque[Slab] = deque()  # slabs whose parts are being read, in the order of the step
            while plan or flight:
                while plan and len(flight) < _FLIGHT * self.offload.buffer_count and self._start(plan[0], wait=not flight):
                    flight.append(plan.popleft())
                slab = flight.popleft()
                for pending in slab.reads:
                    pending.wait()
                with self.tiers.streams.stepping(slab.end - slab.begin, sum(part.nbytes for part in slab.parts.values())):
                    self._compute(slab)
                self._write_back(slab)
            for upload in self._uploads:
                upload.join()  # the device computes next with the new parameters
            self._uploads = []
            for job in jobs:
                job.states.names, job.states.scalars = job.names or [], job.scalars
            self.forget()
            self._next = deque(Slab(*slab) for slab in following)  # the next step is expected to step the same runs
        self.poll()

    @one_thread
    def poll(self) -> None:
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
            self._read_states(slab)
            self._ahead.append(self._next.popleft())
            self._count_ahead(slab, 1)

    @one_thread
    def forget(self) -> None:
        """Drop the slabs that were read ahead: the caller is about to change the states, or will not step them next."""
        self._drop_ahead(len(self._ahead))
        self._next = deque()

    def _drop_ahead(self, count: int) -> None:
        for _ in range(count):
            slab = self._ahead.popleft()
            self._count_ahead(slab, -1)
            assert slab.buffer is not None
            self.pool.give(slab.buffer, _All(slab.reads))

    def _count_ahead(self, slab: Slab, sign: int) -> None:
        for rest in slab.staged.values():
            self.tiers.ledger.read_ahead(rest.tier, Tier.HOST, sign * rest.nbytes_of(slab.end - slab.begin))

    @one_thread
    def give_back(self) -> None:
        """Free the arena's memory; the next step allocates it again."""
        self.forget()
        self.pool.give_back()

    @one_thread
    def close(self) -> None:
        """Drop all memory and end the threads."""
        self.forget()
        self.pool.close()
        self.team.close()

    def _start(self, slab: Slab, wait: bool) -> bool:
        """Start to read a slab's parts. Return False if the arena has no memory for them; with `wait`, wait for memory."""
        position = next((number for number, other in enumerate(self._ahead) if other.key == slab.key), None)
        if position is not None:
            self._drop_ahead(position)  # slabs ahead of this one in the queue belong to runs that are not stepped this time
            ready = self._ahead.popleft()
            self._count_ahead(ready, -1)
            slab.buffer, slab.used_nbytes = ready.buffer, ready.used_nbytes
            slab.parts, slab.staged, slab.reads = ready.parts, ready.staged, ready.reads
        else:
            if nbytes := self._staged_nbytes(slab):
                slab.buffer = self.pool.take(nbytes)
                if slab.buffer is None and wait:  # no other slab is started
                    self.forget()  # slabs read ahead hold all memory, and are not needed now
                    self.pool.reserve(nbytes)  # a first step may make more states than were foreseen at its beginning
                    slab.buffer = self.pool.take(nbytes, wait=True)
                    if slab.buffer is None:
                        raise ZeroshardError(
                            f"host step: a slab of {nbytes:,} bytes does not fit the {self.pool.nbytes:,} bytes of buffers "
                            f"(at most {self.pool.limit_nbytes:,}); raise buffer_nbytes of offload_optimizer."
                        )
                if slab.buffer is None:
                    return False
            self._read_states(slab)
        self._bring(slab, _GRADIENT, slab.job.gradient, read=True, write=False)
        values = slab.job.run.group.values.rest
        if slab.job.publish and values is not slab.job.run.group.masters.stepped:
            self._bring(slab, _VALUES, values, read=False, write=True)
        return True

    def _slabs(self, job: Job) -> Iterator[Slab]:
        """Yield the slabs of a run: one for a run without elements, which has a step count that every rank shows."""
        slab_numel, begin, stop = self.slab_numel(job), job.run.start, job.run.stop
        while True:
            # slabs begin at multiples of slab_numel of the shard (page boundaries), not of the run
            end = min(stop, (begin // slab_numel + 1) * slab_numel)
            yield Slab(job, begin, end)
            if end == stop:
                return
            begin = end

    def _away(self, job: Job) -> list[int]:
        """Return the bytes per element of each tensor that a step of this run copies through the arena."""
        group = job.run.group
        rests = [group.masters.stepped, job.gradient, group.values.rest, *group.columns.values()]
        away = [r.dtype.itemsize for r in {id(r): r for r in rests}.values() if r.view(0, 0) is None]
        staged = group.offload.tier is Tier.DISK or job.states.declared
        if staged and not group.columns:  # a first step: its states are not made yet
            kernel = self.kernel(job)
            # without a kernel the class is unknown: two states are foreseen, as Adam has
            away += [group.masters.stepped.dtype.itemsize] * (len(kernel.columns) if kernel is not None else 2)
        return away

    def slab_numel(self, job: Job) -> int:
        """Return the elements of a slab: as many as fit buffer_nbytes, or the whole run if the host steps it in place."""
        away = self._away(job)
        if not away:
            return max(job.run.stop, 1)
        room = self.offload.buffer_nbytes - 2 * PAGE_NBYTES * len(away)  # `_bring` skips at most two pages for each tensor
        return max(room // sum(away) // _SLAB_MULTIPLE, 1) * _SLAB_MULTIPLE

    def _staged_nbytes(self, slab: Slab) -> int:
        """Return the bytes that a slab needs in the arena; 0 if the host steps it in place."""
        away = self._away(slab.job)
        if not away or slab.end == slab.begin:
            return 0
        return min((slab.end - slab.begin) * sum(away) + 2 * PAGE_NBYTES * len(away), self.offload.buffer_nbytes)

    # -- moving ----------------------------------------------------------------------------------------------

    def _read_states(self, slab: Slab) -> None:
        group = slab.job.run.group
        self._bring(slab, _STEPPED, group.masters.stepped, read=True, write=True)
        for name in slab.job.states.names or ():
            self._bring(slab, name, group.columns[name], read=True, write=True)

    def _bring(self, slab: Slab, name: str, rest: Rest, *, read: bool, write: bool) -> None:
        """Add a Rest's elements [begin, end) to the slab's parts: a view of the memory at rest, or a copy in its buffer."""
        numel, itemsize = slab.end - slab.begin, rest.dtype.itemsize
        view = rest.view(slab.begin, slab.end)
        if not numel:
            view = torch.empty(0, dtype=rest.dtype, device="cpu")
        if view is None:
            start = round_up(slab.used_nbytes, PAGE_NBYTES)
            if not isinstance(rest, MemoryRest):
                start += slab.begin * itemsize % PAGE_NBYTES  # the offset within a page in the file: O_DIRECT needs no copy
            stop = start + numel * itemsize
            if slab.buffer is None or stop > slab.buffer.numel():  # a first step may make more states than `_away` foresaw
                view = torch.empty(numel, dtype=rest.dtype, device="cpu")
            else:
                slab.used_nbytes, view = stop, slab.buffer[start:stop].view(rest.dtype)
            if write:
                slab.staged[name] = rest
            if read:
                slab.reads.append(rest.read(slab.begin, view))
        slab.parts[name] = view

    def _write_back(self, slab: Slab) -> None:
        writes = []
        for name, rest in slab.staged.items():
            writes.append(rest.write(slab.begin, slab.parts[name]))
            if rest.tier is Tier.DEVICE:
                self._uploads.append(writes[-1])
        if slab.buffer is not None:
            self.pool.give(slab.buffer, _All(writes))
        slab.parts, slab.buffer = {}, None

    # -- arithmetic ------------------------------------------------------------------------------------------

    def kernel(self, job: Job) -> Kernel | None:
        """Return the fused kernel that steps a run; None: the optimizer's own class steps it."""
        if not self.fused or job.run.group.masters.stepped.dtype != torch.float32:
            return None
        return kernel_for(self.inner, job.options)

    def _compute(self, slab: Slab) -> None:
        """Step one slab with a kernel, or chunk by chunk with the optimizer's own class."""
        job, kernel = slab.job, self.kernel(slab.job)
        param, grad, out = slab.parts[_STEPPED], slab.parts[_GRADIENT], slab.parts.get(_VALUES)
        state: State = {}
        if kernel is not None:
            scalars = fresh(job.states.scalars)  # every slab of a step begins with the same counters
            if job.fresh:
                scalars |= self._create(slab, kernel)
            names = kernel.columns if job.fresh else job.states.names
            state = {**scalars, **{name: slab.parts[name] for name in names or ()}}
            # on imagined ranks nothing is computed
            chunk = round_up(max(param.numel(), 1), CHUNK_NUMEL) if self.tiers.comm.imagined else None
            step_stretch(
                kernel,
                param,
                grad,
                state,
                job.options,
                scale=job.factor,
                out=out,
                scratch=self.scratch,
                team=self.team,
                chunk=chunk,
            )
            self._take_states(slab, 0, param, state)
        else:
            numel = max(param.numel(), 1)
            chunk = round_up(numel, CHUNK_NUMEL) if self.tiers.comm.imagined else _CLASS_CHUNK_NUMEL
            for start in range(0, numel, chunk):
                part = slice(start, start + chunk)
                state = {}
                if not job.fresh:
                    state = fresh(job.states.scalars) | {name: slab.parts[name][part] for name in job.states.names or ()}
                state = self._step_class(job, param[part], grad[part], state)
                self._take_states(slab, start, param[part], state)
            if out is not None:
                out.copy_(param)
        job.names = [name for name in state if name in slab.parts]
        job.scalars = {name: value for name, value in state.items() if name not in slab.parts}

    def _create(self, slab: Slab, kernel: Kernel) -> State:
        """Create the states of a first step in the slab; return the scalars."""
        for name in kernel.columns:
            self._bring(slab, name, slab.job.states.column(name, torch.float32), read=False, write=True)
        param, scalars = slab.parts[_STEPPED], {}
        numel = max(param.numel(), 1)
        chunk = round_up(numel, CHUNK_NUMEL) if self.tiers.comm.imagined else CHUNK_NUMEL
        for start in range(0, numel, chunk):
            part = slice(start, start + chunk)
            created = kernel.create(param[part])
            for name in kernel.columns:
                slab.parts[name][part].copy_(created.pop(name))
            scalars = created
        return scalars

    def _step_class(self, job: Job, param: Tensor, grad: Tensor, state: State) -> State:
        """Step a chunk with the optimizer's own class; return the states afterwards."""
        leaf = nn.Parameter(param)
        leaf.grad = grad.to(param.dtype) if job.factor == 1.0 else grad.to(param.dtype) * job.factor
        vars(self.inner).update(fresh(job.attributes))
        self.inner.param_groups = [{**fresh(job.options), "params": [leaf]}]
        self.inner.state = defaultdict(dict, {leaf: state} if state else {})
        self.inner.step()
        return self.inner.state[leaf]

    def _take_states(self, slab: Slab, start: int, param: Tensor, state: State) -> None:
        """Copy the states that the optimizer's class has made or replaced into the slab's parts."""
        for name, value in state.items():
            if not is_column(value, tuple(param.shape)):
                continue
            if name not in slab.parts:
                self._bring(slab, name, slab.job.states.column(name, value.dtype), read=False, write=True)
            place = slab.parts[name][start : start + param.numel()]
            # a state that the class has updated in place is there already
            if torch_compat.storage_id(place.untyped_storage()) != torch_compat.storage_id(value.untyped_storage()):
                place.copy_(value)


class DelayedStep:
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

        if self.host.tiers.comm.imagined:  # fake tensors belong to one thread
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
