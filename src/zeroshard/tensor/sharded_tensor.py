"""Sharded tensors: a tensor subclass that shows the global shape and holds this rank's slice of the elements.

At rest a module holds a sharded parameter, with the global shape, dtype, device and requires_grad, so that names,
state dicts, `numel()` and initialisation code work as on one process. Operations on it:

    in-place initialisation   acts on the global tensor: random draws advance the generator as one process does
    elementwise               local, on slices, if all operands are cut alike (whole tensors are sliced)
    any(), all()              combined over ranks (collective)
    norms                     of the global tensor (collective; tensor/norms.py)
    max(), sum(), ...         under no_grad: of the gathered tensor (collective; `READS` in tensor/op_classes.py)
    another, on results       of the gathered results (collective), if all sharded operands are results: scores, masks
    in a module's forward     computes with the gathered parameter, as on one process (tensor/op_classes.py)
    any other operation       raises, with the parameter's name and a remedy; where a model shows itself as DTensors (zeroshard.fsdp),
                              one that writes nothing: under no_grad, of the gathered tensor (collective; `_beyond`)

`full_tensor()` gathers (collective). A sharded tensor never refers to memory that was released.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import SupportsIndex, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import ShardedAccessError, ShardedWriteError
from ..utils import torch_compat
from ..utils.torch_compat import OpOverload, faking, tree_map_only
from .attributes import CarriesAttributes, attributes_of
from .dcp_chunks import HasChunks
from .differentiable import ReadableWhole, read
from .home import Home, RangeHome
from .norms import allow_foreach, take_norms
from .op_classes import NORMS, READS, computes
from .refusals import HasNoMemory, remedy_of

_T = TypeVar("_T")
_Kind = TypeVar("_Kind", bound=Tensor)
aten = torch.ops.aten


class ShardedTensor(HasChunks, HasNoMemory):
    """A tensor of the global shape, of which this rank holds elements [home.start, home.stop), flattened."""

    @staticmethod
    def __new__(
        cls, local: Tensor | None, shape: tuple[int, ...], home: Home, requires_grad: bool = False, *,
        dtype: torch.dtype | None = None, device: torch.device | None = None,
    ) -> ShardedTensor:  # fmt: skip
        """dtype, device: required if `local` is None; else `local` has them."""
        if local is not None:
            dtype, device = local.dtype, local.device
        tensor = torch_compat.make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        tensor._held, tensor._home, tensor._history = local, home, [0]
        return tensor

    __torch_function__ = torch_compat.disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = cls._compute_on_slices(func, args, kwargs)
        if func not in _UNTRACED and torch.Tag.nondeterministic_seeded not in func.tags:
            _record_trace(func, args, kwargs, result)
        return result

    @classmethod
    def _compute_on_slices(cls, func: OpOverload, args: tuple, kwargs: dict) -> object:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        # normal_, uniform_ and other draws in place
        if torch.Tag.nondeterministic_seeded in func.tags and _writes_first(func):
            return _random_(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in READS:
            return _of_whole(func, args, kwargs)
        if torch.Tag.pointwise in func.tags or (name.startswith("_foreach_") and name not in _FOREACH_REDUCTIONS):
            return _elementwise(func, args, kwargs)
        if not func._schema.is_mutable and all(tensor._computed for tensor in _found(ShardedTensor, (args, kwargs))):
            return _of_whole(func, args, kwargs)
        return _beyond(func, args, kwargs)

    @property
    def _trace(self) -> int:
        """Checksum of how this rank has computed the tensor (see `_record_trace`); 0 for a gradient, or if it was not written."""
        return 0 if self._of_gradient else self._home.trace if self._of_parameter else self._history[0]

    def _record(self, trace: int, anew: bool) -> None:
        """Record how the tensor was written. anew: every element was."""
        if self._of_parameter:
            self._home.note(trace, anew)
        elif anew and not isinstance(self._home, RangeHome):
            self._history[0] = trace
        else:
            self._history[0] = zlib.crc32(f"{self._history[0]} {self._home.name} {trace}".encode())

    @property
    def _computed(self) -> bool:
        """True for the result of an operation on slices: a score, a mask. False for a parameter, a gradient or an alias of one."""
        return not (self._of_parameter or self._of_gradient)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        part = "" if self._home.hidden_cut is None else "of its part "
        return (
            f"{type(self).__name__}({self._home.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"elements [{self._home.start}, {self._home.stop}) {part}on this rank, requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict) -> ShardedTensor:
        """Copy this rank's slice of a gradient, a result, an entry of a state dict, or a parameter before zs.shard; raise for a
        parameter of a sharded model."""
        if isinstance(self, ShardedParameter) and hasattr(self._home, "copy_of"):  # made under zs.init, not sharded yet
            return memo.setdefault(id(self), self._home.copy_of(self))
        if isinstance(self, ShardedParameter):
            raise ShardedAccessError(
                f"{self._home.name}: a sharded model can not be deep-copied. Copy it before zs.shard(), or take "
                "zs.full_state_dict(model)."
            )
        return memo.setdefault(id(self), self.detach().clone())

    @property
    def data(self) -> Tensor:
        """The value, detached from its graph; an assigned value is copied into the slices."""
        return torch_compat.data_attribute.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    def tolist(self) -> list:  # type: ignore[override]
        """Return the elements of a result (collective); raise ShardedAccessError for a parameter or a gradient."""
        return self.full_tensor().tolist() if self._computed else self.numpy()

    @property
    def device_mesh(self) -> object:
        """The DeviceMesh that the tensor's model was given, where the model shows it (zeroshard.fsdp)."""
        return self._placed("device_mesh")[0]

    @property
    def placements(self) -> tuple[object, ...]:
        """Placements by which to distribute a whole tensor that is to be copied to this one, where the model shows them."""
        return self._placed("placements")[1]

    def _placed(self, name: str) -> tuple[object, tuple[object, ...]]:
        if self._home.shown is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return self._home.shown.place(self._home.distribution)

    @property
    def place(self) -> tuple[int, int]:
        """(rank, number of ranks) among the ranks that hold the slices."""
        return self._home.comm.rank, self._home.comm.world_size

    def to_local(self) -> Tensor:
        """Return this rank's slice (stop - start,), sharing memory: read only; write to the sharded tensor. Differentiable."""
        return read(self, self._local, sliced=True)

    def full_tensor(self) -> Tensor:
        """Return a copy of the whole tensor on every rank (collective). Differentiable.

        It has the tensor's own `shape`. For a parameter that tensor or expert parallelism cuts this is the shape of this rank's
        part; under FSDP2's door, of the whole parameter.
        """
        return self._home.complete(self.gathered())

    def gathered(self) -> Tensor:
        """Return a copy with the slices of all data-parallel ranks (collective). Differentiable. Where the tensor shows a
        larger one (`Home.hidden_cut`), the copy has the shape of this rank's part."""
        if isinstance(self, nn.Parameter) and not self._home.distributed:  # in a forward: gather the unit, as its operations do
            lent = self._home.lend(torch.clone, (self,), {})
            if isinstance(lent, Tensor):  # a forward runs, and its unit is gathered
                return lent
        part = None if self._home.hidden_cut is None else self._home.hidden_cut.part
        return read(self, self._home.gather_local(self._local).view(part.extents if part else self.shape), sliced=False)


