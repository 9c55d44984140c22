"""Homes, which own the storage of sharded tensors, and the base class of tensors of which this rank holds a slice."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..errors import ShardedWriteError
from ..utils.torch_compat import is_distributed
from .part import Distribution


class Ranks(Protocol):
    """Ranks that exchange messages: a Comm (engine/comm/base.py)."""

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        """Return the messages of all ranks, in rank order (collective)."""


class Shown(NamedTuple):
    """The face of tensors for a program that was written for DTensors (zeroshard.fsdp)."""

    place: Callable[[Distribution | None], tuple[object, tuple[object, ...]]]  # -> (DeviceMesh, placements) of a parameter
    view: Callable[..., object]  # (operation, its result on gathered copies, name) -> what the program gets
    storage: Callable[..., object]  # tensor -> the result of its `untyped_storage()`
    states: type  # of which isinstance() takes optimizer states to be: programs ask before they gather them
    # whole tensor -> whether it is a parameter not sharded yet, which the program takes for a DTensor
    waits: Callable[[Tensor], bool]


class Home:
    """Owner of a sharded tensor's storage: has its name and cut, reads and writes the slice, gathers from other ranks.

    The methods here suit the simplest case, and subclasses override what differs: the tensor itself holds the slice
    (`Sliced._held`), no other rank reads it, and it has neither gradient nor master weights.
    """

    name: str
    start: int  # this rank's elements [start, stop) of the flattened tensor
    stop: int
    comm: Any  # Comm (engine/comm/base.py) of the ranks that have the other slices
    # torch.distributed.checkpoint saves this rank's slice; False: that of another rank along model axes, under the same name
    saved_here = True
    # set under zeroshard.fsdp where model axes cut the parameter: the tensor then has the shape of the whole and hides how ranks
    # divide it, which is this; slices are of this rank's part of the whole
    hidden_cut: Distribution | None = None

    @property
    def meeting(self) -> Ranks:
        """Communicator of the ranks that compute norms of the tensor together."""
        return self.comm

    @property
    def counts(self) -> bool:
        """True if this rank's slice enters norms; False if it is a copy of another rank's."""
        return True

    @property
    def distribution(self) -> Distribution | None:
        """Division of the tensor among ranks along model axes (tensor, expert parallelism), whose parts ZeRO cuts, or None."""
        return None

    @property
    def distributed(self) -> bool:
        """True if the slices are of a part of a larger tensor, along tensor or expert parallelism."""
        return self.distribution is not None and self.distribution.part is not None

    @property
    def undivided(self) -> bool:
        """True while the tensor's gradient is a weighted sum (zs.backward) that the step will divide."""
        return False

    @property
    def shown(self) -> Shown | None:
        """The tensor's face for code that takes it for a DTensor; None: it has none."""
        return None

    def drawing(self) -> AbstractContextManager[None]:
        """Return a context for a draw in place; inside, torch's default generators are those to draw from."""
        return nullcontext()

    def complete(self, value: Tensor) -> Tensor:
        """Return the tensor that is shown. value: all slices, joined. If a larger tensor is shown, they are those of this
        rank's part, and ranks along model axes join their parts (collective)."""
        if self.hidden_cut is None:
            return value
        if value.requires_grad:
            return self.hidden_cut.wrap(value.contiguous()).full_tensor()  # type: ignore[attr-defined]
        return self.hidden_cut.whole(value)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return the elements, flat, that this rank holds of a value of the shape that is shown (collective if it is a DTensor)."""
        whole = whole if self.hidden_cut is None else self.hidden_cut.local(whole)
        return (whole.full_tensor() if is_distributed(whole) else whole).reshape(-1)[self.start : self.stop]

    @property
    def unit(self) -> str:
        """Name of the module whose forward gathers the tensor; "" where the model has no such module."""
        return ""

    @property
    def traced(self) -> bool:
        """True if ranks compare their writes by traces: checksums of how each has computed what it wrote (`_record_trace`)."""
        return False

    @property
    def trace(self) -> int:
        """Trace of what was written since ranks last compared; 0 if nothing was."""
        return 0

    def note(self, trace: int, anew: bool) -> None:
        """Add a write to the trace. anew: it wrote every element, so that earlier writes no longer matter."""

    def before_load(self) -> None:
        """Prepare for writes to slices by the ranks that have elements of what is loaded, at times of their own (collective)."""

    def renewed(self) -> None:
        """Note that the slice of a parameter was, or is about to be, written anew as a whole."""

    def before_write(self) -> None:
        """Prepare for a write to the slice of a parameter (collective where peers read the slice in place)."""

    def fetch(self, gradient: bool) -> Tensor:
        """Return this rank's slice of the value, or of the gradient, at rest: a view, or a copy if it is offloaded."""
        raise AssertionError("the slice is held")

    def after_write(self, local: Tensor, offset: int = 0) -> None:
        """Store `local` (n,) as elements [offset, offset + n) of a parameter's slice, after a write to a view or copy of it."""

    def after_gradient_write(self, local: Tensor, offset: int = 0) -> None:
        """Store `local` (n,) as elements [offset, offset + n) of the gradient's slice, after a write to a view or copy of it."""
        raise AssertionError("there is no gradient")

    def unscale(self, homes: Sequence[Home], factor: float) -> bool:
        """Multiply the gradients of these homes by `factor`; return whether one was not finite on some rank (collective)."""
        raise ShardedWriteError(f"{self.name}: torch.amp.GradScaler unscales the gradients of parameters, not parts of them.")

    def before_meeting(self, what: str) -> None:
        """Raise ZeroshardError if ranks that the collective `what` needs can not take part."""

    def gather_local(self, local: Tensor) -> Tensor:
        """Return `local`, 1-D, of all ranks, concatenated in rank order: of slices, the flattened tensor (collective)."""
        raise NotImplementedError

    # of parameters only

    def gradient(self) -> Tensor | None:
        """Return the reduced gradient as a sharded tensor, or None."""
        return None

    def set_gradient(self, value: Tensor | None) -> None:
        """Assign the gradient, or drop it (None)."""
        raise ShardedWriteError(f"{self.name} is a view and takes no gradient of its own: set that of the parameter.")

    def lend(self, func: Callable, args: tuple, kwargs: dict) -> object:
        """Compute an operation with the gathered parameter if a forward runs, and return its result; else NotImplemented."""
        return NotImplemented

    def assign(self, param: Tensor, value: Tensor) -> None:
        """Carry out `param.data = value`."""
        raise ShardedWriteError(f"{self.name} is a view and takes no other data: write in place (copy_).")

    def adopt(self, hook: Callable) -> Callable:
        """Return the function that autograd calls, in place of a program's hook, when the local gradient is complete."""
        return hook

    def arrival(self, sliced: bool) -> Callable[[Tensor], Tensor]:
        """Return a function from a gradient of `to_local()` (sliced) or `full_tensor()` to this rank's local gradient."""
        raise NotImplementedError


