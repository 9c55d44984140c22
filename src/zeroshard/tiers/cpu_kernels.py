"""Optimizer steps on the host at the speed of memory, without a compiler: torch's fused kernels on chunks that stay in the cache.

A mixed-precision update reads a 16-bit gradient and writes a 16-bit parameter beside the fp32 master and states. On
whole tensors each cast is a further pass through memory (40 bytes per parameter for Adam); in chunks the fp32
gradient never leaves the cache (28 bytes per parameter):

    gradient (bf16) --copy--> scratch (fp32) --fused step--> master, states (fp32) --copy--> parameter (bf16)
                              |____ one chunk of CHUNK_NUMEL parameters: 20 bytes each for Adam ____|

Words: a *stretch* is a contiguous tensor (n,) that one optimizer group steps; a *column* is a state as large as the
stretch (exp_avg, sum, ...); all other entries of a state (`step`) are *counters*, one number per stretch. A *chunk* is a
part of a stretch that starts at a multiple of CHUNK_ALIGNMENT.

Bits: kernels run the code that torch runs for `fused=True`. Chunks give the same bits as the whole stretch: since chunks
start at multiples of CHUNK_ALIGNMENT, torch's vectorised loops, and the scalar tail after them (which rounds
differently), process the same elements. `matches` returns whether an optimizer's own step gives the kernel's bits: it
does with fused=True, and for zs.Lion; torch's default (foreach) computes the same formula with other roundings.

Everything here runs under the caller's `torch.no_grad()`, on the calling thread unless a `Team` of threads is given.
`zeroshard bench --sections hostadam` measures it.
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from ..engine.flat_layout import round_up
from ..engine.inner_optimizer import Options, State
from ..utils import torch_compat
from ..utils.host import cache_nbytes, ranks_here
from .stretch import Stretch


def _chunk_for(second_nbytes: int | None, third_nbytes: int | None) -> int:
    """Return the parameters per chunk and thread, from the sizes of a core's level-2 cache and of the level-3 cache.

    Adam touches 20 bytes of cache per parameter. Measured with one thread and 2 MB of level 2 (docs/log.md): 2^16 (1.3 MB) is
    fastest; 2^14 takes 21% more time (overhead of calls), 2^15 5%, 2^17 1%, 2^18 4%, 2^19 8%. With 1 MB of level 2 and 32 MB of
    level 3, 2^18 takes 26% less time than 2^16.
    """
    if second_nbytes is None or third_nbytes is None or second_nbytes >= 20 << 16:
        return 1 << 16
    return 1 << 18 if third_nbytes >= 4 * (20 << 18) else 1 << 17


CHUNK_NUMEL = _chunk_for(cache_nbytes(2), cache_nbytes(3))
# larger chunks for a team, whose threads also wait for Python's lock: 2^17 takes 103 ms, 2^16 takes 120
TEAM_CHUNK_NUMEL = max(CHUNK_NUMEL, 1 << 17)
# of stretches that are opened and closed: some 50 operators take 0.1 ms a chunk, which in one of 2^16 would be 1.4 ns a parameter
CODED_CHUNK_NUMEL = 1 << 18
CHUNK_ALIGNMENT = 32  # elements: two AVX-512 registers, the widest step of torch's vectorised loops


# -- kernels -----------------------------------------------------------------------------------------------------


class Kernel(ABC):
    """Update of one optimizer class for a stretch, in place: `prepare`, `count`, then `update` for each of its chunks.

    columns: names of states as large as the parameter, in the order in which torch's own step creates them.
    passes: number of times that `update` walks over its tensors; with 1, a whole stretch is as fast as its chunks.

    state: the columns, each (n,), and the counters. As in torch, `step` (0-dim, fp32) is incremented in place.
    options: the param_group as it is now. After a change of amsgrad, or of momentum to or from 0, get a new kernel from
    `kernel_for`, since the optimizer then has other columns.
    """

    columns: tuple[str, ...]
    passes = 1

    def create(self, param: Tensor) -> State:
        """Return the state with which the optimizer's own first step starts: counters, and columns like `param`."""
        return {name: torch.zeros_like(param, requires_grad=False) for name in self.columns}

    def prepare(self, param: Tensor | Stretch, grad: Tensor, state: State) -> None:
        """Create missing columns; assert lengths, dtypes and strides, since the fused kernels take addresses."""
        numel = param.numel()
        if any(state.get(name) is None for name in self.columns):
            for name, value in self.create(torch.empty(numel, device="cpu") if isinstance(param, Stretch) else param).items():
                if state.get(name) is None:
                    state[name] = value
        for tensor in (param, *(state[name] for name in self.columns)):
            assert tensor.numel() == numel
            assert isinstance(tensor, Stretch) or (tensor.dtype is torch.float32 and tensor.is_contiguous())
        assert grad.numel() == numel and grad.is_contiguous()

    def count(self, state: State) -> object:
        """Count one step in the counters, which all chunks share; return the value that `update` takes as `count`."""
        return state["step"].add_(1)

    @abstractmethod
    def update(self, param: Tensor, grad: Tensor, columns: Sequence[Tensor], count: Any, options: Options) -> None:
        """Compute one step of a chunk, without checks of the tensors. Threads may update different chunks at the same time."""


