"""The axes that a mesh may have: the table AXES, of which each rule about axes reads a column. A new axis is a row.

Names of axes are written here, in zs.parallelize (parallel/), and in the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DP, TP, EP, PP = "dp", "tp", "ep", "pp"


@dataclass(frozen=True)
class Axis:
    """Row of the table: what the ranks along an axis hold and compute.

    cuts_parameters: each holds a box of the tensors that are DTensors over the axis ("boxes"), or other parameters ("whole"); if
    "no", all hold the same ones. shards_states: ZeRO shards over the axis; if neither, its ranks are replicas. cuts_batch: each
    reads another part of the batch. gradient: that of a parameter is the "mean" or the "sum" over the axis. ZeRO reduces along
    axes that cut no parameters; along the others, DTensors and the pipeline do.
    """

    name: str
    cuts_parameters: Literal["no", "boxes", "whole"]
    shards_states: bool
    cuts_batch: bool
    gradient: Literal["mean", "sum"]


AXES = {
    axis.name: axis
    for axis in (
        #    name            cuts_parameters  shards_states  cuts_batch  gradient
        Axis(DP,             "no",            True,          True,       "mean"),
        Axis("dp_replicate", "no",            False,         True,       "mean"),
        Axis("dp_shard",     "no",            True,          True,       "mean"),
        Axis(TP,             "boxes",         False,         False,      "sum"),
        Axis(EP,             "boxes",         False,         False,      "sum"),
        Axis(PP,             "whole",         False,         False,      "sum"),
    )
}  # fmt: skip
MODEL_AXES = tuple(axis.name for axis in AXES.values() if axis.cuts_parameters != "no")
PLANNED = (PP, DP, TP)  # axes of a layout, outermost first


def role(name: str) -> Axis:
    """Return the row of an axis. An axis of another name is one of data parallelism."""
    return AXES.get(name, AXES[DP])


def planned_sizes(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of ranks along each axis of a layout; 1 for axes that are missing."""
    return {axis: axes.get(axis, 1) for axis in PLANNED}


def cuts_model(axes: Mapping[str, int]) -> bool:
    """Return whether a rank has only a part of the model. axes: number of ranks by name."""
    return any(size > 1 and role(axis).cuts_parameters != "no" for axis, size in axes.items())
