"""Partitions a model into units, by its own structure or as the option `units` says.

    auto     the non-leaf classes that repeat in a ModuleList, Sequential or ModuleDict (outermost first) are blocks;
             large parameters outside the blocks (embedding, head) get units of their own; the rest is the root unit
    model    one unit;   leaf   one unit per module that owns parameters;   classes or a function: those modules

A piece of a module (a tile) is a unit of its own in every mode, since it exists to be gathered alone.
A parameter that is tied across units goes to a unit that is entered through all of its owners. Sizes are in elements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from ..config import Config, Units
from ..engine.parameter import ParamSpec
from ..engine.shard_model import UnitPlan
from ..errors import ConfigError, ShardedAccessError, did_you_mean
from ..tensor.attributes import stays_whole
from ..tensor.part import Cut, Piece, distribution_of
from ..utils import torch_compat
from ..utils.module_names import own_name
from ..utils.torch_compat import original
from .dtypes import Policy, has_forward, is_called

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
ROOT = "(root)"  # the unit that stays gathered from the beginning of a pass to its end
LARGE_FRACTION = 0.25  # a module outside the blocks with this fraction of the largest block's elements gets its own unit


def collect(model: nn.Module, config: Config) -> list[ParamSpec]:
    """Return every parameter to shard once, in the order of named_parameters, with all its owners.

    Raise ShardedAccessError, by name, for a parameter that can not be sharded: sparse, lazy, or trained and integer or complex.
    """
    check_lazy(model)
    specs: dict[int, ParamSpec] = {}
    policy = Policy(model, config)
    for prefix, module in model.named_modules():
        for attribute, param in torch_compat.own_parameters(module).items():
            if param is None or stays_whole(param):
                continue
            name = own_name(model, f"{prefix}.{attribute}" if prefix else attribute)
            if param.layout is not torch.strided:
                raise ShardedAccessError(f"{name}: expected a dense parameter, got layout {param.layout}.")
            if param.is_complex() and param.requires_grad:
                raise ShardedAccessError(
                    f"{name}: expected a real parameter, got {param.dtype}. Keep its two parts, self.{attribute} = "
                    f"nn.Parameter(torch.view_as_real(value)), and compute with torch.view_as_complex(self.{attribute}) in the forward: "
                    "gradients and steps are the same."
                )
            if not param.is_floating_point() and param.requires_grad:
                raise ShardedAccessError(f"{name}: expected a floating-point parameter, got {param.dtype}.")
            dtype, shape = policy.dtype(module, param, config), tuple(param.shape)
            given = ParamSpec(name, param, [], dtype, shape, param.requires_grad, param.dtype, len(specs), distribution_of(param))
            spec = specs.setdefault(id(param), given)
            if spec.dtype != dtype:
                raise ConfigError(
                    f"dtypes: {spec.name} and {name} are one tied parameter, and would be {spec.dtype} and {dtype}. Give both "
                    "of their modules the same dtype, by name or by class."
                )
            spec.owners.append((module, attribute))
    return list(specs.values())


def check_lazy(model: nn.Module) -> None:
    """Raise ShardedAccessError, naming its module, for a lazy parameter or buffer: it gets its shape in the first forward."""
    for prefix, module in model.named_modules():
        for attribute, tensor in (*torch_compat.own_parameters(module).items(), *torch_compat.own_buffers(module).items()):
            if isinstance(tensor, torch_compat.UninitializedTensorMixin):
                where = f" of {prefix}" if prefix else ""
                raise ShardedAccessError(
                    f"{attribute}{where} ({type(module).__name__}) has no shape before the first forward. Run one before zs.shard(), and "
                    "before the optimizer is built, with a batch of the shape that will come: `with torch.no_grad(): model(batch)`."
                )


def device_of(specs: list[ParamSpec]) -> torch.device:
    """Return the device of all parameters; for a meta-device model, the device on which zs.shard will allocate it."""
    devices = {spec.original.device for spec in specs if not spec.original.is_meta}
    if len(devices) > 1:
        raise ConfigError(f"expected all parameters on one device, got {sorted(map(str, devices))}. Move the model first.")
    if devices:
        return devices.pop()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def partition(model: nn.Module, config: Config, specs: list[ParamSpec]) -> list[UnitPlan]:
    """Partition the parameters into units, in the order of the model; every spec is in exactly one unit."""
    # tied to another pipeline stage's parameter: as a unit of its own it has the same shards in both stages (parallel/tied.py)
    alone = [spec for spec in specs if getattr(spec.original, "unit_of_its_own", False)]
    apart = [UnitPlan(spec.name, _unique(owner for owner, _ in spec.owners), [spec]) for spec in alone]
    blocks = find_blocks(model, config.units)
    blocks += [(own_name(model, name), module) for name, module in model.named_modules() if isinstance(module, Piece)]
    plans = {id(module): UnitPlan(name, [module]) for name, module in blocks}
    nearest: dict[int, int | None] = {}  # id of a module -> id of the innermost block around it

    def visit(module: nn.Module, block: int | None) -> None:
        block = id(module) if id(module) in plans else block
        if block is not None and nearest.setdefault(id(module), block) != block:
            nearest[id(module)] = None  # a module shared by two blocks belongs to neither
        for child in module.children():
            visit(child, block)

    visit(model, None)
    rest: list[ParamSpec] = []
    for spec in specs:
        if spec not in alone:
            homes = {nearest.get(id(owner)) for owner, _ in spec.owners}
            home = homes.pop() if len(homes) == 1 else None
            (rest if home is None else plans[home].specs).append(spec)
    units = [plan for plan in plans.values() if plan.specs]
    if config.max_unit_numel is not None:
        units = [part for unit in units for part in _split(unit, config.max_unit_numel)]
    tiles = [unit for unit in units if isinstance(unit.modules[0], Piece)]
    units = _merge([unit for unit in units if unit not in tiles], config.min_unit_numel) + tiles
    units = _rest_units(model, config, units, rest) + units + apart
    return sorted(units, key=lambda unit: min(spec.number for spec in unit.specs))


def find_blocks(model: nn.Module, units: Units, option: str = "units") -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every module that `units` selects, never the root module. option: its name in errors."""
    named = [(own_name(model, n), module) for n, module in model.named_modules() if module is not model and is_called(module)]
    if units == "model":
        return []
    if units == "leaf":
        return [(n, m) for n, m in named if any(p is not None for p in torch_compat.own_parameters(m).values())]
    if units == "auto":
        return _repeated(model, leaves=False) or _repeated(model, leaves=True)
    if callable(units):
        found = [(name, module) for name, module in named if units(name, module)]
    else:
        known = {type(module).__name__ for _, module in named}
        for item in units:
            name = item if isinstance(item, str) else item.__name__
            if name not in known:
                raise ConfigError(
                    f"{option}: the model has no module of class {name!r}.{did_you_mean(name, known)} It has: {sorted(known)}."
                )
        classes = tuple(item for item in units if not isinstance(item, str))
        found = [(name, module) for name, module in named if type(module).__name__ in units or isinstance(module, classes)]
    # modules that torch.compile wraps give way to their wrappers, so that gather and release stay outside of compiled code
    wrappers = {id(original(module)): (name, module) for name, module in named if original(module) is not module}
    return list(dict.fromkeys(wrappers.get(id(module), (name, module)) for name, module in found))


