"""DeepSpeed's names for sequence parallelism (Ulysses): groups of ranks along sp, and the loader that cuts batches.

    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", sequence_parallel_size=2, micro_batch_size=1)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    loader = UlyssesSPDataLoaderAdapter(loader, mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group(), 2, engine.device)

`initialize` shards the model over the mesh dp x sp, which replaces its attention; `register_with_transformers` only notes the size.
Neighbouring ranks are along sp.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ...activations.ulysses import sequence_of
from ...comm import backend_select
from ...data.sequence import cut
from ...errors import ConfigError
from ...utils.axes import DP, SP
from ...utils.transformers_compat import attention_of, is_theirs
from .accelerator import getter
from .sections import DeepSpeedConfigError


class SequenceGroups:
    """The object `mpu` of sequence parallelism: groups of `size` neighbouring ranks.

    only_in_training: a model in evaluation mode attends to what its rank reads, as without sequence parallelism.
    """

    def __init__(self, size: int, only_in_training: bool = False) -> None:
        """Make the process groups (collective)."""
        rank, world = backend_select.rank_and_size()
        if size < 1 or world % size:
            near = max(each for each in range(1, max(size, 1) + 1) if world % each == 0)
            raise DeepSpeedConfigError(f"sequence_parallel_size={size} does not divide the {world} ranks: {near} does.")
        self.size, self.only_in_training = size, only_in_training
        self._rank, self._world = rank, world
        self.world = _world()
        self._sequence, self._data = None, None
        if not backend_select.in_threads() and dist.is_initialized():  # ranks that are threads have no process groups
            along = [list(range(first, first + size)) for first in range(0, world, size)]
            self._sequence = [dist.new_group(ranks) for ranks in along][rank // size]
            self._data = [dist.new_group(list(ranks)) for ranks in zip(*along, strict=True)][rank % size]

    @property
    def mesh(self) -> dict[str, int] | None:
        """The mesh for zs.shard; None where there is one rank along sp."""
        return {DP: self._world // self.size, SP: self.size} if self.size > 1 else None

    get_sequence_parallel_group, get_sequence_parallel_world_size = getter("_sequence"), getter("size")
    get_data_parallel_group = getter("_data")

    def get_sequence_parallel_rank(self) -> int:
        return self._rank % self.size

    def get_data_parallel_world_size(self) -> int:
        return self._world // self.size

    def get_data_parallel_rank(self) -> int:
        return self._rank // self.size

    def attend(self, model: nn.Module) -> None:
        """Set for a sharded model when its attention is over whole sequences."""
        sequence = sequence_of(model)
        if sequence is not None:
            sequence.only_in_training = self.only_in_training


def _world() -> object:
    return dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None


_here = threading.local()  # .groups: the latest, for which deepspeed.utils.groups asks; ranks may be threads


def groups_of(size: int, only_in_training: bool = False) -> SequenceGroups:
    """Return the groups of `size` ranks along sp, which deepspeed.utils.groups then returns as well (collective if they are new)."""
    groups = getattr(_here, "groups", None)
    if groups is None or groups.size != size or groups.world is not _world():  # another process group
        groups = _here.groups = SequenceGroups(size)
    groups.only_in_training = only_in_training
    return groups


def _of_latest(name: str, otherwise: int | None) -> Callable[[], Any]:
    """Return a function that calls this method of the latest groups, and returns `otherwise` where there are none."""
    return lambda: getattr(_here.groups, name)() if hasattr(_here, "groups") else otherwise


_get_sequence_parallel_group = _of_latest("get_sequence_parallel_group", None)
_get_sequence_parallel_world_size = _of_latest("get_sequence_parallel_world_size", 1)
_get_sequence_parallel_rank = _of_latest("get_sequence_parallel_rank", 0)


class UlyssesSPAttentionHF(nn.Module):
    """The door to sequence parallelism for models of Transformers; no module of it is made, since zs.shard replaces attention."""

    @classmethod
    def register_with_transformers(
        cls, model_name_or_path: Any, core_attn_implementation: str, sequence_parallel_size: int, micro_batch_size: int = 1,
        seq_length: int | None = None, seq_length_is_variable: bool = True, disable_in_eval: bool = False, max_length: int | None = None,
    ) -> SequenceGroups | None:  # fmt: skip
        """Return the `mpu` for deepspeed.initialize, whose model then attends to the tokens of `sequence_parallel_size` ranks.

        Lengths may vary: micro_batch_size, seq_length, seq_length_is_variable and max_length have no effect. disable_in_eval: a
        model in evaluation mode attends to what its own rank reads. Return None for a size of 1. Raises ValueError if the model
        is configured for another attention than `core_attn_implementation`.
        """
        if sequence_parallel_size == 1:
            return None
        config = getattr(model_name_or_path, "config", None)  # of a model, of an adapted one, or of a module around one
        configured = attention_of(config) if is_theirs(config) else core_attn_implementation
        if configured != core_attn_implementation:
            raise ValueError(
                f"core_attn_implementation={core_attn_implementation!r}, and the model is configured for {configured!r}: give both the same "
                f"(model.set_attn_implementation({core_attn_implementation!r}))."
            )
        return groups_of(sequence_parallel_size, disable_in_eval)


class UlyssesSPDataLoaderAdapter:
    """Loader over a loader that reads other batches on each rank along sp: they compute them together, one after the other.

        batches of ranks 0, 1     a, b                         ->  a of rank 0, its tokens; then b of rank 1, its tokens

    A batch has `input_ids`, `labels` and, perhaps, `position_ids` (made where missing); the result has `shift_labels` for `labels`.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: object = None) -> None:
        """device: has no effect, since batches are exchanged and stay on the host."""
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size = dl, sp_rank, sp_group, sp_world_size
        self.iter = iter(dl)
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Exchange the next batch of each rank along sp (collective). Raises StopIteration at the loader's end; it begins anew then."""
        try:
            mine = next(self.iter)
        except StopIteration:
            self.iter = iter(self.dl)
            raise
        if not isinstance(mine, Mapping) or "labels" not in mine:
            raise ConfigError("UlyssesSPDataLoaderAdapter: expected batches that are mappings with input_ids and labels.")
        everyone: list[Any] = [None] * self.sp_world_size
        dist.all_gather_object(everyone, {k: v.cpu() if hasattr(v, "cpu") else v for k, v in mine.items()}, group=self.sp_group)
        for batch in everyone:  # by pickle: ranks of the group are trusted
            part = cut(batch, self.sp_rank, self.sp_world_size, shift_labels=True)
            self.micro_batches.append(
                {name: value for name, value in part.items() if name not in ("labels", "num_items_in_batch")}
            )