class ShardedParameter(CarriesAttributes, ShardedTensor):
    """Sharded tensor that a module holds as its parameter at rest; an instance of nn.Parameter for isinstance."""

    _is_param = True  # the attribute by which isinstance(p, nn.Parameter) accepts a subclass of Tensor
    _of_parameter = True
    _compute: nn.Parameter  # the tensor that autograd sees while the unit is gathered

    @staticmethod
    def __new__(
        cls, local: Tensor | None, shape: tuple[int, ...], home: Home, requires_grad: bool = True, *,
        dtype: torch.dtype | None = None, device: torch.device | None = None,
    ) -> ShardedParameter:  # fmt: skip
        return ShardedTensor.__new__(  # type: ignore[return-value]
            cls, local, shape, home, requires_grad, dtype=dtype, device=device
        )

    @classmethod
    def __torch_function__(cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:  # returns local gradients, as for any data-parallel model
            args, kwargs = tree_map_only(ShardedParameter, lambda param: param._compute, (args, kwargs))
        elif func is Tensor.copy_ and any(map(torch_compat.is_distributed, args[1:2])):
            args = (args[0], args[1].full_tensor(), *args[2:])
        elif computes(func, args, kwargs, ShardedParameter):
            for param in _found(ShardedParameter, (args, kwargs)):
                result = param._home.lend(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            if _reads_whole(getattr(func, "__name__", ""), (args, kwargs)):
                args, kwargs = tree_map_only(ShardedParameter, ShardedTensor.full_tensor, (args, kwargs))
        with torch_compat.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The sharded value, detached from its graph; an assigned value is copied into the slices."""
        return torch_compat.data_attribute.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self._home.assign(self, value)

    @property
    def grad(self) -> Tensor | None:
        """Mean gradient over ranks, as a sharded tensor of the global shape; None before backward."""
        return self._home.gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._home.set_gradient(value)

    def register_hook(self, hook: Callable) -> RemovableHandle:
        """Register a backward hook as on any tensor: it gets the local gradient, of the global shape."""
        return self._compute.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable) -> RemovableHandle:
        """Register a hook as on any tensor; it gets this parameter, at rest, once its local gradient is complete and was sent."""
        compute = self.__dict__.get("_compute")
        if compute is None:  # before zs.shard, which moves the hook to the compute parameter
            return super().register_post_accumulate_grad_hook(hook)
        return compute.register_post_accumulate_grad_hook(self._home.adopt(hook))


class ReplicatedParameter(ReadableWhole):
    """Parameter of a replicated unit: an ordinary parameter whose `.grad` is the reduced gradient."""

    @property
    def data(self) -> Tensor:
        """The value, detached; writes to it advance the parameter's version counter, which masters watch. Assigning copies."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self._home.assign(self, value)

    @property
    def grad(self) -> Tensor | None:
        """Mean gradient over ranks (a sharded tensor of the global shape if gradients are sharded), or None."""
        local = local_grad(self)
        # inside a hook of backward; or in a trace, which can not call the home
        if local is not None or torch.compiler.is_compiling():
            return local
        return self._home.gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if local_grad(self) is not None:  # inside a user's hook: the local gradient, about to be sent
            torch_compat.grad_attribute.__set__(self, value)
        else:
            self._home.set_gradient(value)

    def register_post_accumulate_grad_hook(self, hook: Callable) -> RemovableHandle:
        """Register a hook as on any tensor; called once the local gradient was sent: `grad` is None, or of earlier backwards."""
        return super().register_post_accumulate_grad_hook(self._home.adopt(hook))

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        """Copy to an ordinary parameter, which belongs to no sharded model."""
        copy = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo.setdefault(id(self), copy)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple:
        """Pickle as an ordinary parameter."""
        copy = self.__deepcopy__({})
        copy.__dict__.update(attributes_of(self))
        return copy.__reduce_ex__(protocol)


def local_grad(param: Tensor) -> Tensor | None:
    """Return the gradient that autograd has accumulated on a tensor, whatever `.grad` returns."""
    return torch_compat.grad_attribute.__get__(param)


def set_data(param: Tensor, value: Tensor) -> None:
    """Set `param.data = value` as torch does: the parameter gets the memory of `value`."""
    torch_compat.data_attribute.__set__(param, value)


def clear_local_grad(param: Tensor) -> None:
    """Drop the gradient that autograd has accumulated on a tensor; the tensor's own memory may be released."""
    with torch_compat.DisableTorchFunctionSubclass():
        torch_compat.grad_attribute.__set__(param, None)


# -- operations ----------------------------------------------------------------------------------------------


def _found(kind: type[_Kind], tree: object) -> list[_Kind]:
    """Return the tensors of class `kind` in the arguments of an operation."""
    found: list[_Kind] = []
    tree_map_only(kind, found.append, tree)
    return found


def _writes_first(func: OpOverload) -> bool:
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def checksum(tensor: Tensor) -> int:
    """Return the CRC of a tensor's elements, which are copied to the host.

    Numpy is avoided: `tensor.numpy()` would mark the storage as one that can never be resized again.
    """
    if tensor.is_meta:
        return 0
    tensor = tensor.detach()
    flat = (tensor.int_repr() if tensor.is_quantized else tensor).to("cpu").contiguous()
    return zlib.crc32((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())) if flat.nbytes else 0


def _record_trace(func: OpOverload, args: tuple, kwargs: dict, result: object) -> None:
    """Record how an operation has computed what it wrote, or its result, where ranks compare that (`Home.traced`).

    Ranks hold different slices, so they can not compare values. They compare traces: checksums of the operation, its numbers and
    whole operands, and the traces of its sharded operands. After `w.fill_(rank)` two ranks have different traces of w, the one of
    fill_ with 0, the other of fill_ with 1, though each could write its slice without an error.
    """
    writes, anew = func._schema.is_mutable, func in _OVERWRITES
    written = kwargs.get("out", args[0]) if writes else result
    several = isinstance(written, (list, tuple))
    for number, target in enumerate(written if several else [written]):  # type: ignore[arg-type]
        if not isinstance(target, ShardedTensor) or target._of_gradient or not target._home.traced or faking():
            continue
        # of a list, the operands of this element
        own = [arg[number] if several and isinstance(arg, (list, tuple)) and len(arg) == len(written) else arg for arg in args]  # type: ignore[arg-type]
        target._record(trace_of(func._schema.name, *own[1 if anew else 0 :], *kwargs.values()), anew)


def trace_of(*values: object) -> int:
    """Return a checksum of numbers, strings, whole tensors, and the traces of sharded ones; of other values only the class counts."""
    told: list[str] = []

    def tell(leaf: object) -> None:
        if isinstance(leaf, Tensor):
            told.append(str(leaf._trace if isinstance(leaf, ShardedTensor) else checksum(leaf)))
        else:  # devices and addresses differ between ranks
            told.append(repr(leaf) if isinstance(leaf, (int, float, complex, str, torch.dtype)) else type(leaf).__name__)

    tree_map_only(object, tell, values)
    return zlib.crc32(" ".join(told).encode())


def _reads_whole(name: str, tree: object) -> bool:
    """Return whether a function of torch, at rest, is one of gathered parameters: gradients go through it."""
    if name in READS:
        return True
    if name not in NORMS or not torch.is_grad_enabled():  # under no_grad, ranks send the norms of slices
        return False
    return any(param.requires_grad and param._home.shown is not None for param in _found(ShardedParameter, tree))


def _beyond(func: OpOverload, args: tuple, kwargs: dict) -> object:
    """Compute what slices do not allow, and what writes nothing, with gathered tensors (collective) where all of them are of a model
    that shows itself as DTensors, whose operations are collective, too; raise for any other, or if autograd would record it."""
    homes = [tensor._home for tensor in _found(ShardedTensor, (args, kwargs))]
    shown = homes[0].shown
    if func._schema.is_mutable or shown is None or any(home.shown is None for home in homes):
        raise _refusal(func, args, kwargs)
    return shown.view(func, _of_whole(func, args, kwargs), homes[0].name)


def _onto_whole(func: OpOverload, args: tuple, kwargs: dict, targets: Sequence[Tensor]) -> object:
    """Write to whole tensors with gathered operands (collective), if a program takes these tensors for DTensors, too: parameters that
    wait to be sharded, such as those of an average that has run no forward yet. Raise for any other."""
    shown = _found(ShardedTensor, (args, kwargs))[0]._home.shown
    if shown is None or not targets or not all(shown.waits(target) for target in targets):
        raise _refusal(func, args, kwargs)
    return _of_whole(func, args, kwargs)


def _refusal(func: OpOverload, args: tuple, kwargs: dict) -> ShardedAccessError:
    tensors = _found(ShardedTensor, (args, kwargs))
    target = args[0] if _writes_first(func) and isinstance(args[0], Tensor) else None
    names = list(dict.fromkeys(t._home.name for t in tensors))
    of_gradient = any(t._of_gradient for t in tensors)
    whole = "the whole gradient of" if of_gradient else "the whole of"
    grows = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    remedy = remedy_of(func._schema.name, of_gradient, target, grows)
    for tensor in [] if of_gradient or target is not None else tensors[:1]:
        unit, name = tensor._home.unit, tensor._home.name
        if unit and "." in name.removeprefix(f"{unit}."):  # of a module inside
            remedy += (
                f" The forward of {unit} gathers it: to call a module inside of that by itself, name the class of the module in units= of "
                f"zs.shard, beside the class of {unit}."
            )
    kind = ShardedWriteError if isinstance(target, ShardedTensor) else ShardedAccessError
    return kind(f"{func} needs {whole} {', '.join(names[:3])}, of which this rank holds a slice. {remedy}")


def _alias(source: ShardedTensor, held: Tensor | None, shape: tuple[int, ...], home: Home) -> ShardedTensor:
    """Return an alias, through which writes reach the parameter or gradient of its source."""
    alias = ShardedTensor(held, shape, home, dtype=source.dtype, device=source.device)
    alias._of_parameter, alias._of_gradient, alias._history = source._of_parameter, source._of_gradient, source._history
    return alias


def _view(func: OpOverload, args: tuple, kwargs: dict) -> object:
    """Return p.detach(), or p.view(...): the same slice under another global shape."""
    source, shape = args[0], tuple(args[0].shape)
    if func is aten.view.default:
        shape = tuple(torch.empty(shape, device="meta").view(*args[1:], **kwargs).shape)  # torch checks the shape
        if source._home.hidden_cut is not None and shape != tuple(source.shape):  # several ranges of the larger one
            return _beyond(func, args, kwargs)
    return _alias(source, source._held, shape, source._home)


def _copy_of(func: OpOverload, args: tuple, kwargs: dict) -> ShardedTensor:
    """Apply clone, _to_copy or *_like to the slice; the result is cut alike."""
    source = args[0]
    kwargs = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout", "pin_memory")}  # a slice is 1-D
    local = func(source._local, *args[1:], **kwargs)
    return ShardedTensor(local, tuple(source.shape), source._home)


def _pad(func: OpOverload, args: tuple, kwargs: dict) -> object:
    """Return a copy for a pad of width zero, which Transformers applies to the bias of a tied head; any other pad is beyond slices."""
    if any(args[1]):
        return _beyond(func, args, kwargs)
    return _copy_of(aten.clone.default, args[:1], {})


def _new(func: OpOverload, args: tuple, kwargs: dict) -> Tensor:
    """Apply p.new_zeros(...) and the like, which use only the dtype and device of p."""
    return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)


def _random_(func: OpOverload, args: tuple, kwargs: dict) -> ShardedTensor:
    """Draw the whole tensor, as one process would, and keep this rank's slice (collective if the result depends on the value)."""
    target = args[0]
    target._begin_write()
    if any(kind in func._schema.name for kind in ("dropout", "rrelu")):
        whole = target.detach().full_tensor()
    else:
        whole = torch.empty(tuple(target.shape), dtype=target.dtype, device=target.device)
    with nullcontext() if kwargs.get("generator") is not None or faking() else target._home.drawing():
        func(whole, *args[1:], **kwargs)
    local = target._local
    local.copy_(target._home.slice_of(whole))
    target._end_write(local)
    if target._home.traced and not target._of_gradient and not faking():  # ranks may have other seeds
        target._record(checksum(whole), anew=True)
    return target


def _copy_(func: OpOverload, args: tuple, kwargs: dict) -> object:
    target, source = args[0], args[1]
    if not isinstance(target, ShardedTensor):
        return _onto_whole(func, args, kwargs, [target])
    given = _local_of(source, target)
    target._begin_write()
    local = target._local
    local.copy_(given)
    target._end_write(local)
    if target._of_parameter and not (isinstance(source, ShardedTensor) and source._of_parameter and source._home is target._home):
        target._home.renewed()
    return target


def _rows(func: OpOverload, args: tuple, kwargs: dict) -> object:
    """Return weight[i], one row (nn.Embedding's padding uses it), or weight[a:b], adjacent rows, as a sharded view."""
    defaults: tuple = (0, None, None, 1)
    source, dim, start, stop, step = (*args, *defaults[len(args) - 1 :])
    # only adjacent rows are one range of the flattened tensor; of a larger one that is shown, these are several ranges, too
    if dim % max(len(source.shape), 1) != 0 or step != 1 or source._home.hidden_cut is not None:
        return _beyond(func, args, kwargs)
    shape = tuple(source.shape[1:])
    if func is aten.select.int:
        start %= source.shape[0]  # it may be negative
        stop = start + 1
    else:
        start, stop, _ = slice(start, stop).indices(source.shape[0])
        stop = max(stop, start)
        shape = (stop - start, *shape)
    row_numel = source.numel() // max(source.shape[0], 1)
    home = RangeHome(source._home, f"{source._home.name}[{start}:{stop}]", start * row_numel, (stop - start) * row_numel)
    held = None if source._held is None else source._held[home.begin : home.begin + home.stop - home.start]
    return _alias(source, held, shape, home)


def slice_like(tensor: ShardedTensor, home: Home, shape: Sequence[int], whole: bool = False) -> Tensor:
    """Return this rank's slice of a sharded tensor. Raise ShardedAccessError if it is cut otherwise than `home`'s of that shape.

    whole: the caller gathers it, so ZeRO may have cut it otherwise, and tensor parallelism alone may not.
    """
    own = tensor._home
    parts = [None if each.hidden_cut is None else each.hidden_cut.part for each in (own, home)]
    same = whole or (own.start, own.stop) == (home.start, home.stop)
    if tuple(tensor.shape) != tuple(shape) or parts[0] != parts[1] or not same:
        raise ShardedAccessError(
            f"{own.name} {tuple(tensor.shape)} and {home.name} {tuple(shape)} are cut "
            "differently: expected two tensors sharded alike. Take full_tensor() of both, on all ranks."
        )
    return tensor._local


def _local_of(operand: _T, lead: ShardedTensor) -> _T | Tensor:
    """Return the elements of an operand at `lead`'s slice (of [10 20 30], at [4, 6) of (2, 3): [20 30]); scalars as they are."""
    if isinstance(operand, ShardedTensor):
        return slice_like(operand, lead._home, lead.shape)
    if isinstance(operand, Tensor) and operand.dim() > 0:
        try:
            if operand.shape == lead.shape:
                return lead._home.slice_of(operand)  # this rank takes its own elements
            torch.empty(operand.shape, device="meta").expand(lead.shape)  # may raise: before any rank gathers
            whole = operand.full_tensor() if torch_compat.is_distributed(operand) else operand
            return lead._home.slice_of(whole.expand(lead.shape))
        except RuntimeError as error:
            raise ShardedAccessError(
                f"{lead._home.name}: expected an operand that broadcasts to {tuple(lead.shape)}, got {tuple(operand.shape)}."
            ) from error
    return operand


def _elementwise(func: OpOverload, args: tuple, kwargs: dict) -> object:
    if args and isinstance(args[0], (list, tuple)):  # torch._foreach_...
        return _foreach(func, args, kwargs)
    lead = _found(ShardedTensor, (args, kwargs))[0]
    if any(isinstance(a, Tensor) and a.dim() > len(lead.shape) for a in args):  # the result would have more dimensions
        return _beyond(func, args, kwargs)
    target = args[0] if _writes_first(func) else kwargs.get("out")
    if target is not None and not isinstance(target, ShardedTensor):
        return _onto_whole(func, args, kwargs, [target])
    if target is not None:
        target._begin_write()
    local = func(*(_local_of(a, lead) for a in args), **{k: _local_of(v, lead) for k, v in kwargs.items()})
    if target is not None:
        target._end_write(local)  # the result of an in-place operation, or of one with out=, is its target
        return target
    if not isinstance(local, Tensor):
        raise _refusal(func, args, kwargs)
    return ShardedTensor(local, tuple(lead.shape), lead._home)


def _any_or_all(func: OpOverload, args: tuple, kwargs: dict) -> Tensor:
    """Combine any() or all() over ranks (collective), as in p.isnan().any() or the loop of nn.init.trunc_normal_."""
    (tensor,) = args
    home, found = tensor._home, func(tensor._local)
    if home.hidden_cut is None:
        return func(home.gather_local(found.view(1)))
    home.before_meeting("any() or all()")
    told = home.meeting.exchange(bytes([bool(found)]), f"any() or all() of {home.name}")
    return func(torch.tensor([part[0] for part in told], dtype=found.dtype, device=found.device))


def _of_whole(func: OpOverload, args: tuple, kwargs: dict) -> object:
    """Gather the tensors and compute p.data.max() or the like (collective; see READS); raise if autograd would record it."""
    differentiable = any(isinstance(result.type, torch.TensorType) for result in func._schema.returns)  # not torch.equal
    if (
        differentiable
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in _found(ShardedTensor, (args, kwargs)))
    ):
        raise _refusal(func, args, kwargs)
    args, kwargs = tree_map_only(ShardedTensor, ShardedTensor.full_tensor, (args, kwargs))
    return func(*args, **kwargs)


