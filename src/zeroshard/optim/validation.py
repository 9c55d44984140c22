"""Checks of an optimizer at zs.shard: do its steps on flat shards equal its steps on whole parameters?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_

import torch
from torch import Tensor

from ..errors import ConfigError
from ..seam import ONE_OPTIMIZER, ParamSpec
from ..utils.referred_optimizers import other_optimizers
from ..utils.torch_compat import post_accumulate_hooks
from .lion import Lion
from .step_probe import KEEPS_GRADIENTS, Sends, departure, sends
from .whole_matrix import check_whole, declared

# attribute by which torch.distributed.optim marks parameters that it steps in backward
_IN_BACKWARD = "_in_backward_optimizers"
_NOT_ELEMENTWISE = {
    "ADAFACTOR": "has states of a parameter's rows and columns (use the Adafactor of torch or of Transformers)",
    "LARS": "scales each parameter's update by norms of the whole parameter",
    "LBFGS": "takes products of whole gradients, and calls its closure several times",
    "LAMB": "scales each parameter's update by norms of the whole parameter",
    "MUON": "works on whole matrices",
    "SHAMPOO": "works on whole matrices",
    "SOAP": "works on whole matrices",
    "SPARSEADAM": "needs sparse gradients",
}


_ELEMENTWISE = {
    Lion,
    *(getattr(torch.optim, name) for name in (
        "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )),
}  # fmt: skip


def check_optimizer(
    optimizer: torch.optim.Optimizer | None, specs: list[ParamSpec], delayed: bool, others: Sequence[torch.optim.Optimizer] = (), *,
    outside: bool = False,
) -> None:  # fmt: skip
    """Raise ConfigError unless this optimizer's steps on shards of these parameters equal its steps on whole ones.

    optimizer: None if the model has none; hooks on parameters may still step others. delayed: Config.delayed_update is set. others:
    further optimizers of the model. outside: its groups may have parameters that are not the model's.
    """
    if optimizer is not None:
        _check_elementwise(optimizer)
        for name, other in held_optimizers(optimizer):
            raise ConfigError(
                f"optimizer: {type(optimizer).__name__}.{name} holds another optimizer ({type(other).__name__}), which would "
                "step whole parameters, of which each rank has slices. Give the inner optimizer to zs.shard(), and wrap the one "
                "that it returns; replace several inner optimizers by one with a parameter group for each."
            )
        check_whole(optimizer, specs, delayed)
        known = {id(spec.original) for spec in specs}
        for number, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if id(param) not in known and not outside:
                    raise ConfigError(
                        f"the optimizer's group {number} holds a parameter (position {position}, shape "
                        f"{tuple(param.shape)}) that is not the model's. Build the optimizer from the parameters of the "
                        "model that you shard. For ordinary parameters beside these: zs.shard(model), and make the optimizer after it."
                    )
    # hooks on parameters may step other optimizers in backward
    hooked = [spec for spec in specs if post_accumulate_hooks(spec.original) or hasattr(spec.original, _IN_BACKWARD)]
    roots: list[object] = [hook for spec in hooked for hook in post_accumulate_hooks(spec.original).values()]
    found = other_optimizers(
        [*roots, *(getattr(spec.original, _IN_BACKWARD, None) for spec in hooked)],
        [each for each in (optimizer, *others) if each is not None],
    )
    stepped = [spec for spec in hooked if id(spec.original) in found]
    if stepped:
        classes = sorted({type(found[id(spec.original)]).__name__ for spec in stepped})
        more = f" and {len(stepped) - 3} more" if len(stepped) > 3 else ""
        raise ConfigError(
            f"{', '.join(spec.name for spec in stepped[:3])}{more}: a hook steps an optimizer of its own ({', '.join(classes)}) in backward, "
            f"with the gradient of this rank's batch alone, so ranks would get different parameters. {ONE_OPTIMIZER}"
        )


def held_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield the other optimizers that are attributes of this one, or in lists, tuples or dictionaries that are, with the attribute."""
    for name, value in vars(optimizer).items():
        within = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        yield from ((name, held) for held in within if isinstance(held, torch.optim.Optimizer) and held is not optimizer)


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for a class whose step of an element depends on other elements, and so differs on flat shards.

    Classes in _ELEMENTWISE pass, names in _NOT_ELEMENTWISE are refused, and any other class is tried (optim/step_probe.py).
    """
    cls = type(optimizer)
    if cls in _ELEMENTWISE:
        return
    if declared(optimizer) is not None:
        operation = None if cls.__module__.startswith(("torch.", "zeroshard.")) else sends(optimizer)
        if operation is not None:
            raise ConfigError(_sends(cls, operation))
        return
    for base in cls.__mro__:
        reason = _NOT_ELEMENTWISE.get(base.__name__.upper().removeprefix("FUSED"))
        if reason is not None:
            raise ConfigError(
                f"optimizer: {cls.__name__} {reason}, but each rank steps flat slices of the parameters, which takes an elementwise "
                "optimizer. Use for example AdamW, SGD or zs.Lion"
                + (
                    "."  # it takes sparse gradients alone
                    if cls.__name__ == "SparseAdam"
                    else "; or, if it steps each parameter independently of the others, declare that with zs.whole_matrix("
                    f"{cls.__name__}) before zs.shard()."
                )
            )
    try:
        found = departure(optimizer)
    except Sends as error:
        raise ConfigError(_sends(cls, str(error))) from None
    if found is None:
        return
    numbers, groups = (
        ", ".join(map(str, found.groups[:8])) + (", ..." if len(found.groups) > 8 else ""),
        len(optimizer.param_groups),
    )
    of = "" if len(found.groups) == groups == 1 else f" (in group {numbers} of {groups})"
    remedy = (
        "Its step of a parameter depends on other parameters: use for example AdamW, SGD or zs.Lion."
        if not found.alone
        else f"Its step of a parameter does not depend on other parameters: declare that with zs.whole_matrix({cls.__name__}) before "
        f"zs.shard(), or for some groups only with zs.whole_matrix({cls.__name__}, where=lambda param, options: ...)."
    )
    if found.how == KEEPS_GRADIENTS:
        raise ConfigError(
            f"optimizer: in a trial on small tensors, {cls.__name__} stepped by older gradients than it was given{of}: {found.how}. Let its "
            "state hold a copy: p.grad.clone()."
        )
    raise ConfigError(
        f"optimizer: in a trial on small tensors, {cls.__name__} stepped flat slices of parameters differently from whole "
        f"parameters{of}: {found.how}. Each rank steps flat slices, which takes an elementwise optimizer. {remedy}"
    )


def _sends(cls: type, operation: str) -> str:
    return (
        f"optimizer: in a trial, the step of {cls.__name__} sent data to other ranks ({operation}). Its step must not communicate: "
        "zeroshard averages the gradients before it, and not every rank steps every parameter. Make its step find no process group: "
        "where its module has `import torch.distributed as dist`, give that module a `dist` whose is_initialized() returns False."
    )


def check_members(optimizer: torch.optim.Optimizer, members: list[list[Tensor]], named: Callable[[], dict[int, str]]) -> None:
    """Raise ConfigError if a group's parameters are not those in `members`, which it had at zs.shard(); their order is free.

    named: returns the names of the model's parameters, by id.
    """
    now = [group["params"] for group in optimizer.param_groups]
    if len(now) == len(members) and all(
        len(params) == len(then) and all(map(is_, params, then)) for params, then in zip(now, members, strict=True)
    ):
        return
    names = named()
    changes = [] if len(now) == len(members) else [f"there are {len(now)} groups, then there were {len(members)}"]
    for number, (params, then) in enumerate(zip(now, members, strict=False)):
        before, after = {id(p): p for p in then}, {id(p): p for p in params}
        gone = [names.get(key, f"a tensor of shape {tuple(before[key].shape)}") for key in before.keys() - after.keys()]
        new = [names.get(key, f"a tensor of shape {tuple(after[key].shape)}") for key in after.keys() - before.keys()]
        changes += [f"group {number} is without {', '.join(sorted(gone)[:5])}"] if gone else []
        changes += [f"group {number} has {', '.join(sorted(new)[:5])}"] if new else []
    if changes:
        raise ConfigError(
            f"optimizer.param_groups: expected the same parameters as at zs.shard(), but {'; '.join(changes)}. zs.shard() fixes which "
            "parameters each group steps: add others as a group (optimizer.add_param_group). To leave a parameter unchanged, give it "
            "a group with lr=0 and weight_decay=0, drop its gradient (p.grad = None), or set requires_grad=False before "
            "zs.shard()."
        )
