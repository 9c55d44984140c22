"""Names of Transformers that are no interface of it, and what is recognised by its behaviour, whatever its name (releases.py says more).

If a release lacks a name, tests/utils/test_transformers_compat.py says which feature is refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .releases import lacking, taken
from .torch_compat import PlanMode

_PROJECT = "transformers"
_EXPERTS = ("num_experts", "has_gate", "has_bias", "is_transposed", "_is_expert_parallel")  # set by `use_experts_implementation`
_IN_FP32 = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")
_LOSS = ["gate_logits", "num_experts", "top_k", "attention_mask"]  # arguments; a function with others computes something else
NAMES = {
    **dict.fromkeys(
        ("_attn_implementation", "is_backend_compatible"), "sequence parallelism (an axis sp) of a Transformers model"
    ),
    "eager_attention_forward": "sequence parallelism (an axis sp) of a Transformers model with attn_implementation='eager'",
    "masking_utils": "packed sequences in a Transformers model over an axis sp, and plans of such models",
    "load_balancing_loss_func": "",  # where its arguments are others, the router's loss is the mean of the ranks' own
    **dict.fromkeys(("integrations.moe", "_apply_gate"), "a plan of a model with experts"),
    "_can_set_experts_implementation": "",  # where it is missing, a model of experts whose layers are all dense has no plan
    **dict.fromkeys(_EXPERTS[1:], "experts in tiles, or divided over an axis ep"),
    "_init_weights": "the values of a Transformers model that was made on the meta device",
    **dict.fromkeys(_IN_FP32, "data_types.keep_in_fp32_modules: 'auto'"),
    "_tp_plan": "",  # where it is missing, heads that are no output embedding stay whole
}


def _taken(owner: Any, name: str) -> Any:
    return taken(owner, _PROJECT, name, NAMES[name])


def is_theirs(thing: object) -> bool:
    """Return whether the class of an object is one of Transformers, or derived from one."""
    return any(kind.__module__.startswith("transformers.") for kind in type(thing).__mro__)


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of Transformers; False, without its import, if the program has not imported it."""
    return is_theirs(module) and isinstance(module, sys.modules[_PROJECT].PreTrainedModel)


def is_own_loss(function: Callable) -> bool:
    """Return whether a loss function is one that Transformers brings, not the program's own."""
    return getattr(function, "__module__", "").startswith("transformers.loss.")


def recomputes(model: nn.Module) -> bool:
    """Return whether modules recompute their activations: Transformers' switch is on, or torch's wrapper is there."""
    switches = ("is_activation_checkpointing", "gradient_checkpointing")  # of a model, from 5.23 on; of each of its layers
    return any(
        type(module).__name__ == "CheckpointWrapper" or any(getattr(module, name, False) is True for name in switches)
        for module in model.modules()
    )


# -- attention and masks ---------------------------------------------------------------------------------------------


def attention_of(config: Any) -> str:
    """Return the name of the attention function that a model is configured for."""
    return _taken(config, "_attn_implementation")


def takes_registered_attention(model: Any) -> bool:
    """Return whether a model calls the functions of Transformers' registry of attention functions."""
    return _taken(model, "is_backend_compatible")()


def replace_eager(config: Any, name: str) -> list[Any]:
    """Configure a model for another function than eager attention. Return the handle that undoes it; none for other models."""
    if attention_of(config) != "eager":
        return []
    config._attn_implementation = name
    return [SimpleNamespace(remove=lambda: setattr(config, "_attn_implementation", "eager"))]


def eager_attention(module: Any) -> Callable:
    """Return the function by which a module computes eager attention: the one of this name in the file that defines its class."""
    files = (vars(sys.modules[kind.__module__]) for kind in type(module).__mro__)
    found = next((file["eager_attention_forward"] for file in files if "eager_attention_forward" in file), None)
    if found is None:
        name = "eager_attention_forward"
        raise lacking(_PROJECT, f"{name} beside {type(module).__name__}", NAMES[name])
    return found


@functools.cache
def _asks_for_packed(answer: Callable[[Callable, Tensor], Tensor | None]) -> bool:
    """Wrap the function that finds packed sequences, once for the process; return whether masks then ask `answer`.

    The function is the one in Transformers' module of masks whose only argument is `position_ids`. It is tried on tensors without
    values, as in a plan: if `answer` is asked and takes them for one sequence, causal attention has no mask.
    """
    try:
        masks: Any = importlib.import_module("transformers.masking_utils")
        make, config = masks.create_causal_mask, sys.modules[_PROJECT].LlamaConfig(attn_implementation="sdpa")
    except (ImportError, AttributeError):
        return False
    for name, function in list(vars(masks).items()):
        if inspect.isfunction(function) and list(inspect.signature(function).parameters) == ["position_ids"]:
            wrapped = functools.wraps(function)(functools.partial(answer, function))
            setattr(masks, name, wrapped)
    required = {each.name: None for each in inspect.signature(make).parameters.values() if each.default is each.empty}
    with PlanMode(), contextlib.suppress(Exception):
        given = {"config": config, "inputs_embeds": torch.empty(1, 4, 1), "position_ids": torch.zeros(1, 4, dtype=torch.long)}
        return make(**required | given) is None
    return False