def _masked_fill_(func: OpOverload, args: tuple, kwargs: dict) -> object:
    """Fill a tensor where a mask is True: a sharded one slice by slice; for a whole one, gather the sharded mask (collective)."""
    target, mask, value = args
    if not isinstance(target, ShardedTensor) and mask._computed:
        return func(target, mask.full_tensor(), value)
    return _elementwise(func, args, kwargs)


def _norm(func: OpOverload, args: tuple, kwargs: dict) -> object:
    result = take_norms(func, args, kwargs)
    return _beyond(func, args, kwargs) if result is NotImplemented else result


def _unscale(func: OpOverload, args: tuple, kwargs: dict) -> None:
    """Unscale gradients for torch.amp.GradScaler, where they rest; what is not finite on one rank counts on all (collective)."""
    gradients, found_inf, inverse = args
    sharded = [gradient for gradient in gradients if isinstance(gradient, ShardedTensor)]
    if not all(gradient._of_gradient for gradient in sharded):
        raise _refusal(func, args, kwargs)
    if sharded[0]._home.unscale([gradient._home for gradient in sharded], float(inverse)):
        found_inf.fill_(1.0)
    whole = [gradient for gradient in gradients if not isinstance(gradient, ShardedTensor)]
    if whole:
        func(whole, found_inf, inverse)