def _number(value: float | Tensor) -> float:
    """Return a hyperparameter as a number, as torch's fused CPU kernels need it."""
    return value.item() if isinstance(value, Tensor) else value


class _Adam(Kernel):
    """Kernel of Adam and AdamW. amsgrad has a third column."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self.columns = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if options["amsgrad"] else ())
        decoupled = isinstance(optimizer, torch.optim.AdamW) or options.get("decoupled_weight_decay", False)
        self._fused = torch_compat.fused_adamw_ if decoupled else torch_compat.fused_adam_

    def update(self, param: Tensor, grad: Tensor, columns: Sequence[Tensor], count: Tensor, options: Options) -> None:
        beta1, beta2 = options["betas"]
        self._fused(
            [param], [grad], list(columns[:1]), list(columns[1:2]), list(columns[2:]), [count],
            lr=_number(options["lr"]), beta1=_number(beta1), beta2=_number(beta2), weight_decay=options["weight_decay"],
            eps=options["eps"], amsgrad=len(columns) == 3, maximize=options["maximize"],
        )  # fmt: skip

    def create(self, param: Tensor) -> State:
        return {"step": torch.zeros((), dtype=torch.float32, device="cpu")} | super().create(param)


class _SGD(Kernel):
    """Kernel of SGD. With momentum, the first step stores the gradient itself, without dampening, whatever the buffer holds.

    The counter "fresh" (True) marks a buffer that no step has written yet; the first step removes it. torch marks this by the
    absence of the buffer, which is accepted as well.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self.columns = ("momentum_buffer",) if options["momentum"] != 0 else ()

    def count(self, state: State) -> bool:
        return bool(state.pop("fresh", False))

    def update(self, param: Tensor, grad: Tensor, columns: Sequence[Tensor], count: bool, options: Options) -> None:
        torch_compat.fused_sgd_(
            [param], [grad], list(columns),
            lr=_number(options["lr"]), momentum=options["momentum"], dampening=options["dampening"],
            weight_decay=_number(options["weight_decay"]), nesterov=options["nesterov"], maximize=options["maximize"],
            is_first_step=count,
        )  # fmt: skip

    def create(self, param: Tensor) -> State:
        return super().create(param) | ({"fresh": True} if self.columns else {})


