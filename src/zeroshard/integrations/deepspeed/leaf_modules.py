"""Leaf modules: mark modules, by class, name or suffix, whose parameters ZeRO stage 3 is to gather together.

A mark is the attribute `_z3_leaf` of the module. Classes are given as types (subclasses match too) or by name: the bare
class name, or module path and qualified name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from .logs import logger

DEFAULT_LEAF_MODULE_CLASSES: list[str] = [
    f"transformers.models.{family}.modeling_{family}.{prefix}SparseMoeBlock"
    for family, prefix in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module itself is marked."""
    return getattr(model, "_z3_leaf", False)


def z3_leaf_parameter(model: Any) -> bool:
    """Return whether a parameter is in a leaf module (attribute `ds_z3_leaf_module`, which DeepSpeed's engine sets)."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules, in the order of `model.modules()`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark."""
    model.__dict__["_z3_leaf"] = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, and return them, inner ones first. Raises ValueError if there are none."""
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark of the modules of these classes, and return them. Raises ValueError if there are none."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def _mark(model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    assert all(isinstance(given, (type, str)) for given in classes), (
        f"leaf_module_classes: expected a list of classes or of their names, got {classes}"
    )
    found: list[nn.Module] = []
    model.apply(lambda module: found.append(module) if any(_is(module, given) for given in classes) else None)
    if not found and raise_if_not_found:
        has = ", ".join(dict.fromkeys(type(module).__name__ for module in model.modules()))
        raise ValueError(f"leaf_module_classes: no module of {list(classes)} in the model {type(model).__name__}: it has {has}")
    for module in found:
        module.__dict__["_z3_leaf"] = flag
    return found


def _is(module: nn.Module, given: type | str) -> bool:
    cls = type(module)
    if isinstance(given, type):
        return isinstance(module, given)
    return given in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names in `model.named_modules()`. Return them, and the names that do not exist.

    Unless raise_if_not_found is False, raise ValueError for such names, after the modules found have been marked.
    """
    named = dict(model.named_modules())
    found = [named[name] for name in module_names if name in named]
    missing = [name for name in module_names if name not in named]
    return _marked(model, found, missing, flag, raise_if_not_found, "names")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end in one of these suffixes. Return each once, and the suffixes without a module."""
    named = dict(model.named_modules())
    matched = {suffix: [module for name, module in named.items() if name.endswith(suffix)] for suffix in module_name_suffixes}
    found = list({id(module): module for modules in matched.values() for module in modules}.values())
    missing = [suffix for suffix, modules in matched.items() if not modules]
    return _marked(model, found, missing, flag, raise_if_not_found, "suffixes")


def _marked(
    model: nn.Module, found: list[nn.Module], missing: list[str], flag: bool, raise_if_not_found: bool, kind: str
) -> tuple[list[nn.Module], list[str]]:
    for module in found:
        module.__dict__["_z3_leaf"] = flag
    if missing and raise_if_not_found:
        raise ValueError(f"leaf modules: no module of the {kind} {missing} in {type(model).__name__}; see its named_modules()")
    return found, missing


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: Any) -> list[nn.Module]:
    """Mark the modules of `zero_optimization.leaf_module` (classes, names, name_suffixes). Return those marked, each once.

    Log a warning for entries that match nothing, unless they are the defaults. leaf_cfg None: do nothing.
    """
    if leaf_cfg is None:
        return []
    classes, names, suffixes = list(leaf_cfg.classes), list(leaf_cfg.names), list(leaf_cfg.name_suffixes)
    by_name, no_names = set_z3_leaf_modules_by_name(model, names, raise_if_not_found=False)
    by_suffix, no_suffixes = set_z3_leaf_modules_by_suffix(model, suffixes, raise_if_not_found=False)
    found: Iterable[nn.Module] = (*set_z3_leaf_modules(model, classes, raise_if_not_found=False), *by_name, *by_suffix)
    marked = list({id(module): module for module in found}.values())
    if no_names or no_suffixes:
        logger.warning(f"leaf_module: the model has no module of the names {no_names}, none of the suffixes {no_suffixes}")
    elif not marked and classes != DEFAULT_LEAF_MODULE_CLASSES:
        logger.warning(f"leaf_module: the model has no module of the classes {classes}")
    return marked
