"""Names and optimizer groups that pipeline stages, whose models have different parameters, exchange to save and load together.

    rank 0   stage 0   emb.weight, blocks.0.weight     sends      writes these, the optimizer's groups, progress
    rank 1   stage 0   the same                                   writes its part of these
    rank 2   stage 1   blocks.1.weight, head.weight    sends      writes these
    rank 3   stage 1   the same                                   writes its part of these

Without pipeline parallelism there is one stage, and nothing is exchanged.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..optim.sharded_optimizer import OptimizerCore
from ..zero.runtime import Runtime
from . import module_state
from .safetensors import names_of, prefixes_of
from .state_map import names_of_group, param_groups


class Stages:
    """The stages of a pipeline, as one rank knows them."""

    def __init__(self, runtime: Runtime, core: OptimizerCore | None, told: list[Any]) -> None:
        """told: results of `tell`, by rank. Raises ConfigError on every rank if the stages' optimizers do not match."""
        self.runtime, self.core, topology = runtime, core, runtime.topology
        self.several, self.stage = len(topology.stages) > 1, topology.stage
        self.told = [told[ranks[0]] for ranks in topology.stages]
        self._earlier = {name for each in self.told[: self.stage] for name in each["names"]}
        counts = [None if each is None or each["members"] is None else len(each["members"]) for each in self.told]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"the optimizers of the pipeline's stages have {counts} parameter groups: give each the same number (groups may be "
                "empty), or save and load without optimizers."
            )

    @staticmethod
    def tell(runtime: Runtime, core: OptimizerCore | None) -> Any:
        """Return what a stage's first rank sends to all ranks about the stage, in plain values; None on its other ranks."""
        ranks, groups = runtime.topology.stages, runtime.groups
        if len(ranks) == 1 or runtime.topology.world.rank != ranks[runtime.topology.stage][0]:
            return None
        return {
            "names": sorted(_names(runtime)),
            "members": None if core is None else [group["params"] for group in param_groups(runtime, core)],
            "trains": [any(group.trainable for group in groups), any(not group.trainable for group in groups)],
        }

    def writes(self, name: str) -> bool:
        """Return whether this is the first stage that has the name in its model."""
        return name not in self._earlier

    @property
    def names(self) -> set[str]:
        """Names in the state dicts of all stages' models, with all names of tied parameters."""
        return {name for each in self.told for name in each["names"]} if self.several else _names(self.runtime)

    @property
    def partly_frozen(self) -> bool:
        """True if some parameters are trained and some are frozen."""
        groups = self.runtime.groups
        told = [each["trains"] for each in self.told] if self.several else [[g.trainable, not g.trainable] for g in groups]
        return any(some for some, _ in told) and any(others for _, others in told)

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the names of their members at all stages, and with this rank's options."""
        assert self.core is not None
        found = param_groups(self.runtime, self.core)
        for number, group in enumerate(found) if self.several else ():
            group["params"] = list(dict.fromkeys(name for each in self.told for name in each["members"][number]))
        return found


def _names(runtime: Runtime) -> set[str]:
    prefixes = prefixes_of(runtime.model)
    aliases = {name for group in runtime.groups for spec in group.specs for name in names_of(prefixes, spec)}
    return (
        aliases
        | {name for group in runtime.groups for name, _ in names_of_group(group)}
        | module_state.names_of_others(runtime.model)
    )
