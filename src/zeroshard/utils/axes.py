"""The axes that a mesh may have: the table AXES, of which each rule about axes reads a column. A new axis begins with a row.
The last two functions check whether a layout's file was planned for the ranks of the run that reads it.

Names of axes are written here, in zs.parallelize (parallel/), and in the command line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DP, TP, EP, PP, SP = "dp", "tp", "ep", "pp", "sp"


@dataclass(frozen=True)
class Axis:
    """Row of the table: what the ranks along an axis hold and compute.

    cuts_parameters: each holds a box of the tensors that are DTensors over the axis ("boxes"), or other parameters ("whole"); if
    "no", all hold the same ones. shards_states: ZeRO shards over the axis; if neither, its ranks are replicas. cuts_batch: each
    reads another part of the batch. gradient: that of a parameter is the "mean" or the "sum" over the axis. ZeRO reduces along
    axes that cut the batch or no parameters; along the others, DTensors and the pipeline do. attaches: modules of activations/
    that change a model's forwards where it is sharded over the axis (axes/along_axis.py).

    Where an axis cuts parameters and the batch, both holds: of the parameters that it does not cut, ZeRO shards the states over it,
    and reduces the gradients. Of those that it cuts (experts), a rank's gradient has come from the tokens of all ranks along the
    axis: it is their sum, which ZeRO reduces over the other axes alone and turns into the mean over this one, too.
    """

    name: str
    cuts_parameters: Literal["no", "boxes", "whole"]
    shards_states: bool
    cuts_batch: bool
    gradient: Literal["mean", "sum"]
    attaches: tuple[str, ...] = ()

    @property
    def is_data(self) -> bool:
        """Return whether ranks along the axis are data-parallel, with respect to the parameters that it does not cut."""
        return self.cuts_batch or self.cuts_parameters == "no"


AXES = {
    axis.name: axis
    for axis in (
        #    name            cuts_parameters  shards_states  cuts_batch  gradient  attaches
        Axis(DP,             "no",            True,          True,       "mean"),
        Axis("dp_replicate", "no",            False,         True,       "mean"),
        Axis("dp_shard",     "no",            True,          True,       "mean"),
        Axis(TP,             "boxes",         False,         False,      "sum"),
        Axis(EP,             "boxes",         True,          True,       "mean",   ("router_loss",)),
        Axis(PP,             "whole",         False,         False,      "sum"),
        Axis(SP,             "no",            True,          True,       "mean",   ("sequence_parallel", "router_loss")),  # cuts tokens
    )
}  # fmt: skip
MODEL_AXES = tuple(axis.name for axis in AXES.values() if axis.cuts_parameters != "no")
PLANNED = (PP, DP, TP)  # axes of every layout, outermost first; it may have ep or sp as well


def role(name: str) -> Axis:
    """Return the row of an axis. An axis of another name is one of data parallelism."""
    return AXES.get(name, AXES[DP])


def reads_other_sequences(name: str) -> bool:
    """Return whether ranks along an axis read other sequences; along sp they read other tokens of the same sequences."""
    return role(name).cuts_batch and name != SP


def planned_sizes(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of ranks along each axis of a layout; 1 for axes that are missing."""
    return {axis: axes.get(axis, 1) for axis in PLANNED}


def cuts_model(axes: Mapping[str, int]) -> bool:
    """Return whether a rank has only a part of the model. axes: number of ranks by name."""
    return any(size > 1 and role(axis).cuts_parameters != "no" for axis, size in axes.items())


def planned_otherwise(path: object, plan: Mapping[str, Any], axes: Mapping[str, int], node_size: int | None = None) -> str:
    """Return a sentence, with a remedy, if a layout's file was made for another number or mesh of ranks than this run's; else "".

    axes: number of ranks along each axis; 1 if missing. node_size: number of ranks of a node, if known.
    """
    planned, found = ({axis: each.get(axis, 1) for axis in (*PLANNED, EP, SP)} for each in (plan["mesh"], axes))
    nodes = (plan.get("node_size"), node_size)
    apart = planned == found and None not in nodes and nodes[0] != nodes[1]
    if planned == found and not apart:
        return ""

    def words(sizes: Mapping[str, int], node: int | None) -> str:
        shown = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1 or axis == DP)
        return f"{math.prod(sizes.values())} ranks ({shown})" + f" in nodes of {node}" * apart

    again = f"zeroshard plan MODEL --ranks {math.prod(found.values())}" + f" --node-size {node_size}" * apart
    return (
        f"config: {path} was planned for {words(planned, nodes[0])}, and this run has {words(found, nodes[1])}: its forecast of memory and "
        f"time and its batch sizes do not hold here. Plan again: {again} --auto --global-batch {plan.get('global_batch', 'N')} --write-config {path}"
    )


def other_model_axes(plan: Mapping[str, Any], axes: Mapping[str, int]) -> bool:
    """Return whether a plan cuts the model along pp, ep or tp differently from `axes`, so that it does not hold for this run."""
    return any(plan["mesh"].get(axis, 1) != axes.get(axis, 1) for axis in MODEL_AXES)