_FOREACH_REDUCTIONS = ("_foreach_max", "_foreach_mm", "_foreach_norm", "_foreach_powsum")  # combine elements of one tensor
_STRETCH_NUMEL = 1 << 24  # elements of slices per call of a foreach operation: bounds the copies of offloaded slices


def _foreach(func: OpOverload, args: tuple, kwargs: dict) -> object:
    """Apply a foreach operation, a stretch of its lists at a time: to slices of sharded tensors, to other tensors as they are."""
    leads, writes = args[0], _writes_first(func)
    if not any(isinstance(lead, ShardedTensor) for lead in leads):
        return _onto_whole(func, args, kwargs, leads if writes else [])
    for lead in leads if writes else ():
        if isinstance(lead, ShardedTensor):
            lead._begin_write()
    results: list[Tensor] = []
    begin = numel = 0
    for end, lead in enumerate(leads, 1):
        numel += lead._home.stop - lead._home.start if isinstance(lead, ShardedTensor) else 0
        if numel <= _STRETCH_NUMEL and end < len(leads):
            continue
        part, begin, numel = slice(begin, end), end, 0
        localised = [_stretch(arg, leads, part) for arg in args]
        found = func(*localised, **{key: _stretch(value, leads, part) for key, value in kwargs.items()})
        # what an operation in place has written are the slices of its first list
        for each, local in zip(leads[part], localised[0] if writes else found, strict=True):
            if writes and isinstance(each, ShardedTensor):
                each._end_write(local)
            elif not writes:
                result = ShardedTensor(local, tuple(each.shape), each._home) if isinstance(each, ShardedTensor) else local
                results.append(result)
    return None if writes else results