def answer_for_packed(answer: Callable[[Callable, Tensor], Tensor | None], what: str) -> None:
    """Let `answer(function, position_ids)` say where masks look for packed sequences; `function` is Transformers' own.

    Raise ConfigError, which begins with `what`, if masks of the installed release do not ask it.
    """
    if not _asks_for_packed(answer):
        raise lacking(_PROJECT, "function of masking_utils, find_packed_sequence_indices(position_ids), that masks ask", what)


# -- the router's loss -----------------------------------------------------------------------------------------------


def balancing_losses(module: nn.Module) -> list[tuple[ModuleType, str]]:
    """Return the load-balancing losses in the files that define a class of a Transformers model: (Python module, name).

    They are recognised by the names of their arguments.
    """
    files = {kind.__module__: sys.modules.get(kind.__module__) for kind in type(module).__mro__ if is_pretrained(module)}
    found = []
    for file in filter(None, files.values()):
        for name, function in vars(file).items():
            if inspect.isfunction(function) and list(inspect.signature(function).parameters) == _LOSS:
                found.append((file, name))
    return found


# -- experts ---------------------------------------------------------------------------------------------------------


def are_experts(module: nn.Module) -> bool:
    """Return whether a module has the attributes that Transformers' `use_experts_implementation` sets on experts.

    Raise ConfigError where a module of Transformers has several of them, but not all: a release that sets others.
    """
    missing = [name for name in _EXPERTS if name not in module.__dict__]
    if missing and len(missing) < len(_EXPERTS) - 2 and is_theirs(module):
        known = f"{', '.join(missing)} of {type(module).__name__} (experts are known by their {', '.join(_EXPERTS)})"
        raise lacking(_PROJECT, known, NAMES["has_gate"])
    return not missing


def can_have_experts(model: Any) -> bool:
    """Return whether a model of Transformers, whose layers may all be dense, computes experts by a function of the registry."""
    return getattr(model, "_can_set_experts_implementation", bool)()


def spread_experts(module: Any) -> bool:
    """Return whether Transformers has spread the experts of a module over ranks."""
    return getattr(module, "_is_expert_parallel", False)


def form_of(experts: Any) -> tuple[bool, bool, bool]:
    """Return whether experts have gates, biases, and weights (experts, in, out)."""
    return experts.has_gate, experts.has_bias, experts.is_transposed


def apply_gate(experts: Any, rows: Tensor) -> Tensor:
    """Return the activations (rows, width) of gated experts for the products (rows, 2 width) of gate and up projections."""
    return _taken(experts, "_apply_gate")(rows)


def compute_experts_by(model: Any, name: str, function: Callable) -> None:
    """Make a Transformers model compute its experts by `function`, under a name in Transformers' registry."""
    try:
        importlib.import_module("transformers.integrations.moe").ExpertsInterface.register(name, function)
    except (ImportError, AttributeError):
        raise lacking(_PROJECT, "integrations.moe.ExpertsInterface", NAMES["integrations.moe"]) from None
    model.set_experts_implementation(name)


# -- what a class of models declares ---------------------------------------------------------------------------------


def tensor_parallel_plan(model: nn.Module) -> dict[str, str]:
    """Return the styles of modules, by pattern, that a Transformers model's class adds to those of its base model."""
    return getattr(type(model), "_tp_plan", None) or {}


def initialiser(model: nn.Module) -> Callable[[nn.Module], object] | None:
    """Return the method by which a model initialises each of its modules (also models of others have it), or None."""
    return _taken(model, "_init_weights") if is_pretrained(model) else getattr(model, "_init_weights", None)


def kept_in_fp32(module: nn.Module, half: bool) -> list[str]:
    """Return the names of modules, inside of a module, that its class keeps in fp32; half: also of those that may be bf16, not fp16."""
    own = functools.partial(_taken, module) if is_pretrained(module) else lambda name: getattr(module, name, None)
    return [name for attribute in _IN_FP32[: 1 + half] for name in own(attribute) or ()]
