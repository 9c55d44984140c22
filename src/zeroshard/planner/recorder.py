"""The recorder: a trace of what an imagined rank does, and all memory that it holds, moment by moment.

    operators      dispatched one by one on fake tensors: flops, bytes, new storages      -> computation, activations
    collectives    FakeComm and tensor parallelism's functional ones                      -> tasks on links
    copies, files  ImaginedStreams, ImaginedRest                                          -> tasks between tiers
    the ledger     what the library holds, by category and tier

Computation between two of the others is one task. What is alive and was not claimed for a ledger's entry counts as activations:
whatever computation holds, temporaries among them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..comm.base import Sent
from ..comm.fake import Ticket, Watcher
from ..config import PRECISIONS, Tier
from ..memory.host_memory import KEEP_NBYTES, MMAP_NBYTES
from ..memory.ledger import Ledger, listener
from ..parallel.traffic import ring_nbytes
from ..simulator.trace import Resource, Task, Trace
from ..tensor.sharded_tensor import ShardedTensor
from .faults import check_dtypes
from .plan import ACTIVATIONS, Held, Moment

_LINKS = {
    (Tier.DEVICE, Tier.HOST): Resource.DOWN, (Tier.HOST, Tier.DEVICE): Resource.UP,
    (Tier.DISK, Tier.HOST): Resource.READ, (Tier.HOST, Tier.DISK): Resource.WRITE,
}  # fmt: skip
_ROUNDED = 512  # bytes: blocks of torch's caching allocators
_FLOPS = {  # of operators that torch's table lacks
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape),
    "_scaled_dot_product_flash_attention_for_cpu_backward":
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape),
}  # fmt: skip
_OVERWRITE = ("copy_", "zero_", "fill_", "normal_", "uniform_")  # do not read what they write to
_NAMES = {dtype: name for name, dtype in PRECISIONS.items()}


class Recorder(Watcher):
    """Writes one trace; `begin` starts it anew. phase, unit: where the rank is, told by who drives it."""

    def __init__(self, separate: bool = True) -> None:
        """separate: the device has a memory of its own; else the fullest moment is that of device and host together."""
        self._memories = ((Tier.DEVICE,), (Tier.HOST,), (Tier.DISK,)) if separate else ((Tier.DEVICE, Tier.HOST), (Tier.DISK,))
        self._highest: dict[tuple[str, tuple[Tier, ...]], int] = {}
        self.trace = Trace()
        self.phase, self.unit = "load", ""
        self.ledgers: list[Ledger] = []
        self.fullest: dict[tuple[str, Tier], Held] = {}
        self.moments: list[Moment] = []
        self.alive_nbytes = 0
        self.forward_flops = 0.0
        self.backward = False  # told by who watches autograd
        self._last: Ticket = ()
        self._flops: dict[str, float] = {}
        self._nbytes, self._kernels, self._products = 0.0, 0, 0
        self._began = 0
        self._paused = self._away = False
        self._alive: dict[int, int] = {}  # bytes of storages that no ledger counts
        self.optimizing = False  # told by who drives it: forward and backward are over
        self._heap_nbytes = 0  # of blocks that come from the C library's heap
        self._heap_highest = {False: 0, True: 0}  # in the second step: of forward and backward, and of the optimizer's step
        self._heap_loading = 0  # and before the first
        self._moment_of: dict[str, bool] = {}  # phase -> whether its fullest moment was while stepping

    def enter(self, phase: str) -> None:
        """What follows is of another phase: one of `plan.PHASES`."""
        self.flush()
        if self.phase == "load":
            self._heap_loading, self._heap_highest = self._heap_highest[False], {False: 0, True: 0}
        self.phase, self.backward, self.optimizing = phase, False, phase == "step"
        self.sample()

    # -- memory ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Ledgers that are opened meanwhile are watched."""
        token = listener.set(self)
        try:
            yield
        finally:
            listener.reset(token)

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        before, self._away = self._away, True
        try:
            yield
        finally:
            self._away = before

    def watch(self, ledger: Ledger) -> None:
        """Whose entries count from now on."""
        ledger.changed = self.sample
        self.ledgers.append(ledger)
        self.sample()

    def born(self, storage: torch.UntypedStorage) -> None:
        """A new storage: alive until it is not."""
        nbytes = -(-storage.nbytes() // _ROUNDED) * _ROUNDED
        key = storage._cdata
        self._alive[key] = nbytes
        self.alive_nbytes += nbytes
        weakref.finalize(storage, self._forget, key).atexit = False
        if nbytes < MMAP_NBYTES:
            self._heap_nbytes += nbytes
            self._heap_highest[self.optimizing] = max(self._heap_highest[self.optimizing], self._heap_nbytes)
            weakref.finalize(storage, self._given_back, nbytes).atexit = False

    def _given_back(self, nbytes: int) -> None:
        self._heap_nbytes -= nbytes

    def kept(self, phase: str) -> int:
        """Bytes of the C library's heap that are free at the fullest moment of a phase: what others have left is in pieces.

        Blocks are aligned by cutting off a little of them, which stays in use and keeps holes apart (glibc 2.36): what forward and
        backward have freed is of no use to the step's larger blocks, and the other way round.
        """
        computing, stepping = (max(0, highest - self._heap_nbytes) for highest in (self._heap_highest[False], self._heap_highest[True]))
        if phase == "load":
            return 0
        kept = min(self._heap_loading, KEEP_NBYTES)
        if phase == "save" or self._moment_of.get(phase):
            kept += computing
        return kept + (stepping if phase in ("save", "forward", "backward") else 0)

    def _forget(self, key: int) -> None:
        self.alive_nbytes -= self._alive.pop(key, 0)

    def claim(self, tensor: Tensor) -> None:
        """A ledger counts it."""
        self._forget(tensor.untyped_storage()._cdata)

    def held(self, tier: Tier) -> Held:
        """Bytes by category now."""
        found: Held = {}
        for ledger in self.ledgers:
            for name, nbytes in _entered(ledger, tier).items():
                if nbytes:
                    found[name] = found.get(name, 0) + nbytes
        if tier is Tier.DEVICE and self.alive_nbytes > 0:
            found[ACTIVATIONS] = self.alive_nbytes
        return found

    def sample(self) -> None:
        """Note what is held, where it is more than before in this phase."""
        phase = self.phase if self.phase != "forward" or not self.backward else "backward"
        for tiers in self._memories:
            total = sum(sum(each.values()) for ledger in self.ledgers for each in (_entered(ledger, tier) for tier in tiers))
            total += self.alive_nbytes if Tier.DEVICE in tiers else 0
            if total >= self._highest.get((phase, tiers), 0):  # of equal ones the last: what was just made has its entry by then
                self._highest[phase, tiers] = total
                self._moment_of[phase] = self.optimizing if Tier.DEVICE in tiers else self._moment_of.get(phase, False)
                self.fullest |= {(phase, tier): self.held(tier) for tier in tiers}

    # -- the trace -------------------------------------------------------------------------------------------

    def begin(self, trace: Trace) -> None:
        """A new trace; what was started before is over."""
        self.flush()
        self.trace, self._last, self.moments, self.forward_flops = trace, (), [], 0.0
        self._heap_highest = {False: 0, True: 0}
        self._began += 1

    def compute(self, flops: float, nbytes: float, dtype: str) -> None:
        """The device computes."""
        if self._paused:
            return
        self._flops[dtype] = self._flops.get(dtype, 0.0) + flops
        self._kernels += 1
        if flops:
            self._products += 1
        else:
            self._nbytes += nbytes

    def at(self, unit: str, backward: bool) -> None:
        """The rank has come to a unit of the model."""
        if (unit, backward) != (self.unit, self.backward):
            self.flush()
            self.moments.append(Moment(self._phase, self.unit, self.held(Tier.DEVICE)))
            self.unit, self.backward = unit, backward

    @property
    def _phase(self) -> str:
        return "backward" if self.backward and self.phase == "forward" else self.phase

    def flush(self) -> None:
        """What was computed since the last task becomes one."""
        if not self._kernels:
            return
        dtype = max(self._flops, key=lambda name: self._flops[name])
        flops = sum(self._flops.values())
        if self._phase == "forward":
            self.forward_flops += flops
        name = f"{self._phase} {self.unit}".strip()
        self._add(Task(
            name, self._phase, {Resource.DEVICE: self._nbytes}, flops=flops, kernels=self._kernels, dtype=dtype, unit=self.unit,
            after=self._last, products=self._products,
        ), last=True)  # fmt: skip
        self._flops, self._nbytes, self._kernels, self._products = {}, 0.0, 0, 0

    def _add(self, task: Task, last: bool = False) -> Ticket:
        number = self.trace.add(task)
        if last:
            self._last = (number,)
        return (number,)

    def start(self, name: str, nbytes: dict[Resource, float], peers: int = 1, axis: str = "dp", channel: str = "", distinct: bool = False) -> Ticket:
        """A task beside the rank's own order, after what it has done so far."""
        self.flush()
        more = {"peers": peers, "axis": axis, "channel": channel, "distinct": distinct}
        return self._add(Task(name, self._phase, nbytes, self._last, unit=self.unit, **more)) + (-self._began,)

    def sent(self, label: str, sent: Sent, peers: int, distinct: bool = False) -> Ticket:
        nbytes = {Resource.INSIDE: float(sent.inside), Resource.BETWEEN: float(sent.between)}
        moved = {resource: amount for resource, amount in nbytes.items() if amount}
        return self.start(label, moved, peers, distinct=distinct) if moved else ()

    def moved(self, source: Tier, target: Tier, nbytes: int) -> Ticket:
        link = _LINKS[source, target]
        return self.start(f"{source.value} -> {target.value}", {link: float(nbytes)}) if nbytes else ()

    def waited(self, ticket: Ticket) -> None:
        numbers = tuple(number for number in ticket if number >= 0) if -self._began in ticket else ()
        if set(numbers) - set(self._last):
            self.flush()
            self._last = tuple(dict.fromkeys((*self._last, *numbers)))

    def beside(self, work: Callable[[], Any]) -> tuple[Any, Ticket]:
        self.flush()
        before, self._last = self._last, self._last
        result = work()
        self.flush()
        after, self._last = self._last, before
        return result, (*after, -self._began)

    @contextlib.contextmanager
    def stepping(self, numel: int, nbytes: int) -> Iterator[None]:
        self.flush()
        paused, self._paused = self._paused, True
        yield
        self._paused = paused
        self.sample()
        if numel:
            self._add(Task("host step", self.phase, {Resource.HOST: float(nbytes)}, self._last, numel=numel), last=True)


def _entered(ledger: Ledger, tier: Tier) -> Held:
    return ledger.now if tier is Tier.DEVICE else ledger.elsewhere[tier]


def _written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """Tensors that an operator changes in place."""
    given = [(argument, args[n] if n < len(args) else kwargs.get(argument.name)) for n, argument in enumerate(func._schema.arguments)]
    found = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return [x for value in found for x in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class Groups:
    """What collectives and sends of torch's own mean. axes: name of a process group -> (axis, ranks, the link that joins them).

    stage: this rank's place along pp; stage_link: the link to the stages beside it.
    """

    axes: dict[str, tuple[str, int, Resource]] = field(default_factory=dict)
    stage: int = 0
    stage_link: Resource = Resource.INSIDE


class Operators(TorchDispatchMode):
    """Tells a recorder of every operator."""

    def __init__(self, recorder: Recorder, groups: Groups) -> None:
        super().__init__()
        self.recorder, self.groups, self._under_way = recorder, groups, weakref.WeakKeyDictionary()
        self._messages: Counter[str] = Counter()
        self.subclasses: tuple[type, ...] = (ShardedTensor,)
        if groups.axes:
            from torch.distributed.tensor import DTensor

            self.subclasses = (ShardedTensor, DTensor)

    def begin(self, trace: Trace) -> None:
        """What follows is written to a new trace."""
        self._messages.clear()
        self.recorder.begin(trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, self.subclasses) for kind in types):
            return NotImplemented  # first what it makes of it
        kwargs = kwargs or {}
        check_dtypes(func, args)
        result = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            return self._collective(func, args, result)
        if func.namespace == "c10d":
            return self._message(func, args, result)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        results = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, Tensor)]
        lists = [x for given in args if isinstance(given, (tuple, list)) for x in given if isinstance(x, Tensor)]
        tensors += lists
        if not results and not lists:
            return result
        known = {x.untyped_storage()._cdata for x in tensors}
        fresh = {}
        for x in results:
            storage = x.untyped_storage()
            if storage._cdata not in known:
                fresh[storage._cdata] = storage
        recorder = self.recorder
        if fresh and not (recorder._paused or recorder._away):
            for storage in fresh.values():
                recorder.born(storage)
            recorder.sample()
        written = _written(func, args, kwargs)
        if (fresh or written) and tensors:
            count = flop_registry.get(func.overloadpacket) or _FLOPS.get(func._schema.name.partition("::")[2])
            flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
            over = func._schema.name.partition("::")[2] in _OVERWRITE
            read = {id(x): x.nbytes for x in tensors if not (over and any(x is each for each in written))}
            made = [x for x in results if x.untyped_storage()._cdata in fresh]
            moved = sum(read.values()) + sum(x.nbytes for x in (*written, *made))
            recorder.compute(flops, moved, _NAMES.get(tensors[0].dtype, "fp32"))
        return result

    def _collective(self, func: Any, args: tuple, result: Any) -> Any:
        """Of tensor parallelism: started, and waited for by wait_tensor."""
        name = func._schema.name.partition("::")[2]
        if name == "wait_tensor":
            storage = args[0].untyped_storage()
            self.recorder.waited(self._under_way.pop(storage, ()))
            return result
        axis, size, link = self.groups.axes.get(args[-1] if isinstance(args[-1], str) else "", ("", 1, Resource.INSIDE))
        if axis and isinstance(result, Tensor):
            nbytes = ring_nbytes(func, args[0], result, size) or 0.0
            self.recorder.born(result.untyped_storage())
            self.recorder.sample()
            ticket = self.recorder.start(f"{axis} {name}", {link: nbytes}, size, axis)
            self._under_way[result.untyped_storage()] = ticket
        return result

    def _message(self, func: Any, args: tuple, result: Any) -> Any:
        """Between stages: a send goes on beside, what is received is needed next."""
        name, here = func._schema.name.partition("::")[2], self.groups.stage
        if name not in ("send", "recv_"):
            return result
        way = f"stage {here} -> {args[2]}" if name == "send" else f"stage {args[2]} -> {here}"
        channel = f"{way} #{self._messages[way]}"
        self._messages[way] += 1
        nbytes = float(sum(x.nbytes for x in args[0]))
        ticket = self.recorder.start(f"{name.strip('_')} {way}", {self.groups.stage_link: nbytes} if name == "send" else {}, 2, "pp", channel)
        if name == "recv_":
            self.recorder.waited(ticket)
        return result