class _Adagrad(Kernel):
    """Kernel of Adagrad. As in torch, the accumulator starts from the constructor's value; the group's option is not read."""

    columns = ("sum",)

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self._initial = optimizer.defaults["initial_accumulator_value"]

    def update(self, param: Tensor, grad: Tensor, columns: Sequence[Tensor], count: Tensor, options: Options) -> None:
        torch_compat.fused_adagrad_(
            [param], [grad], list(columns), [count],
            lr=_number(options["lr"]), lr_decay=options["lr_decay"], weight_decay=options["weight_decay"], eps=options["eps"],
            maximize=options["maximize"],
        )  # fmt: skip

    def create(self, param: Tensor) -> State:
        full = torch.full_like(param, self._initial, requires_grad=False)
        return {"step": torch.zeros((), dtype=torch.float32, device="cpu"), "sum": full}


_KERNELS: dict[type, Callable[[torch.optim.Optimizer, Options], Kernel]] = {
    torch.optim.Adam: _Adam,
    torch.optim.AdamW: _Adam,
    torch.optim.SGD: _SGD,
    torch.optim.Adagrad: _Adagrad,
}


_EXACT: set[type] = set()  # classes whose own step computes the bits of their kernel, whatever their options


def register(cls: type, kernel: Callable[[torch.optim.Optimizer, Options], Kernel]) -> None:
    """Give an optimizer's class a kernel that computes the same bits as its own step."""
    _KERNELS[cls] = kernel
    _EXACT.add(cls)


def kernel_for(optimizer: torch.optim.Optimizer, options: Options) -> Kernel | None:
    """Return the kernel that computes this optimizer's step with the given options (a param_group).

    Return None for a class without a kernel, a subclass with a step of its own, and a step that autograd records; the caller
    then runs the optimizer's own class on chunks.
    """
    cls = type(optimizer)
    known = next((base for base in cls.__mro__ if base in _KERNELS), None)
    if known is None:
        return None
    for name in torch_compat.STEP_METHODS:
        own, theirs = getattr(cls, name, None), getattr(known, name, None)
        # torch.optim wraps `step` again in each class of which an optimizer is built
        if own is not theirs and (own is None or theirs is None or unwrap(own) is not unwrap(theirs)):
            return None
    recorded = any(isinstance(value, Tensor) and value.requires_grad for value in options.values())
    return None if options.get("differentiable") or recorded else _KERNELS[known](optimizer, options)