def _stretch(arg: _T, leads: Sequence[Tensor], part: slice) -> _T | list:
    """Return `part` of a list with one operand for each lead, as slices where the lead is sharded; any other argument as it is."""
    if not isinstance(arg, (list, tuple)) or len(arg) != len(leads):  # a scalar for all
        return arg
    pairs = zip(arg[part], leads[part], strict=True)
    return [_local_of(operand, lead) if isinstance(lead, ShardedTensor) else operand for operand, lead in pairs]


_HANDLERS: dict[OpOverload, Callable] = {
    aten.detach.default: _view,
    aten.alias.default: _view,
    aten.view.default: _view,
    aten.clone.default: _copy_of,
    aten._to_copy.default: _copy_of,
    aten.empty_like.default: _copy_of,
    aten.zeros_like.default: _copy_of,
    aten.ones_like.default: _copy_of,
    aten.full_like.default: _copy_of,
    aten.constant_pad_nd.default: _pad,
    aten.new_empty.default: _new,
    aten.new_empty_strided.default: _new,
    aten.new_full.default: _new,
    aten.new_ones.default: _new,
    aten.new_zeros.default: _new,
    aten.copy_.default: _copy_,
    aten.any.default: _any_or_all,
    aten.all.default: _any_or_all,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _norm,
    aten.select.int: _rows,
    aten.slice.Tensor: _rows,
    aten.masked_fill_.Scalar: _masked_fill_,
    torch_compat.unscale: _unscale,
    aten.zero_.default: _elementwise,
    aten.fill_.Scalar: _elementwise,
    aten.fill_.Tensor: _elementwise,
}

_OVERWRITES = frozenset((aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor))  # write every element
_UNTRACED = frozenset((  # aliases, results without values of operands, and draws in place, which are recorded where they are drawn
    aten.detach.default, aten.alias.default, aten.view.default, aten.select.int, aten.slice.Tensor, aten.new_empty.default,
    aten.new_empty_strided.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default,
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, torch_compat.unscale,
))  # fmt: skip

allow_foreach(ShardedTensor, ShardedParameter)
