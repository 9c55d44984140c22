"""Sharded tensors: a tensor subclass that shows the global shape and holds this rank's slice of the elements.

At rest a module holds a sharded parameter, with the global shape, dtype, device and requires_grad, so that names,
state dicts, `numel()` and initialisation code work as on one process. Operations on it:

    in-place initialisation   acts on the global tensor: random draws advance the generator as one process does
    elementwise               local, on slices, if all operands are cut alike (whole tensors are sliced)
    any(), all()              combined over ranks (collective)
    norms                     of the global tensor (collective; tensor/norms.py)
    max(), sum(), ...         under no_grad: of the gathered tensor (collective; `READS` in tensor/op_classes.py)
    in a module's forward     computes with the gathered parameter, as on one process (tensor/op_classes.py)
    any other operation       raises, with the parameter's name and a remedy

`full_tensor()` gathers (collective). A sharded tensor never refers to memory that was released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor, nn

from ..errors import ShardedAccessError, ShardedWriteError
from ..utils import torch_compat
from ..utils.torch_compat import tree_map_only
from .attributes import CarriesAttributes, attributes_of
from .dcp_chunks import chunk_list, shard_at, write_items
from .differentiable import ReadableSlices, ReadableWhole
from .memory_access import HasNoMemory
from .norms import allow_foreach, foreach_norm, whole_norm
from .op_classes import READS, computes
from .refusals import remedy_of, remedy_of_whole
from .rows import RangeHome

aten = torch.ops.aten


class Home(Protocol):
    """Owner of a sharded tensor's storage: has its name and cut, reads and writes the slice, gathers from other ranks."""

    name: str
    start: int  # this rank's elements [start, stop) of the flattened tensor
    stop: int
    comm: Any  # communicator of the ranks that have the other slices

    @property
    def meeting(self) -> Any:
        """Communicator of the ranks that compute norms of the tensor together."""

    @property
    def counts(self) -> bool:
        """True if this rank's slice enters norms; False if it is a copy of another rank's."""

    @property
    def distributed(self) -> bool:
        """True if the tensor is itself a part of a larger one, along tensor or expert parallelism."""

    @property
    def undivided(self) -> bool:
        """True while the tensor's gradient is a weighted sum (zs.backward) that the step will divide."""

    def before_write(self) -> None:
        """Prepare for a write to the slice of a parameter (collective where peers read the slice in place)."""

    def fetch(self, gradient: bool) -> Tensor:
        """Return this rank's slice of the value, or of the gradient, at rest: a view, or a copy if it is offloaded."""

    def after_write(self, local: Tensor, offset: int = 0) -> None:
        """Store `local` (n,) as elements [offset, offset + n) of a parameter's slice, after a write to a view or copy of it."""

    def after_gradient_write(self, local: Tensor, offset: int = 0) -> None:
        """Store `local` (n,) as elements [offset, offset + n) of the gradient's slice, after a write to a view or copy of it."""

    def before_meeting(self, what: str) -> None:
        """Raise ZeroshardError if ranks that the collective `what` needs can not take part."""

    def gather_local(self, local: Tensor) -> Tensor:
        """Return `local`, 1-D, of all ranks, concatenated in rank order: of slices, the flattened tensor (collective)."""

    def gradient(self) -> Tensor | None:
        """Return the reduced gradient as a sharded tensor, or None."""

    def set_gradient(self, value: Tensor | None) -> None:
        """Assign the gradient, or drop it (None)."""

    def lend(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Compute an operation with the gathered parameter if a forward runs, and return its result; else NotImplemented."""

    def assign(self, param: Tensor, value: Tensor) -> None:
        """Carry out `param.data = value`."""


class ParameterHome(Home, Protocol):
    """Home of a parameter, which also receives gradients."""

    def adopt(self, hook: Callable) -> Callable:
        """Return the function that autograd calls, in place of a program's hook, when the local gradient is complete."""

    def arrival(self, sliced: bool) -> Callable[[Tensor], Tensor]:
        """Return a function from a gradient of `to_local()` (sliced) or `full_tensor()` to this rank's local gradient."""


class ShardedTensor(ReadableSlices, HasNoMemory, torch.Tensor):
    """A tensor of the global shape, of which this rank holds elements [home.start, home.stop), flattened."""

    _held: Tensor | None  # (stop - start,), or None: the home fetches the slice at rest
    _home: Home
    _of_parameter = False  # True for an alias of a parameter (p.data, p[0])
    _of_gradient = False  # True for a gradient, or an alias of one

    @staticmethod
    def __new__(
        cls, local: Tensor | None, shape: tuple[int, ...], home: Home, requires_grad: bool = False, *,
        dtype: torch.dtype | None = None, device: torch.device | None = None,
    ) -> ShardedTensor:  # fmt: skip
        """dtype, device: required if `local` is None; else `local` has them."""
        if local is not None:
            dtype, device = local.dtype, local.device
        tensor = torch_compat.make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        tensor._held, tensor._home = local, home
        return tensor

    @property
    def _local(self) -> Tensor:
        """This rank's slice (stop - start,): a view, or (offloaded) a copy, which `_end_write` must store after a write."""
        return self._held if self._held is not None else self._home.fetch(self._of_gradient)

    __torch_function__ = torch_compat.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        # normal_, uniform_ and other draws in place
        if torch.Tag.nondeterministic_seeded in func.tags and _writes_first(func):
            return _random_(func, args, kwargs)
        if func._schema.name.removeprefix("aten::") in READS:
            return _of_whole(func, args, kwargs)
        if torch.Tag.pointwise in func.tags or _is_local_foreach(func):
            return _elementwise(func, args, kwargs)
        raise _refusal(func, args, kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({self._home.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"elements [{self._home.start}, {self._home.stop}) on this rank, requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict) -> ShardedTensor:
        """Copy this rank's slice of a gradient, a result, or a parameter before zs.shard; raise for one of a sharded model."""
        if isinstance(self, ShardedParameter) and hasattr(self._home, "copy_of"):  # made under zs.init, not sharded yet
            return memo.setdefault(id(self), self._home.copy_of(self))
        if isinstance(self, ShardedParameter) or self._of_parameter:
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

    def _write_strided(self, values: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> None:
        """Write `values` to elements of this rank's slice, wherever it rests, selected as in torch.as_strided."""
        _begin_write(self)
        local = self._local
        local.as_strided(size, stride, local.storage_offset() + offset).copy_(values)
        stop = offset + 1 + sum((s - 1) * t for s, t in zip(size, stride, strict=True))
        _end_write(self, local[offset:stop], offset)

    # torch.distributed.checkpoint calls these methods (torch/distributed/_checkpointable.py)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return shard_at(self, index)


class ShardedParameter(CarriesAttributes, ShardedTensor):
    """Sharded tensor that a module holds as its parameter at rest; an instance of nn.Parameter for isinstance."""

    _is_param = True  # the attribute by which isinstance(p, nn.Parameter) accepts a subclass of Tensor
    _home: ParameterHome
    _compute: nn.Parameter  # the tensor that autograd sees while the unit is gathered

    @staticmethod
    def __new__(
        cls, local: Tensor | None, shape: tuple[int, ...], home: ParameterHome, requires_grad: bool = True, *,
        dtype: torch.dtype | None = None, device: torch.device | None = None,
    ) -> ShardedParameter:  # fmt: skip
        return ShardedTensor.__new__(  # type: ignore[return-value]
            cls, local, shape, home, requires_grad, dtype=dtype, device=device
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:  # returns local gradients, as for any data-parallel model
            args, kwargs = tree_map_only(ShardedParameter, lambda param: param._compute, (args, kwargs))
        elif computes(func, args, kwargs, ShardedParameter):
            for param in _parameters_in((args, kwargs)):
                result = param._home.lend(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            if getattr(func, "__name__", "") in READS:
                args, kwargs = tree_map_only(ShardedParameter, lambda param: param.full_tensor(), (args, kwargs))
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

    def register_hook(self, hook: Callable) -> Any:
        """Register a backward hook as on any tensor: it gets the local gradient, of the global shape."""
        return self._compute.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable) -> Any:
        """Register a hook as on any tensor; it gets this parameter, at rest, once its local gradient is complete and was sent."""
        compute = self.__dict__.get("_compute")
        if compute is None:  # before zs.shard, which moves the hook to the compute parameter
            return super().register_post_accumulate_grad_hook(hook)
        return compute.register_post_accumulate_grad_hook(self._home.adopt(hook))


class ReplicatedParameter(ReadableWhole, nn.Parameter):
    """Parameter of a replicated unit: an ordinary parameter whose `.grad` is the reduced gradient."""

    _home: ParameterHome

    @property
    def data(self) -> Tensor:
        """The value, detached, with the parameter's version counter, which masters follow; an assigned value is copied."""
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

    def register_post_accumulate_grad_hook(self, hook: Callable) -> Any:
        """Register a hook as on any tensor; called once the local gradient was sent: `grad` is None, or of earlier backwards."""
        return super().register_post_accumulate_grad_hook(self._home.adopt(hook))

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        """Copy to an ordinary parameter, which belongs to no sharded model."""
        copy = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo.setdefault(id(self), copy)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
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


def _writes_first(func: Any) -> bool:
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _is_local_foreach(func: Any) -> bool:
    name = func._schema.name
    operation = name.removeprefix("aten::_foreach_")
    return operation != name and operation not in ("max", "mm", "norm", "powsum")  # these combine elements of one tensor


def _refusal(func: Any, args: tuple, kwargs: dict) -> ShardedAccessError:
    tensors = _sharded_in((args, kwargs))
    kind = ShardedWriteError if _writes_first(func) and isinstance(args[0], ShardedTensor) else ShardedAccessError
    names = list(dict.fromkeys(t._home.name for t in tensors))
    of_gradient = any(t._of_gradient for t in tensors)
    whole = "the whole gradient of" if of_gradient else "the whole of"
    grows = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    # a whole tensor would be changed by a sharded one, as in p -= lr * p.grad at stages 1 and 2
    if _writes_first(func) and isinstance(args[0], Tensor) and kind is ShardedAccessError:
        remedy = remedy_of_whole(of_gradient)
    else:
        remedy = remedy_of(func._schema.name, of_gradient, kind is ShardedWriteError, grows)
    return kind(f"{func} needs {whole} {', '.join(names[:3])}, of which this rank holds a slice. {remedy}")


def _sharded_in(tree: Any) -> list[ShardedTensor]:
    found: list[ShardedTensor] = []
    tree_map_only(ShardedTensor, found.append, tree)
    return found


def _parameters_in(tree: Any) -> list[ShardedParameter]:
    found: list[ShardedParameter] = []
    tree_map_only(ShardedParameter, found.append, tree)
    return found


def _begin_write(tensor: Tensor) -> None:
    if isinstance(tensor, ShardedParameter) or (isinstance(tensor, ShardedTensor) and tensor._of_parameter):
        tensor._home.before_write()


def _end_write(tensor: Tensor, local: Tensor, offset: int = 0) -> None:
    """Store `local` (n,) as elements [offset, offset + n) of the slice of a parameter or gradient, or of an alias of one."""
    if isinstance(tensor, ShardedParameter) or (isinstance(tensor, ShardedTensor) and tensor._of_parameter):
        tensor._home.after_write(local, offset)
    elif isinstance(tensor, ShardedTensor) and tensor._of_gradient:
        tensor._home.after_gradient_write(local, offset)


def _inherit(alias: ShardedTensor, source: ShardedTensor) -> None:
    """Mark an alias, so that a write through it reaches the parameter or gradient of its source."""
    alias._of_parameter = isinstance(source, ShardedParameter) or source._of_parameter
    alias._of_gradient = source._of_gradient


def _alias(func: Any, args: tuple, kwargs: dict) -> ShardedTensor:
    source = args[0]
    result = ShardedTensor(source._held, tuple(source.shape), source._home, dtype=source.dtype, device=source.device)
    _inherit(result, source)  # so that writes through `p.data` or `p.detach()` are writes to the parameter
    return result


def _copy_of(func: Any, args: tuple, kwargs: dict) -> ShardedTensor:
    """Apply clone, _to_copy or *_like to the slice; the result is cut alike."""
    source = args[0]
    kwargs = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout", "pin_memory")}  # a slice is 1-D
    local = func(source._local, *args[1:], **kwargs)
    return ShardedTensor(local, tuple(source.shape), source._home)


def _pad(func: Any, args: tuple, kwargs: dict) -> ShardedTensor:
    """Return a copy for a pad of width zero, which Transformers applies to the bias of a tied head; refuse any other pad."""
    if any(args[1]):
        raise _refusal(func, args, kwargs)
    return _copy_of(aten.clone.default, args[:1], {})


def _new(func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Apply p.new_zeros(...) and the like, which use only the dtype and device of p."""
    return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)


def _random_(func: Any, args: tuple, kwargs: dict) -> ShardedTensor:
    """Draw the whole tensor, as one process would, and keep this rank's slice."""
    target = args[0]
    _begin_write(target)
    whole = torch.empty(tuple(target.shape), dtype=target.dtype, device=target.device)
    func(whole, *args[1:], **kwargs)
    local = target._local
    local.copy_(whole.view(-1)[target._home.start : target._home.stop])
    _end_write(target, local)
    return target


def _copy_(func: Any, args: tuple, kwargs: dict) -> Tensor:
    target, source = args[0], args[1]
    if not isinstance(target, ShardedTensor):
        raise _refusal(func, args, kwargs)
    given = _local_of(source, target)
    _begin_write(target)
    local = target._local
    local.copy_(given)
    _end_write(target, local)
    return target


def _rows(source: ShardedTensor, start: int, stop: int, shape: tuple[int, ...]) -> ShardedTensor:
    row_numel = source.numel() // max(source.shape[0], 1)
    name = f"{source._home.name}[{start}:{stop}]"
    home = RangeHome(source._home, name, start * row_numel, (stop - start) * row_numel)
    local = None if source._held is None else source._held[home.begin : home.begin + home.stop - home.start]
    view = ShardedTensor(local, shape, home, dtype=source.dtype, device=source.device)
    _inherit(view, source)
    return view


def _select(func: Any, args: tuple, kwargs: dict) -> ShardedTensor:
    """Return weight[i], one row, as a sharded view; nn.Embedding's padding uses it."""
    source, dim, index = args
    if dim % max(len(source.shape), 1) != 0:  # only rows are one range of the flattened tensor
        raise _refusal(func, args, kwargs)
    index %= source.shape[0]  # it may be negative
    return _rows(source, index, index + 1, tuple(source.shape[1:]))


def _slice(func: Any, args: tuple, kwargs: dict) -> ShardedTensor:
    """Return weight[a:b], adjacent rows, as a sharded view."""
    defaults: tuple[Any, ...] = (0, None, None, 1)
    source, dim, start, stop, step = (*args, *defaults[len(args) - 1 :])
    if dim % max(len(source.shape), 1) != 0 or step != 1:  # only adjacent rows are one range of the flattened tensor
        raise _refusal(func, args, kwargs)
    start, stop, _ = slice(start, stop).indices(source.shape[0])
    return _rows(source, start, max(stop, start), (max(stop - start, 0), *source.shape[1:]))


def _local_of(operand: Any, lead: ShardedTensor) -> Any:
    """Return the elements of an operand that meet the slice of `lead`; scalars as they are."""
    if isinstance(operand, ShardedTensor):
        same = (operand._home.start, operand._home.stop) == (lead._home.start, lead._home.stop)
        if operand.shape != lead.shape or not same:
            raise ShardedAccessError(
                f"{operand._home.name} {tuple(operand.shape)} and {lead._home.name} {tuple(lead.shape)} are cut "
                "differently: expected two tensors sharded alike. Take full_tensor() of both, on all ranks."
            )
        return operand._local
    if isinstance(operand, Tensor) and operand.dim() > 0:
        try:
            whole = operand.expand(lead.shape)  # a whole operand: this rank takes its own elements
        except RuntimeError as error:
            raise ShardedAccessError(
                f"{lead._home.name}: expected an operand that broadcasts to {tuple(lead.shape)}, got {tuple(operand.shape)}."
            ) from error
        return whole.reshape(-1)[lead._home.start : lead._home.stop]
    return operand


def _elementwise(func: Any, args: tuple, kwargs: dict) -> Any:
    if args and isinstance(args[0], (list, tuple)):  # torch._foreach_...
        return _foreach(func, args, kwargs)
    lead = next(iter(_sharded_in((args, kwargs))))
    if any(isinstance(a, Tensor) and a.dim() > len(lead.shape) for a in args):  # the result would have more dimensions
        raise _refusal(func, args, kwargs)
    target = args[0] if _writes_first(func) else kwargs.get("out")
    if target is not None and not isinstance(target, ShardedTensor):
        raise _refusal(func, args, kwargs)
    if target is not None:
        _begin_write(target)
    local = func(*(_local_of(a, lead) for a in args), **{k: _local_of(v, lead) for k, v in kwargs.items()})
    if target is not None:
        _end_write(target, local)  # the result of an in-place operation, or of one with out=, is its target
        return target
    if not isinstance(local, Tensor):
        raise _refusal(func, args, kwargs)
    return ShardedTensor(local, tuple(lead.shape), lead._home)


def _any_or_all(func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Combine any() or all() over ranks (collective), as in p.isnan().any() or the loop of nn.init.trunc_normal_."""
    (tensor,) = args
    return func(tensor._home.gather_local(func(tensor._local).view(1)))


def _of_whole(func: Any, args: tuple, kwargs: dict) -> Any:
    """Gather the tensors and compute p.data.max() or the like (collective; see READS); raise if autograd would record it."""
    differentiable = any(isinstance(result.type, torch.TensorType) for result in func._schema.returns)  # not torch.equal
    if differentiable and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _sharded_in((args, kwargs))):
        raise _refusal(func, args, kwargs)
    return func(*tree_map_only(ShardedTensor, ShardedTensor.full_tensor, args), **kwargs)


def _view(func: Any, args: tuple, kwargs: dict) -> ShardedTensor:
    """Return p.view(...): the same slice under another global shape."""
    source = args[0]
    shape = torch.empty(tuple(source.shape), device="meta").view(*args[1:], **kwargs).shape  # torch checks the shape
    view = ShardedTensor(source._held, tuple(shape), source._home, dtype=source.dtype, device=source.device)
    _inherit(view, source)
    return view


def _norm(func: Any, args: tuple, kwargs: dict) -> Any:
    result = (foreach_norm if isinstance(args[0], (list, tuple)) else whole_norm)(func, args, kwargs, ShardedTensor)
    if result is NotImplemented:
        raise _refusal(func, args, kwargs)
    return result


_STRETCH_NUMEL = 1 << 24  # elements of slices per call of a foreach operation: bounds the copies of offloaded slices


def _foreach(func: Any, args: tuple, kwargs: dict) -> Any:
    leads, writes, results, begin, numel = args[0], _writes_first(func), [], 0, 0
    if not any(isinstance(lead, ShardedTensor) for lead in leads):
        raise _refusal(func, args, kwargs)
    for lead in leads if writes else ():
        _begin_write(lead)
    for end, lead in enumerate(leads, 1):
        numel += lead._home.stop - lead._home.start if isinstance(lead, ShardedTensor) else 0
        if numel > _STRETCH_NUMEL or end == len(leads):
            results += _stretch(func, args, kwargs, slice(begin, end), writes)
            begin, numel = end, 0
    return None if writes else results


def _stretch(func: Any, args: tuple, kwargs: dict, part: slice, writes: bool) -> list[Any]:
    """Apply a foreach operation to the tensors in `part` of its lists: to the slices of sharded ones, to others as they are."""
    leads = args[0][part]

    def localise(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)) and len(arg) == len(args[0]):  # one operand for each tensor; else a scalar for all
            pairs = zip(arg[part], leads, strict=True)
            return [_local_of(a, lead) if isinstance(lead, ShardedTensor) else a for a, lead in pairs]
        return arg

    localised = [localise(a) for a in args]
    results = func(*localised, **{k: localise(v) for k, v in kwargs.items()})
    for lead, local in zip(leads, localised[0], strict=True) if writes else ():
        _end_write(lead, local)
    if writes:
        return []
    pairs = zip(results, leads, strict=True)
    return [ShardedTensor(r, tuple(t.shape), t._home) if isinstance(t, ShardedTensor) else r for r, t in pairs]


_HANDLERS: dict[Any, Callable] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
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
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.zero_.default: _elementwise,
    aten.fill_.Scalar: _elementwise,
    aten.fill_.Tensor: _elementwise,
}

allow_foreach(ShardedTensor, ShardedParameter)