class DerivedHome(Home):
    """Home of a tensor that belongs to another one (its rows, an optimizer state) and is gathered from the same ranks."""

    def __init__(self, parent: Home) -> None:
        """parent: home of the other tensor."""
        self.parent, self.comm, self.saved_here = parent, parent.comm, parent.saved_here

    @property
    def meeting(self) -> Ranks:
        return self.parent.meeting

    @property
    def counts(self) -> bool:
        return self.parent.counts

    @property
    def hidden_cut(self) -> Distribution | None:  # type: ignore[override]
        return self.parent.hidden_cut

    @property
    def distribution(self) -> Distribution | None:
        return self.parent.distribution

    @property
    def shown(self) -> Shown | None:
        return self.parent.shown

    def drawing(self) -> AbstractContextManager[None]:
        return self.parent.drawing()

    @property
    def traced(self) -> bool:
        return self.parent.traced

    @property
    def trace(self) -> int:
        return self.parent.trace

    def note(self, trace: int, anew: bool) -> None:
        self.parent.note(trace, False)

    def before_meeting(self, what: str) -> None:
        self.parent.before_meeting(what)

    def gather_local(self, local: Tensor) -> Tensor:
        return self.parent.gather_local(local)


class RangeHome(DerivedHome):
    """Home of rows of a sharded tensor (weight[i], weight[a:b]), a contiguous range of its flattened elements."""

    def __init__(self, parent: Home, name: str, offset: int, numel: int) -> None:
        """offset, numel: range of the rows in the flattened parent."""
        super().__init__(parent)
        self.name, self.offset = name, offset
        begin, end = max(parent.start, offset), min(parent.stop, offset + numel)
        self.begin = begin - parent.start if begin < end else 0  # first element in the parent's slice
        self.start = begin - offset if begin < end else 0  # in the flattened rows
        self.stop = end - offset if begin < end else 0

    @property
    def undivided(self) -> bool:
        return self.parent.undivided

    def note(self, trace: int, anew: bool) -> None:
        # with the name: the same operation on other rows is another write. Not anew: the parent's other rows keep their values
        self.parent.note(zlib.crc32(f"{self.name} {trace}".encode()), False)

    def before_write(self) -> None:
        self.parent.before_write()

    def fetch(self, gradient: bool) -> Tensor:
        return self.parent.fetch(gradient)[self.begin : self.begin + self.stop - self.start]

    def after_write(self, local: Tensor, offset: int = 0) -> None:
        self.parent.after_write(local, self.begin + offset)

    def after_gradient_write(self, local: Tensor, offset: int = 0) -> None:
        self.parent.after_gradient_write(local, self.begin + offset)


class Sliced(Tensor):
    """A tensor of the global shape, (2, 3), of which this rank holds flat elements [home.start, home.stop), such as [4, 6)."""

    _held: Tensor | None  # (stop - start,), or None: the home fetches the slice at rest
    _home: Home
    _of_parameter = False  # True for a parameter, or an alias of one (p.data, p[0])
    _of_gradient = False  # True for a gradient, or an alias of one
    _history: list[int]  # [trace] of a result, shared by its aliases

    @property
    def _local(self) -> Tensor:
        """This rank's slice (stop - start,): a view, or (offloaded) a copy, which `_end_write` must store after a write."""
        return self._held if self._held is not None else self._home.fetch(self._of_gradient)

    def _begin_write(self) -> None:
        if self._of_parameter:
            self._home.before_write()

    def _end_write(self, local: Tensor, offset: int = 0) -> None:
        """Store `local` (n,) as elements [offset, offset + n) of the slice of a parameter or gradient, or of an alias of one."""
        if self._of_parameter:
            self._home.after_write(local, offset)
        elif self._of_gradient:
            self._home.after_gradient_write(local, offset)
