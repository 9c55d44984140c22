"""Leaf modules: mark modules, by class, name or suffix, whose parameters ZeRO stage 3 is to gather together.

A mark is the attribute `_z3_leaf` of the module. Classes are given as types (subclasses match too) or by name: the bare
class name, or module path and qualified name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from torch import nn

from .config_keys import KEYS
from .logs import logger
from .sections import Section

DEFAULT_LEAF_MODULE_CLASSES: list[str] = list(KEYS["zero_optimization.leaf_module.classes"].default)
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module itself is marked."""
    return getattr(model, "_z3_leaf", False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules, in the order of `model.modules()`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark."""
    model.__dict__["_z3_leaf"] = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True, *, flag: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, and return them, inner ones first. Raises ValueError if there are none."""
    assert all(isinstance(given, (type, str)) for given in leaf_module_classes), (
        f"leaf_module_classes: expected a list of classes or of their names, got {leaf_module_classes}"
    )
    types = tuple(given for given in leaf_module_classes if isinstance(given, type))
    found: list[nn.Module] = []

    def collect(module: nn.Module) -> None:
        cls = type(module)
        names = {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
        if isinstance(module, types) or names.intersection(leaf_module_classes):
            found.append(module)
            set_z3_leaf_module(module, flag)

    model.apply(collect)
    if not found and raise_if_not_found:
        has, classes = ", ".join(dict.fromkeys(type(module).__name__ for module in model.modules())), list(leaf_module_classes)
        raise ValueError(f"leaf_module_classes: no module of {classes} in the model {type(model).__name__}: it has {has}")
    return found


unset_z3_leaf_modules = functools.partial(set_z3_leaf_modules, flag=False)  # removes the marks


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names in `model.named_modules()`. Return them, and the names that do not exist.

    Unless raise_if_not_found is False, raise ValueError for such names, after the modules found have been marked.
    """
    named = dict(model.named_modules())
    matched = {name: [named[name]] if name in named else [] for name in module_names}
    return _mark(model, matched, flag, raise_if_not_found, "names")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end in one of these suffixes. Return each once, and the suffixes without a module."""
    named = dict(model.named_modules())
    matched = {suffix: [module for name, module in named.items() if name.endswith(suffix)] for suffix in module_name_suffixes}
    return _mark(model, matched, flag, raise_if_not_found, "suffixes")


def _mark(
    model: nn.Module, matched: Mapping[str, list[nn.Module]], flag: bool, raise_if_not_found: bool, kind: str
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of each given text. Return them, each once, and the texts without a module."""
    found = list({id(module): module for modules in matched.values() for module in modules}.values())
    missing = [text for text, modules in matched.items() if not modules]
    for module in found:
        set_z3_leaf_module(module, flag)
    if missing and raise_if_not_found:
        raise ValueError(f"leaf modules: no module of the {kind} {missing} in {type(model).__name__}; see its named_modules()")
    return found, missing


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: Section | None) -> list[nn.Module]:
    """Mark the modules of `zero_optimization.leaf_module` (classes, names, name_suffixes). Return those marked, each once.

    Log a warning for entries that match nothing, unless they are the defaults. leaf_cfg None: do nothing.
    """
    if leaf_cfg is None:
        return []
    classes = list(leaf_cfg.classes)
    by_name, no_names = set_z3_leaf_modules_by_name(model, leaf_cfg.names, raise_if_not_found=False)
    by_suffix, no_suffixes = set_z3_leaf_modules_by_suffix(model, leaf_cfg.name_suffixes, raise_if_not_found=False)
    found = [*set_z3_leaf_modules(model, classes, raise_if_not_found=False), *by_name, *by_suffix]
    marked = list({id(module): module for module in found}.values())
    if no_names or no_suffixes:
        logger.warning(f"leaf_module: the model has no module of the names {no_names}, none of the suffixes {no_suffixes}")
    elif not marked and classes != DEFAULT_LEAF_MODULE_CLASSES:
        logger.warning(f"leaf_module: the model has no module of the classes {classes}")
    return marked
