"""What takes the elements of a sharded tensor out of torch is refused by name: pickling, numpy, and whatever reads memory by its address.

Those who save a model read `state_dict()` on all ranks or on rank 0 alone, so nothing here may wait for a peer: each such call
raises at once, wherever it is made, and says how the whole is saved.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import ShardedAccessError


class HasNoMemory:
    """Mixed into sharded tensors."""

    _home: Any
    _of_gradient: bool
    _pickled_by = "zs.full_state_dict(model) or zs.save"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardedAccessError(
            f"{self._home.name}: a sharded tensor can not be pickled (this rank has a slice only). Use "
            f"{'zs.full_gradients(model)' if self._of_gradient else self._pickled_by}."
        )

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: this rank has a slice only."""
        born = hasattr(self._home, "copy_of")  # under zs.init
        earlier = ", or build the model before zs.init (Transformers: before TrainingArguments(deepspeed=...))" if born else ""
        raise ShardedAccessError(
            f"{self._home.name}: this rank holds a slice; call detach().full_tensor() (collective) first{earlier}."
        )

    tolist = numpy

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.numpy()

    def data_ptr(self) -> NoReturn:
        """Refused: the memory of the whole is on no rank."""
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
        """As `data_ptr`."""
        self.data_ptr()

    storage = untyped_storage

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.data_ptr()
