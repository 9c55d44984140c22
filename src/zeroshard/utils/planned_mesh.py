"""Checks whether a layout's file was planned for the ranks of the run that reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .axes import DP, MODEL_AXES, planned_sizes


def planned_otherwise(path: object, plan: Mapping[str, Any], axes: Mapping[str, int], node_size: int | None = None) -> str:
    """Return a sentence, with a remedy, if a layout's file was made for another number or mesh of ranks than this run's; else "".

    axes: number of ranks along "pp", "dp" and "tp"; 1 if missing. node_size: number of ranks of a node, if known.
    """
    planned, found = planned_sizes(plan["mesh"]), planned_sizes(axes)
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
    """Return whether a plan cuts the model along pp or tp differently from `axes`, so that it does not hold for this run."""
    return any(plan["mesh"].get(axis, 1) != axes.get(axis, 1) for axis in MODEL_AXES)