def _repeated(model: nn.Module, leaves: bool) -> list[tuple[str, nn.Module]]:
    """Return the outermost children of containers that have a forward and whose class occurs more than once in the container."""
    found: list[tuple[str, nn.Module]] = []

    def visit(prefix: str, module: nn.Module) -> None:
        children = [(name, child) for name, child in module.named_children() if not isinstance(child, Cut)]
        counts = Counter(type(original(child)) for _, child in children) if isinstance(module, _CONTAINERS) else Counter()
        for name, child in children:
            path = f"{prefix}.{name}" if prefix else name
            is_leaf = next(original(child).children(), None) is None
            has_params = next(child.parameters(), None) is not None
            if counts[type(original(child))] > 1 and has_forward(child) and has_params and (leaves or not is_leaf):
                if not any(child is module for _, module in found):
                    found.append((own_name(model, path), child))
            else:
                visit(path, child)

    visit("", model)
    return found


def _rest_units(model: nn.Module, config: Config, units: list[UnitPlan], rest: list[ParamSpec]) -> list[UnitPlan]:
    """Return the units of parameters outside the blocks: one for each large owner, and the root unit for the others."""
    large_numel = math.inf
    if config.units == "auto" and units:
        large_numel = LARGE_FRACTION * max(unit.numel for unit in units)
    if config.max_unit_numel is not None:
        large_numel = min(large_numel, config.max_unit_numel)
    by_owner: dict[frozenset, UnitPlan] = {}
    root = UnitPlan(ROOT, [model])
    for spec in rest:
        owners = [owner for owner, _ in spec.owners]
        own_numel = sum(p.numel() for p in torch_compat.own_parameters(owners[0]).values() if p is not None)
        tiles = all(isinstance(owner, Piece) for owner in owners)
        alone = model not in owners and all(_is_leaf(owner) for owner in owners)
        if tiles or (own_numel >= large_numel and alone):
            key = frozenset(map(id, owners))
            plan = by_owner.setdefault(key, UnitPlan(spec.name.rpartition(".")[0], _unique(owners)))
            plan.specs.append(spec)
        else:
            root.specs.append(spec)
            # so that these modules gather the root unit if the program calls them directly, without the root's forward
            root.modules = _unique([*root.modules, *owners])
    return [*by_owner.values(), *([root] if root.specs else [])]


def _is_leaf(module: nn.Module) -> bool:
    """Return whether a module has no children and is called."""
    return next(module.children(), None) is None and is_called(module)


def _unique(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())


def _split(unit: UnitPlan, max_numel: int) -> list[UnitPlan]:
    """Split a unit at its leaf modules, if it has more than `max_numel` elements; one leaf module may still have more."""
    if unit.numel <= max_numel:
        return [unit]
    remainder = UnitPlan(unit.name, unit.modules)
    parts: dict[int, UnitPlan] = {}
    for spec in unit.specs:
        owners = _unique(owner for owner, _ in spec.owners)
        if len(owners) == 1 and _is_leaf(owners[0]):
            part = parts.setdefault(id(owners[0]), UnitPlan(spec.name.rpartition(".")[0], owners))
            part.specs.append(spec)
        else:
            remainder.specs.append(spec)
    return [*([remainder] if remainder.specs else []), *parts.values()]


def _merge(units: list[UnitPlan], min_numel: int) -> list[UnitPlan]:
    """Merge neighbouring units until each has at least `min_numel` elements; the last one may have fewer."""
    merged: list[UnitPlan] = []
    for unit in units:
        if merged and merged[-1].numel < min_numel:
            last = merged[-1]
            merged[-1] = UnitPlan(f"{last.name}+{unit.name}", last.modules + unit.modules, last.specs + unit.specs)
        else:
            merged.append(unit)
    return merged
