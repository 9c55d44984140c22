"""Inner optimizers: copies of the user's optimizer that step other tensors than its parameters: runs, chunks, whole matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ..utils import torch_compat

Options = dict[str, Any]  # of a parameter group, by name: each optimizer class has its own
State = dict[str, Any]  # the states of one tensor, by name: tensors, numbers, whatever the class keeps


def inner_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and options without parameters, without a call of the class's constructor."""
    inner = object.__new__(type(optimizer))
    inner.__dict__.update(optimizer.__dict__)
    inner.__dict__.pop("step", None)  # a scheduler's wrapper around the outer optimizer's step
    inner.state = defaultdict(dict)
    inner.param_groups = [dict(group) for group in optimizer.param_groups]
    for name in list(inner.__dict__):
        if name.endswith("_hooks"):
            inner.__dict__[name] = type(inner.__dict__[name])()  # the user's hooks belong to the outer optimizer
    return inner


def optimizer_groups(optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    """Return id of each parameter -> index of its optimizer group."""
    groups = optimizer.param_groups if optimizer is not None else ()
    return {id(param): number for number, group in enumerate(groups) for param in group["params"]}


def members_of(*optimizers: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters in optimizers' groups."""
    return {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}


def fresh(settings: Options) -> Options:
    """Return a copy of settings for the step of one chunk, since the optimizer's class may write into them."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in settings.items()}


def step_alone(
    inner: torch.optim.Optimizer, options: Options, param: Tensor, grad: Tensor, state: State
) -> tuple[Tensor, State, Options]:
    """Step one tensor, in place, with the optimizer's own class.

    Return (value, states, options) after the step. The value lies elsewhere if the class replaces `p.data`. `inner` keeps no
    reference to them.
    """
    leaf = nn.Parameter(param)
    leaf.grad = grad.to(leaf.dtype)
    inner.param_groups = [{**fresh(options), "params": [leaf]}]
    inner.state = defaultdict(dict, {leaf: state} if state else {})
    inner.step()
    after, told = inner.state[leaf], inner.param_groups[0]
    inner.state, inner.param_groups = defaultdict(dict), []
    return leaf.detach(), after, told


def step_together(inner: torch.optim.Optimizer, leaves: list[list[Tensor]], slabs: list[bool], device: torch.device) -> None:
    """Step leaves, given for each of the inner optimizer's groups, by one call of its `step`.

    Groups without leaves are hidden from the call: some classes fail on an empty list. slabs: for each group, whether some of its
    runs are stepped slab by slab. Such a group, if it has no leaves, gets one of no elements, so that a class which counts steps
    in its groups counts this one. (For a group of whole matrices `WholeStep.step` returns the options that the class changes.)
    """
    groups, stand_ins = inner.param_groups, []
    takes_late = not isinstance(inner, torch_compat.EARLY_STATES)  # EARLY_STATES fail on a new leaf, and count no steps in groups
    for group, params, beside in zip(groups, leaves, slabs, strict=True):
        group["params"] = params
        if takes_late and beside and not params:
            stand_ins.append(nn.Parameter(torch.empty(0, device=device)))
            stand_ins[-1].grad = torch.empty_like(stand_ins[-1])
            group["params"] = stand_ins[-1:]
    inner.param_groups = [group for group in groups if group["params"]]
    if inner.param_groups:
        inner.step()
    inner.param_groups = groups
    for group in groups:
        group["params"] = []
    for stand_in in stand_ins:
        inner.state.pop(stand_in, None)


def scaled(grad: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Return a gradient times a factor, in the wider of its dtype and `dtype`, then rounded once to `dtype`; a view if nothing changes."""
    if factor == 1.0:
        return grad.to(dtype)
    return grad.to(torch.promote_types(grad.dtype, dtype)).mul(factor).to(dtype)


def hashable(value: object) -> Hashable:
    """Return a hashable value that is equal for equal scalars."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), tuple(value.reshape(-1).tolist()))
    return value if isinstance(value, Hashable) else repr(value)
