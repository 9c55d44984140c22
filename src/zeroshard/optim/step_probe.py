"""Trial of an optimizer class, at zs.shard: is its step elementwise, that is, the same however elements are cut into tensors?

    whole     two small parameters, of as many dimensions as the group's have, stepped as on one process
    slices    the same elements as three ranks have them: flat, cut within parameters, with gradients that fill the same memory again
    alone     each of the two by itself, as zs.whole_matrix steps it

Each kind of parameter group is tried with its own options, for _STEPS steps, on values that are the same on every rank. A
trial works on copies, and is aborted before it draws a random number or sends anything to other ranks.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..seam import State, inner_copy
from ..tensor.sharded_tensor import ShardedTensor
from ..utils.torch_compat import DYNAMO, FakeTensor, TorchDispatchMode, disable_current_modes

T = TypeVar("T")
_STEPS = 12  # some classes use the whole matrix in every tenth step only
_SHAPE = (6, 5, 2, 2, 2)  # a trial's shape is its beginning; 1-D parameters have as many elements as a matrix
_LR = 0.05  # replaces the learning rate, since a warm-up begins with 0 and would change nothing
_TOLERANCE = 1e-3  # fraction of the largest change: steps that differ by less differ in rounding only
_MAX_NUMEL = 1 << 20  # largest tensor on the optimizer that is copied for a trial
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, FunctionType, BuiltinFunctionType)
_eager = threading.Lock()  # torch.compile's stance is per process, so ranks that are threads take turns

KEEPS_GRADIENTS = "it keeps p.grad, whose memory the next backward fills again"

Part = tuple[int, int, tuple[int, ...]]  # elements [start, stop) of the two parameters in a row; their shape


@dataclass(frozen=True)
class Departure:
    """Groups (by number) whose step is not elementwise. how: the evidence. alone: stepping each parameter by itself is exact."""

    groups: list[int]
    how: str
    alone: bool


class Sends(Exception):
    """Raised when a trial's step is about to send something to other ranks. large: tensors as large as a parameter."""

    def __init__(self, operation: str, large: bool) -> None:
        super().__init__(operation)
        self.large = large


class _Untold(Exception):
    """Raised when a trial can not tell whether the step is elementwise."""


class _Watch(TorchDispatchMode):
    """Dispatch mode that aborts the trial at an operator with effects outside it: communication, or a random draw."""

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise Sends(str(func), any(tensor.numel() >= 16 for tensor in _tensors(args)))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Untold
        return func(*args, **(kwargs or {}))


def departure(optimizer: torch.optim.Optimizer) -> Departure | None:
    """Return how the optimizer's step differs from an elementwise one; None if it does not, or if no trial has a result.

    A trial has no result for a class that fails on whole parameters too (it needs a closure, names, a process group), that keeps
    objects that can not be copied (a model, objects of its own), or whose step draws random numbers.

    Raises:
        Sends: the optimizer's step sends tensors as large as parameters to other ranks.
    """
    found: list[tuple[list[int], str, bool]] = []
    with _apart():
        for numbers, param in _samples(optimizer):
            try:
                how, alone = _on_some_device(_Trial.outcome, optimizer, numbers[0], param)
            except Sends as error:
                if error.large:
                    raise
                continue
            except _Untold:
                continue
            if how is not None:
                found.append((numbers, how, alone))
    if not found:
        return None
    found = [each for each in found if each[1] != KEEPS_GRADIENTS] or found  # the remedy for one would not help the other
    return Departure(
        sorted({number for numbers, _, _ in found for number in numbers}), found[0][1], all(alone for _, _, alone in found)
    )