def matches(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's own step gives the kernel's bits in all its groups.

    True for zs.Lion and for fused=True; other optimizers that have a kernel compute the same formula with other last bits.
    """
    return all(
        kernel_for(optimizer, group) is not None and (isinstance(optimizer, tuple(_EXACT)) or group.get("fused") is True)
        for group in optimizer.param_groups
    )


# -- chunks ------------------------------------------------------------------------------------------------------


def step_stretch(
    kernel: Kernel,
    master: Tensor | Stretch,  # (n,) fp32
    grad: Tensor,  # (n,) bf16, fp16 or fp32; not changed
    state: State,  # columns may be Stretches
    options: Options,
    *,
    scale: float = 1.0,
    out: Tensor | None = None,  # (n,) the parameter in its own precision
    scratch: Tensor | None = None,  # (chunk,) fp32, for the calling thread; allocated where missing or too short
    team: Team | None = None,  # None: torch's threads on one chunk at a time
    chunk: int | None = None,  # elements per chunk
) -> None:
    """Compute master <- kernel(master, grad * scale), out <- master, chunk by chunk. The product is rounded in fp32.

    Counters count one step; missing columns are created.
    """
    numel = master.numel()
    threads = 1 if team is None else team.threads
    kernel.prepare(master, grad, state)
    rests = [isinstance(each, Stretch) for each in (master, *(state[name] for name in kernel.columns))]
    opens = any(rests)
    if chunk is None and opens:
        chunk = CODED_CHUNK_NUMEL * (torch.get_num_threads() if team is None else 1)
    elif chunk is None and team is None:
        chunk = CHUNK_NUMEL * torch.get_num_threads()
    elif chunk is None:
        chunk = CHUNK_NUMEL if threads == 1 else TEAM_CHUNK_NUMEL
    assert chunk % CHUNK_ALIGNMENT == 0, f"expected a multiple of {CHUNK_ALIGNMENT} elements, got {chunk}"
    assert out is None or out.numel() == numel
    narrow = grad.dtype is not torch.float32
    casts = narrow or scale != 1.0
    if kernel.passes == 1 and not casts and not opens and out is None:
        chunk = max(chunk, round_up(-(-numel // threads), CHUNK_ALIGNMENT))  # no chunk would be read a second time
    count = kernel.count(state)
    outs = itertools.repeat(None) if out is None else out.split(chunk)  # endless, hence strict=False below
    columns = (
        zip(*(state[name].split(chunk) for name in kernel.columns), strict=False) if kernel.columns else itertools.repeat(())
    )
    parts = deque(zip(master.split(chunk), grad.split(chunk), outs, columns, strict=False))  # popleft is atomic: no lock

    def work(scratch: Tensor | None = None) -> None:
        if casts and (scratch is None or scratch.numel() < min(chunk, numel)):
            scratch = torch.empty(min(chunk, numel), device="cpu")
        while True:
            try:
                part, part_grad, part_out, part_columns = parts.popleft()
            except IndexError:
                return
            if scratch is not None and casts:
                given, part_grad = part_grad, scratch[: part_grad.numel()]
                if narrow:
                    part_grad.copy_(given)  # torch.mul with out= would round the product to the gradient's precision first
                    given = part_grad
                if scale != 1.0:
                    torch.mul(given, scale, out=part_grad)
            resting = (part, *part_columns)
            opened = [each.open() if closed else each for each, closed in zip(resting, rests, strict=True)]
            kernel.update(opened[0], part_grad, opened[1:], count, options)
            if part_out is not None:
                part_out.copy_(opened[0])
            for each, stepped, closed in zip(resting, opened, rests, strict=True):
                if closed:
                    each.close(stepped)

    if team is None or threads == 1 or len(parts) == 1:
        work(scratch)
    else:
        team.run(work)


# -- threads -----------------------------------------------------------------------------------------------------


class Team:
    """Threads that share the chunks of a stretch: the calling thread and `threads - 1` helpers, until `close`.

    Each thread runs torch's operators single-threaded, and takes the next chunk when it is done with one. torch's intra-op
    threads instead synchronise after every operator, three times per chunk. That is as fast on a quiet machine, but where
    other programs run on the same cores, all threads wait whenever one of them is not scheduled (a step took 2.2 s instead of
    0.19 s, docs/log.md). Only the thread that uses the HostStepper calls `run`.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._helpers: ThreadPoolExecutor | None = None
        if threads > 1:
            self._helpers = ThreadPoolExecutor(threads - 1, "host-step", torch.set_num_threads, (1,))

    def run(self, work: Callable[[], None]) -> None:
        """Run work() on every thread, without autograd; when all are done, return or raise the first error."""
        helper = torch.no_grad()(work)  # grad mode is per thread
        with stepping_threads(1):  # first: a helper's initializer also sets the number of threads new to torch; leaving resets it
            helpers = [self._helpers.submit(helper) for _ in range(self.threads - 1)] if self._helpers else []
            try:
                work()
            finally:
                wait(helpers)
        for future in helpers:
            future.result()

    def close(self) -> None:
        """End the helper threads."""
        if self._helpers is not None:
            self._helpers.shutdown()


def visible_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_threads() -> int:
    """Return the threads for one rank's host step: the cores visible to the process, divided by the ranks of this machine.

    OMP_NUM_THREADS is not read: launchers set it to 1, which suits a rank that computes on a GPU but would leave most cores idle
    during the host's step.
    """
    return max(1, visible_cores() // ranks_here(1))


@contextmanager
def stepping_threads(threads: int) -> Iterator[None]:
    """Context in which torch's operators, called on this thread, use `threads` threads; it restores the earlier number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_threads(threads: int) -> str:
    """Return the number of threads and cores in words, for the line that a run prints at its start."""
    cores = visible_cores()
    return f"{threads} thread{'s' * (threads > 1)} a rank, {cores} core{'s' * (cores > 1)}"
