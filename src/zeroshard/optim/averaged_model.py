"""`zs.ema`: an exponential moving average of a model's parameters, sharded as the masters are.

    zs.ema       average = parameters                                    or what `load_state_dict` is given
    later        average = decay average + (1 - decay) parameters        after each step that was not skipped

Each rank keeps one fp32 value for each element of its shard (at every stage), on the tier of the optimizer's states. The
average follows the fp32 masters where the group has masters, else the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ..config import Tier
from ..engine.ledger import AVERAGES
from ..engine.rest import Rest
from ..engine.runtime import Runtime, runtime_of
from ..engine.unit import ParamGroup
from ..engine.verbs import begin
from ..errors import ConfigError, ZeroshardError
from ..utils.module_names import own_state
from ..values.tensor_stream import full_tensors, put_full_tensors

_CHUNK_NUMEL = 4 << 20  # elements copied at a time if source or target is offloaded


def ema(model: nn.Module, decay: float = 0.999) -> AveragedModel:
    """Start to average a sharded model's trained parameters: after each optimizer step from now on (not collective).

    Args:
        decay: 0 to 1, the weight of the old average in an update. `AveragedModel.decay` may be changed between steps.

    The average starts from the present parameters, as a copy of them does that a program averages by itself; from the average of
    an earlier run with `AveragedModel.load_state_dict`. torch.optim.swa_utils.AveragedModel, with get_ema_multi_avg_fn(decay), copies
    the parameters at its first update: for its numbers call `zs.ema` after the first step. The average takes 4 bytes for each
    element of the shard. `extra={"ema": average}` saves and loads it in slices, at any stage and number of ranks.

    Raises:
        ConfigError: decay is not a number from 0 to 1.
        ZeroshardError: the model is not sharded, or has no optimizer.
    """
    runtime = runtime_of(model)
    if isinstance(decay, bool) or not isinstance(decay, Real) or not 0.0 <= decay <= 1.0:
        raise ConfigError(f"zs.ema: decay: expected a number between 0 and 1, got {decay!r}.")
    if runtime.optimizer is None:
        raise ZeroshardError(f"zs.ema averages over steps: {runtime.expected_optimizer()}")
    return AveragedModel(runtime, float(decay))


class AveragedModel:
    """The average of one model's parameters, returned by `zs.ema`; `updates` counts the steps that it has averaged."""

    def __init__(self, runtime: Runtime, decay: float) -> None:
        """`ema` calls this; it documents and checks the arguments."""
        begin(runtime, "zs.ema", note=False)
        self.model, self.runtime, self.decay, self.updates = runtime.model, runtime, decay, 0
        self._number = max(len(group.averages) for group in runtime.groups)  # of this average; all trained groups have as many
        self._shards: list[tuple[ParamGroup, Rest]] = []
        for group in (group for group in runtime.groups if group.trainable):
            dtype = torch.promote_types(_source(group)[0].dtype, torch.float32)
            self._shards.append((group, runtime.tiers.rest(AVERAGES, group.offload, group.layout.shard_numel, dtype)))
        for group, rest in self._shards:  # all or, if memory has run out above, none
            group.averages.append(rest)
        self._aside: dict[int, Rest] = {}  # id of a group -> copy of its values, inside `swapped`
        self._take(None)
        runtime.optimizer.core.after_step.append(self._follow)

    def _follow(self) -> None:
        self._take(self.decay)
        self.updates += 1

    @torch.no_grad()
    def _take(self, decay: float | None) -> None:
        """Compute average = decay average + (1 - decay) parameters; with decay None, average = parameters."""
        self.runtime.gate.refresh([group for group, _ in self._shards])
        for group, average in self._shards:
            source, first = _source(group)
            for start, stop in _chunks(average, source):
                if average.resident:
                    mine, given = average.load(start, stop), source.load(first + start, first + stop)
                else:
                    mine, given = average.host(start, stop), source.host(first + start, first + stop)
                mine.copy_(given) if decay is None else mine.lerp_(given.to(mine.dtype), 1 - decay)
                if not average.resident and average.view(start, stop) is None:  # `mine` is a copy of what rests on disk
                    average.write(start, mine).wait()

    # -- use ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def swapped(self, model: nn.Module | None = None) -> Iterator[nn.Module]:
        """Replace the parameters by the average, rounded to their dtype, while the context lasts (collective).

        Inside, evaluation, `zs.full_state_dict` and `zs.stream_full_tensors` work; other verbs raise. The exit restores the
        parameters bit for bit, from a copy of the parameters' shard that is kept on the average's tier meanwhile.
        """
        if model is not None and runtime_of(model) is not self.runtime:
            raise ConfigError("AveragedModel.swapped: expected the model that was given to zs.ema, got another one.")
        begin(self.runtime, "AveragedModel.swapped")
        self.runtime.gate.wait()
        self._exchange(self._lend)
        self.runtime.moved.lent = "AveragedModel.swapped()"
        try:
            yield self.model
        finally:
            self.runtime.moved.lent = ""
            self._exchange(self._give_back)

    @torch.no_grad()
    def _exchange(self, write: Callable[[ParamGroup, Rest], None]) -> None:
        """Write this rank's shards of all groups by `write(group, average)`; gather replicated parameters again (collective)."""
        runtime, groups = self.runtime, [group for group, _ in self._shards]
        runtime.gate.invalidate()  # units drop gathered copies of the values that are about to be replaced
        runtime.comm.exchange(b"", "AveragedModel.swapped")  # a barrier: no peer reads this rank's shards any more
        runtime.comm.fence_write(synchronised=True)
        for group, average in self._shards:
            write(group, average)
            group.mark_written()  # a backward of an earlier forward raises, as after a step
        works = [group.values.gather() for group in groups if not group.values.sharded]
        for work in works:
            work.wait()
        if works:
            runtime.comm.exchange(b"", "averaged parameters gathered")  # no rank may write shards that a peer still copies
        runtime.comm.fence_read()

    def _lend(self, group: ParamGroup, average: Rest) -> None:
        """Copy the group's values to `_aside`, then the average into the values."""
        values, tiers = group.values.rest, self.runtime.tiers
        if id(group) not in self._aside:
            self._aside[id(group)] = tiers.place(group.offload, values.numel, values.dtype)
            tiers.ledger.enter(AVERAGES, values.nbytes, group.offload.tier)
        _copy(values, self._aside[id(group)])
        _copy(average, values)

    def _give_back(self, group: ParamGroup, average: Rest) -> None:
        """Copy the group's values back from `_aside`, and free the copy; its file on disk is kept for the next `swapped`."""
        aside = self._aside[id(group)]
        _copy(aside, group.values.rest)
        if group.offload.tier is not Tier.DISK:
            self.runtime.tiers.ledger.strike(AVERAGES, aside.nbytes, group.offload.tier)
            del self._aside[id(group)]

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with whole averages, in the dtype in which they are kept, on every rank (collective).

        Frozen parameters and buffers have the model's values.
        """
        begin(self.runtime, "AveragedModel.full_state_dict")
        kept = {id(group): rest for group, rest in self._shards}
        return full_tensors(self.model, lambda group: kept.get(id(group), group.values.rest))

    state_dict = full_state_dict

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Replace the averages by whole ones, the same on every rank: this rank takes its slices (all ranks must call it).

        state_dict: of `full_state_dict`, of a copy of the model that another program has averaged, or of torch's AveragedModel, whose
        count of updates is taken too. Names may begin with "module.". Buffers and frozen parameters in it are not read.

        Raises:
            ConfigError: an average is missing, or has another shape; nothing was changed.
        """
        begin(self.runtime, "AveragedModel.load_state_dict")
        given = dict(state_dict)
        if given.keys().isdisjoint(own_state(self.model)):  # a model may have a submodule of this name
            consume_prefix_in_state_dict_if_present(given, "module.")
        kept = {id(group): rest for group, rest in self._shards}
        self.runtime.gate.wait()
        put_full_tensors(self.model, lambda group: kept.get(id(group)), given, "AveragedModel.load_state_dict")
        self.updates = int(given.get("n_averaged", self.updates))

    def close(self) -> None:
        """Stop updating the average after steps. zs.close(model) frees its memory."""
        follow = self.runtime.optimizer.core.after_step
        if self._follow in follow:
            follow.remove(self._follow)

    # -- in checkpoints: see checkpoint/user_state.py ----------------------------------------------------------

    def kind_of_slices(self, model: nn.Module) -> str:
        """Return the kind of the average among `Engine.slices`. Raise ConfigError if it is that of another model."""
        if model is not self.model:
            raise ConfigError("extra: an average of another model: expected that of the model that is saved or loaded.")
        return f"average:{self._number}"

    def settings(self) -> dict[str, float]:
        """Return decay and updates; checkpoints hold the averages themselves by slices."""
        return {"decay": self.decay, "updates": self.updates}

    def take_settings(self, saved: dict[str, float]) -> None:
        """Take the number of updates; keep this object's decay."""
        self.updates = int(saved["updates"])

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ZeroshardError(
            "an average of a sharded model can not be pickled: zs.save(..., extra={'ema': average}), or full_state_dict()."
        )


def _source(group: ParamGroup) -> tuple[Rest, int]:
    """Return the Rest of a group's masters (of its values where it has no masters), and this rank's first element in it."""
    rest, shard_numel = group.masters.stepped, group.layout.shard_numel
    return rest, group.comm.rank * shard_numel if rest.numel != shard_numel else 0


def _copy(source: Rest, target: Rest) -> None:
    """Copy `source` to `target`, rounded to its dtype."""
    for start, stop in _chunks(target, source):
        values = source.load(start, stop)
        target.store(start, values if target.resident else values.to(target.dtype))


def _chunks(target: Rest, source: Rest) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, stop) of `target`: one if both rest on the device, else chunks of _CHUNK_NUMEL elements."""
    step = max(target.numel, 1) if target.resident and source.resident else _CHUNK_NUMEL  # range() takes no step of 0
    for start in range(0, target.numel, step):
        yield start, min(start + step, target.numel)
