"""`zs.ema`: an exponential moving average of a model's parameters, sharded as the masters are.

    zs.ema       average = parameters                                    or what `load_state_dict` is given
    later        average = decay average + (1 - decay) parameters        after each step that was not skipped

Each rank keeps one fp32 value for each element of its shard (at every stage), on the tier of the optimizer's states. The
average follows the fp32 masters where the group has masters, else the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import NoReturn

from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ..errors import ConfigError, ModelClosed, ZeroshardError
from ..seam import Engine, engine_of
from ..utils.module_names import own_state


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
    engine = engine_of(model)
    if isinstance(decay, bool) or not isinstance(decay, Real) or not 0.0 <= decay <= 1.0:
        raise ConfigError(f"zs.ema: decay: expected a number between 0 and 1, got {decay!r}.")
    if engine.optimizer is None:
        raise ZeroshardError(f"zs.ema averages over steps: {engine.expected_optimizer()}")
    return AveragedModel(engine, float(decay))


class AveragedModel:
    """The average of one model's parameters, returned by `zs.ema`; `updates` counts the steps that it has averaged."""

    def __init__(self, engine: Engine, decay: float) -> None:
        """`ema` calls this; it documents and checks the arguments."""
        engine.begin("zs.ema", note=False)
        self.model, self.engine, self.decay, self.updates = engine.model, engine, decay, 0
        self.averages = engine.averages()
        self._ends = engine.after_step(self._follow)

    def _follow(self) -> None:
        self.averages.take(self.decay)
        self.updates += 1

    # -- use ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def swapped(self, model: nn.Module | None = None) -> Iterator[nn.Module]:
        """Replace the parameters by the average, rounded to their dtype, while the context lasts (collective).

        Inside, evaluation, `zs.full_state_dict` and `zs.stream_full_tensors` work; other verbs raise. The exit restores the
        parameters bit for bit, from a copy of the parameters' shard that is kept on the average's tier meanwhile.
        """
        if model is not None and engine_of(model).model is not self.model:
            raise ConfigError("AveragedModel.swapped: expected the model that was given to zs.ema, got another one.")
        self.engine.begin("AveragedModel.swapped")
        self.averages.lend("AveragedModel.swapped()")
        try:
            yield self.model
        finally:
            self.averages.give_back()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with whole averages, in the dtype in which they are kept, on every rank (collective).

        Frozen parameters and buffers have the model's values.
        """
        self.engine.begin("AveragedModel.full_state_dict")
        return self.averages.full()

    state_dict = full_state_dict

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Replace the averages by whole ones, the same on every rank: this rank takes its slices (all ranks must call it).

        state_dict: of `full_state_dict`, of a copy of the model that another program has averaged, or of torch's AveragedModel, whose
        count of updates is taken too. Names may begin with "module.". Buffers and frozen parameters in it are not read.

        Raises:
            ConfigError: an average is missing, or has another shape; nothing was changed.
        """
        self.engine.begin("AveragedModel.load_state_dict")
        given = dict(state_dict)
        if given.keys().isdisjoint(own_state(self.model)):  # a model may have a submodule of this name
            consume_prefix_in_state_dict_if_present(given, "module.")
        self.averages.put_full(given, "AveragedModel.load_state_dict")
        self.updates = int(given.get("n_averaged", self.updates))

    def close(self) -> None:
        """Stop updating the average after steps. zs.close(model) frees its memory."""
        self._ends.remove()

    # -- in checkpoints: see checkpoint/user_state.py ----------------------------------------------------------

    def kind_of_slices(self, model: nn.Module) -> str:
        """Return the kind of the average among `Engine.slices`. Raise ConfigError for another model, ModelClosed after zs.close."""
        if model is not self.model:
            raise ConfigError("extra: an average of another model: expected that of the model that is saved or loaded.")
        if self.engine.closed:  # the model may have been sharded again, and have another average of this number
            raise ModelClosed(
                "extra: an average that was made before zs.close(model), and its values went with it: make a new one, zs.ema(model)."
            )
        return f"average:{self.averages.number}"

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
