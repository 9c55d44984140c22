"""Refusal of operations that take the memory of a sharded tensor out of torch: pickling, numpy, reads by address.

Programs save a `state_dict()` on all ranks or on rank 0 alone. Gathering here could wait for ranks that never come, so each
method raises ShardedAccessError at once, with the call that saves the whole.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import ShardedAccessError


class HasNoMemory:
    """Mixin of sharded tensors, whose memory no rank has as a whole."""

    _home: Any
    _of_gradient: bool
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

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.numpy()

    def data_ptr(self) -> NoReturn:
        """Raise ShardedAccessError: no rank has the memory of the whole tensor."""
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

    const_data_ptr = data_ptr

    def untyped_storage(self) -> NoReturn:
        """Raise ShardedAccessError, as `data_ptr` does."""
        self.data_ptr()

    storage = untyped_storage

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.data_ptr()
