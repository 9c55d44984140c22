"""Views of gathered copies, which w[:, 2] or w.t() of a parameter at rest gives to a program that takes it for a DTensor; and its
storage, whose address can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor

from ..errors import ShardedWriteError
from ..seam import ShardedTensor
from ..utils import torch_compat
from ..utils.torch_compat import OpOverload, tree_map_only


class GatheredView(torch.Tensor):
    """A view of a copy of a whole tensor. It reads as any tensor; a write raises, since it would not reach the sharded tensor.

    What is computed with it, or copied of it (`clone()`, `contiguous()`), is an ordinary tensor.
    """

    _copy: Tensor
    _name: str  # of the sharded tensor

    @staticmethod
    def __new__(cls, copy: Tensor, name: str) -> GatheredView:
        made = torch_compat.make_wrapper_subclass(cls, copy.shape, copy.stride(), dtype=copy.dtype, device=copy.device)
        made._copy, made._name = copy, name
        return made

    @classmethod
    def __torch_function__(cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> object:
        if func is Tensor.contiguous:  # of a tensor that is contiguous, torch returns the tensor itself
            return args[0]._copy.contiguous(*args[1:], **(kwargs or {}))
        with torch_compat.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        found: list[GatheredView] = []
        tree_map_only(GatheredView, found.append, (args, kwargs))
        arguments = func._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        written: list[GatheredView] = []
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                tree_map_only(GatheredView, written.append, given.get(argument.name))
        if written:
            raise ShardedWriteError(
                f"{func} would write to a copy of {written[0]._name}, of which this rank holds a slice. Run it inside `with "
                "zs.gathered(module, write=True):`, or write the whole: `p.copy_(whole)`."
            )
        args, kwargs = tree_map_only(GatheredView, lambda view: view._copy, (args, kwargs))
        return viewed(func, func(*args, **kwargs), found[0]._name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple:
        return self._copy.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self._copy.clone()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"GatheredView({self._name}, {self._copy!r})"

    def numpy(self, *, force: bool = False) -> object:  # type: ignore[override]
        """Return an array that is a copy."""
        return self._copy.clone().numpy(force=force)

    def tolist(self) -> object:  # type: ignore[override]
        """Return the elements."""
        return self._copy.tolist()

    def data_ptr(self) -> int:
        """Return the address of the copy."""
        return self._copy.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the copy."""
        return self._copy.untyped_storage()

    def storage(self) -> torch.TypedStorage:
        """Return the storage of the copy; torch.distributed.checkpoint then copies the view out of it."""
        return self._copy.storage()


def viewed(func: OpOverload, result: object, name: str) -> object:
    """Return the result of an operation on a gathered copy of tensor `name`: where it is a view, such that a write raises."""
    return tree_map_only(Tensor, lambda each: GatheredView(each, name), result) if func.is_view else result


@dataclass(frozen=True)
class NoMemory:
    """The result of a sharded tensor's `untyped_storage`: programs compare its address with another's; all else raises."""

    tensor: ShardedTensor

    def data_ptr(self) -> object:
        """Return the tensor's own `data_ptr()`."""
        return self.tensor.data_ptr()

    def __getattr__(self, name: str) -> NoReturn:
        self.tensor.refuse_memory()