def sends(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the operation by which the optimizer's step sends data to other ranks; None if the trials meet none."""
    with _apart():
        for numbers, param in _samples(optimizer):
            try:
                _on_some_device(lambda trial: trial.stepped(trial.alone), optimizer, numbers[0], param)
            except Sends as error:
                return str(error)
            except _Untold:
                continue
    return None


class _Trial:
    """Trial of one group, with small stand-ins for `param`, which is one of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, number: int, param: Tensor, device: torch.device) -> None:
        self.optimizer, self.group, self.param, self.device = optimizer, optimizer.param_groups[number], param, device
        dims = max(param.dim(), 1)
        self.shape = _SHAPE[:dims] + (1,) * (dims - len(_SHAPE)) if dims > 1 else (_SHAPE[0] * _SHAPE[1],)
        self.numel = numel = math.prod(self.shape)
        self.alone: list[list[Part]] = [[(0, numel, self.shape)], [(numel, 2 * numel, self.shape)]]
        # sines of this are the same on every rank, without a draw
        at = torch.arange(2 * numel, dtype=torch.float64, device="cpu")
        size = torch.where(at < numel, 1.0, 3.0)  # gives the two parameters different norms
        self.value = (size * torch.sin(at * at * 0.7 + 0.3)).float()
        self.grads = [(size * torch.cos(at * (at + t) * 0.9 + t) / (1 + at % 7)).float() for t in range(_STEPS)]

    def outcome(self) -> tuple[str | None, bool]:
        """Return how the step of slices differs (None: it does not), and whether stepping each parameter alone is exact."""
        whole = self.stepped([self.alone[0] + self.alone[1]])
        if not torch.isfinite(whole).all():
            raise _Untold
        # three slices; the second has elements of both parameters
        cuts = [0, self.numel // 2 + 2, self.numel + 7, 2 * self.numel]
        slices: list[list[Part]] = [[(start, stop, (stop - start,))] for start, stop in itertools.pairwise(cuts)]
        how = self._difference(whole, slices, refilled=True)
        if how is None:
            return None, True
        if self._difference(whole, slices) is None:
            return KEEPS_GRADIENTS, False
        try:
            return how, self._difference(whole, self.alone) is None
        except _Untold:
            return how, False

    def _difference(self, whole: Tensor, ranks: list[list[Part]], refilled: bool = False) -> str | None:
        try:
            other = self.stepped(ranks, refilled)
        except (_Untold, Sends):
            raise _Untold from None
        except Exception as error:  # whatever the class raises
            return f"it fails on flat slices ({type(error).__name__}: {error})"
        change = (whole - self.value).abs().max().item()
        found = (other - whole).abs().max().item()
        if found <= _TOLERANCE * change + 1e-6 * whole.abs().max().item():  # False for NaN
            return None
        return f"after {_STEPS} steps values differ by {found:.2g}, where the largest change is {change:.2g}"

    def stepped(self, ranks: list[list[Part]], refilled: bool = False) -> Tensor:
        """Return both parameters (2 * numel,) after all steps. ranks: the parts that each rank's optimizer has.

        refilled: the gradients of all steps lie in the same memory, as in the buffer that a backward fills again.
        """
        result = self.value.clone()
        for parts in ranks:
            leaves = [nn.Parameter(self.value[start:stop].clone().view(shape).to(self.device)) for start, stop, shape in parts]
            inner, memory = self._optimizer(leaves), [torch.empty_like(leaf) for leaf in leaves]
            for grad in self.grads:
                for leaf, buffer, (start, stop, shape) in zip(leaves, memory, parts, strict=True):
                    given = grad[start:stop].view(shape)
                    leaf.grad = buffer.copy_(given).view(shape) if refilled else given.clone().to(self.device)
                inner.step()
            for leaf, (start, stop, _) in zip(leaves, parts, strict=True):
                result[start:stop] = leaf.detach().reshape(-1).cpu()
        return result

    def _optimizer(self, leaves: list[nn.Parameter]) -> torch.optim.Optimizer:
        inner = inner_copy(self.optimizer)
        own = {
            k: v for k, v in vars(inner).items() if k not in ("state", "param_groups", "defaults") and not k.endswith("_hooks")
        }
        vars(inner).update(_copied(own))
        options = _copied({k: v for k, v in self.group.items() if k != "params"})
        for key in ("lr", "initial_lr"):
            if isinstance(options.get(key), Tensor):
                options[key].fill_(_LR)
            elif isinstance(options.get(key), float):
                options[key] = _LR
        inner.param_groups = [{**options, "params": leaves}]
        inner.state = defaultdict(
            dict, {leaf: self._state(leaf) for leaf in leaves} if self.optimizer.state.get(self.param) else {}
        )
        for leaf in leaves:
            if leaf.shape == self.shape and leaf.numel() == self.numel:  # slices, like runs, have none
                vars(leaf).update({k: v for k, v in vars(self.param).items() if isinstance(v, (bool, int, float, str))})
        return inner

    def _state(self, leaf: nn.Parameter) -> State:
        """Return a small copy of the parameter's state, for classes that make states in their constructor."""
        state: State = {}
        for key, value in self.optimizer.state[self.param].items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if value.shape != self.param.shape:
                    raise _Untold
                filled = 0.01 if _is_unreal(value) or not value.numel() else value.detach().reshape(-1)[0].item()
                state[key] = torch.full_like(leaf.detach(), filled, dtype=value.dtype)
            else:
                state[key] = _copied(value)
        return state


def _samples(optimizer: torch.optim.Optimizer) -> Iterator[tuple[list[int], Tensor]]:
    """Yield (numbers of alike groups, a parameter of the first) per kind of options and number of dimensions.

    Groups that differ only in the values of numeric options (lr, betas, ...) are of one kind, and tried once.
    """
    samples: dict[Hashable, tuple[list[int], Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        told = {k: v for k, v in group.items() if k not in ("params", "param_names", "name") and not isinstance(v, Tensor)}
        kind = repr(sorted((k, "number" if type(v) in (int, float) else repr(v)) for k, v in told.items()))
        for param in group["params"]:
            attributes = repr(sorted((k, v) for k, v in vars(param).items() if isinstance(v, (bool, str))))
            key = kind, max(param.dim(), 1), attributes, bool(optimizer.state.get(param))
            numbers, _ = samples.setdefault(key, ([], param))
            if number not in numbers:
                numbers.append(number)
    yield from samples.values()


def _on_some_device(look: Callable[[_Trial], T], optimizer: torch.optim.Optimizer, number: int, param: Tensor) -> T:
    """Apply `look` to a trial on the host or, if the class fails there, on the device of the parameters."""
    device = torch.device("cpu")
    others = [] if param.is_meta or isinstance(param, FakeTensor) or param.device == device else [param.device]
    for place in [device, *others]:
        try:
            return look(_Trial(optimizer, number, param, place))
        except (_Untold, Sends):
            raise
        except Exception:  # the class can not step whole parameters on this device
            continue
    raise _Untold


@contextmanager
def _apart() -> Iterator[None]:
    """Context for a trial: real tensors on the host, no autograd, no compiler, and `_Watch` against effects outside."""
    compiles = DYNAMO in sys.modules  # not imported: nothing is compiled, and importing takes a second
    with disable_current_modes(), torch.device("cpu"), torch.no_grad(), _eager:
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext(), _Watch():
            yield


def _copied(value: Any) -> Any:
    """Return a copy of plain data and tensors. Raise _Untold for other objects: a trial could change the user's through them."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.numel() <= _MAX_NUMEL:
        return torch.full(value.shape, 0.01, dtype=value.dtype) if _is_unreal(value) else value.detach().clone()
    if isinstance(value, _ATOMS):
        return value
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_copied(each) for each in value)
    raise _Untold


def _is_unreal(value: Tensor) -> bool:
    """Return True for a tensor without values here, or with other ones on each rank, which a trial must not read."""
    return value.is_meta or isinstance(value, (FakeTensor, ShardedTensor))


def _tensors(value: object) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _tensors(each)
