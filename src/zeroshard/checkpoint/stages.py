"""Names and optimizer groups that pipeline stages, whose models have different parameters, exchange to save and load together.

    rank 0   stage 0   emb.weight, blocks.0.weight     sends      writes these, the optimizer's groups, progress
    rank 1   stage 0   the same                                   writes its part of these
    rank 2   stage 1   blocks.1.weight, head.weight    sends      writes these
    rank 3   stage 1   the same                                   writes its part of these

Without pipeline parallelism there is one stage, and nothing is exchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from ..errors import ConfigError
from ..seam import Engine, Optimizers, StateSlice, exchange_values
from .heartbeat import raise_first, telling
from .module_state import names_in
from .state_map import param_groups


class Stages:
    """The stages of a pipeline, as one rank knows them."""

    def __init__(self, engine: Engine, optimizer: Optimizers | None, told: list[Any]) -> None:
        """told: what each stage's first rank told (see `agree`), by rank. Raises ConfigError on every rank if optimizers do not match."""
        topology = engine.topology
        self.engine, self.optimizer, self.model, self.world = engine, optimizer, engine.model, topology.world
        self.mesh, self.stage, self.several = topology.mesh, topology.stage, len(topology.stages) > 1
        self.leads = topology.leads  # one rank of a stage writes what is said once for its model
        self.told = [told[ranks[0]] for ranks in topology.stages]
        self._earlier = {name for each in self.told[: self.stage] for name in each["names"]}
        counts = [None if each is None or each["members"] is None else len(each["members"]) for each in self.told]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"the optimizers of the pipeline's stages have {counts} parameter groups: give each the same number (groups may be "
                "empty), or save and load without optimizers."
            )

    @cached_property
    def values(self) -> list[StateSlice]:
        """The parameters of this stage's model; only what does not change is read of them."""
        return self.engine.slices("value")

    def has_first(self, name: str) -> bool:
        """Return whether this is the first stage that has the name in its model."""
        return name not in self._earlier

    def writes(self, part: StateSlice) -> bool:
        """Return whether this rank writes its slice: no earlier stage has it, and no other rank that holds a copy does."""
        return part.counted and self.has_first(part.name)

    @property
    def names(self) -> set[str]:
        """Names in the state dicts of all stages' models, with all names of tied parameters."""
        return {name for each in self.told for name in each["names"]} if self.several else names_in(self.model, self.values)

    @property
    def partly_frozen(self) -> bool:
        """True if some parameters are trained and some are frozen."""
        told = [each["trains"] for each in self.told] if self.several else [_trains(self.values)]
        return any(some for some, _ in told) and any(others for _, others in told)

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the names of their members at all stages, and with this rank's options."""
        assert self.optimizer is not None
        found = param_groups(self.values, self.optimizer)
        for number, group in enumerate(found) if self.several else ():
            group["params"] = list(dict.fromkeys(name for each in self.told for name in each["members"][number]))
        return found


def names_by_stage(
    layers: Sequence[str], saved: Sequence[dict[str, Any]], present: Sequence[dict[str, Any]]
) -> dict[tuple[int, int], str]:
    """Return the parameter of each (stage, number) in groups that DeepSpeed's stages saved, from the model's groups of names.

    A stage numbers its parameters group by group, in a group those of tied layers first, then layer by layer. Where stages began
    is found from how many parameters each has.
    """
    counts = sorted(Counter(stage for group in saved for stage, _ in group["params"]).items())
    names = [name for group in present for name in group["params"]]
    own = {layer: [name for name in names if name.startswith(f"{layer}.")] for layer in layers}

    def cuts(first: int, left: Sequence[tuple[int, int]]) -> Iterator[list[Sequence[str]]]:
        """Yield each division of the layers from `first` on among stages that has as many parameters in each as were saved."""
        if not left and not any(own[layer] for layer in layers[first:]):
            yield []
        for stop in range(first, len(layers) + 1) if left else ():
            if sum(len(own[layer]) for layer in set(layers[first:stop])) == left[0][1]:
                yield from ([layers[first:stop], *rest] for rest in cuts(stop, left[1:]))

    found: dict[tuple[int, int], str] = {}
    for (stage, _), held in zip(counts, next(cuts(0, counts), []), strict=False):  # none: the members will differ
        ordered = [name for layer in sorted(dict.fromkeys(held), key=str.isdigit) for name in own[layer]]
        for theirs, mine in zip(saved, present, strict=True):
            numbers = [member for member in theirs["params"] if member[0] == stage]
            found |= dict(zip(numbers, [name for name in ordered if name in mine["params"]], strict=False))
    return found


def _trains(values: list[StateSlice]) -> list[bool]:
    """Return whether some parameters are trained, and whether some are frozen."""
    trained = {each.trainable for each in values}
    return [True in trained, False in trained]


def agree(
    engine: Engine, optimizer: Optimizers | None, verb: str, arguments: dict[str, Any], problem: Exception | None,
    more: object = None,
) -> tuple[Stages, list[Any]]:  # fmt: skip
    """Raise a rank's problem, or ConfigError if ranks call `verb` with different arguments (collective).

    Return the pipeline's stages, and all ranks' values of `more`.
    """
    world, told = engine.world, None
    if problem is None and len(engine.topology.stages) > 1 and engine.topology.leads:
        try:
            values = engine.slices("value")
            told = {  # what a stage's first rank tells all ranks about it
                "names": sorted(names_in(engine.model, values)),
                "members": None if optimizer is None else [group["params"] for group in param_groups(values, optimizer)],
                "trains": _trains(values),
            }
        except Exception as error:
            problem = telling(error, verb, world.rank)
    everyone = exchange_values(world, (problem, arguments, told, more), f"{verb}: begin")
    raise_first([theirs for theirs, *_ in everyone], world.rank, problem)
    first = everyone[0][1]
    for rank, (_, other, *_) in enumerate(everyone):
        if other != first:
            what = [f"{key}: {first[key]!r} and {value!r}" for key, value in other.items() if value != first[key]]
            raise ConfigError(f"{verb}: ranks 0 and {rank} passed different arguments: {'; '.join(what)}.")
    return Stages(engine, optimizer, [stage for _, _, stage, _ in everyone]), [theirs for *_, theirs in everyone]
