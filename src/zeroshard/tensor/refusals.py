"""Errors for operations that need more than a slice; each names a remedy, which a test tries (tests/zero/test_refusals.py).

Programs save a `state_dict()` on all ranks or on rank 0 alone, by operations that take a tensor's memory out of torch: pickling,
numpy, reads by address. Gathering there could wait for ranks that never come, so each such method raises ShardedAccessError at
once, with the call that saves the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from ..errors import ShardedAccessError
from ..utils.torch_compat import wrapped_in_ddp
from .home import Home, Sliced

_METHOD = 'In a method of another name than forward: zs.register_forward(module, "encode").'
_NORMS = ("aten::linalg_vector_norm", "aten::_foreach_norm", "aten::norm")


def remedy_of(operation: str, of_gradient: bool, target: Tensor | None, grows: bool) -> str:
    """Return the remedy for an operation that is not possible on slices.

    target: the tensor that is written, if any; a whole one may be written by a sharded one (p -= lr * p.grad at stages 1
    and 2). grows: autograd would record the operation.
    """
    if wrapped_in_ddp():
        return "DistributedDataParallel around a sharded model: leave it out, zs.shard(model) stands in its place."
    if target is not None and not isinstance(target, Sliced):
        remedy = "A whole tensor is to be changed here: take `full_tensor()` of what is sharded (`p.grad.full_tensor()`), on all ranks."
        average = (
            " For a moving average of the model (torch.optim.swa_utils.AveragedModel) take zs.ema(model, decay), which keeps slices "
            "and follows each step."
        )
        return remedy if of_gradient else remedy + average
    if operation in _NORMS and not of_gradient:
        return "For its norm take that of `p.full_tensor()`, on all ranks, or ask for it under torch.no_grad()."
    if of_gradient:
        return "Take `p.grad.full_tensor()`, or zs.full_gradients(model)."
    if target is not None:
        return "Run it inside `with zs.gathered(module, write=True):`."
    if grows:
        return (
            f"Do it in the model's forward, or with `p.full_tensor()`, on all ranks: gradients go through both. {_METHOD} To look at "
            "values alone, `with torch.no_grad(), zs.gathered(module):` (write=True to change them)."
        )
    return (
        "Do it in the model's forward, run it inside `with zs.gathered(module):` (write=True to change it), or take "
        f"`p.full_tensor()`, on all ranks. {_METHOD}"
    )


class HasNoMemory(Sliced):
    """Mixin of sharded tensors, whose memory no rank has as a whole."""

    _pickled_by = "zs.full_state_dict(model) or zs.save"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardedAccessError(
            f"{self._home.name}: a sharded tensor can not be pickled (this rank has a slice only). Use "
            f"{'zs.full_gradients(model)' if self._of_gradient else self._pickled_by}."
        )

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise ShardedAccessError: this rank has only a slice."""
        born = hasattr(self._home, "copy_of")  # under zs.init
        earlier = ", or build the model before zs.init (Transformers: before TrainingArguments(deepspeed=...))" if born else ""
        raise ShardedAccessError(
            f"{self._home.name}: this rank holds a slice; call detach().full_tensor() (collective) first{earlier}."
        )

    tolist = numpy

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        self.numpy()

    def data_ptr(self) -> Any:
        """Return an object that tells a parameter or gradient from others, but is no address: no rank has the memory of the whole tensor.

        Raise ShardedAccessError for a result that was computed from slices.
        """
        if not (self._of_parameter or self._of_gradient):
            self.refuse_memory()
        return NoAddress(self._home, self._of_gradient, self)

    const_data_ptr = data_ptr

    def untyped_storage(self) -> Any:
        """Raise ShardedAccessError: no rank has the memory of the whole tensor. Under zeroshard.fsdp what is returned has an address."""
        if self._home.shown is None or not (self._of_parameter or self._of_gradient):
            self.refuse_memory()
        return self._home.shown.storage(self)

    def refuse_memory(self) -> NoReturn:
        """Raise ShardedAccessError."""
        if self._of_gradient:
            remedy = "take zs.full_gradients(model), on all ranks"
        elif self._pickled_by != HasNoMemory._pickled_by:
            remedy = f"use {self._pickled_by}"
        else:
            remedy = (
                "zs.save_safetensors(model, path) writes all of it from all ranks; elsewhere give zs.full_state_dict(model), taken on "
                "all ranks, for model.state_dict(): model.save_pretrained(folder, state_dict=zs.full_state_dict(model))"
            )
        raise ShardedAccessError(
            f"{self._home.name}: this rank holds a slice, and what reads a tensor's memory (safetensors, save_pretrained) needs "
            f"the whole. To save: {remedy}."
        )

    storage = refuse_memory

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        self.refuse_memory()


@dataclass(frozen=True, repr=False)
class NoAddress:
    """The result of a sharded tensor's `data_ptr`: equal for aliases of one parameter or gradient, and no number.

    So programs count shared parameters once, {p.data_ptr(): p.numel() for p in model.parameters()}, and compare tied ones; whoever
    computes an address from it gets ShardedAccessError, and C code, which expects an int, a TypeError.
    """

    home: Home
    of_gradient: bool
    tensor: HasNoMemory = field(compare=False)

    def _refuse(self, *_: object) -> NoReturn:
        self.tensor.refuse_memory()

    __int__ = __index__ = __add__ = __radd__ = __sub__ = __mod__ = __lt__ = __gt__ = __le__ = __ge__ = __format__ = _refuse
