"""Methods of Transformers' models and of torch's encoders that see slices, and are replaced while their model is sharded."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine import hooks
from ..engine.runtime import Runtime
from ..errors import ModelChanged, ShardedAccessError, StallError
from ..tensor.part import distribution_of
from ..tensor.sharded_tensor import ShardedParameter


def replace_methods(runtime: Runtime) -> None:
    """Replace the methods of the modules of a model until the model is closed; what the program itself has put there stays."""
    for module, name in _replaced(runtime.model):
        module.__dict__.setdefault(name, functools.partial(_REPLACEMENTS[name], module))
    runtime.handles.append(types.SimpleNamespace(remove=functools.partial(_restore, runtime.model)))


def _restore(model: nn.Module) -> None:
    for module, name in _replaced(model):
        if getattr(module.__dict__.get(name), "func", None) is _REPLACEMENTS[name]:
            del module.__dict__[name]


def _replaced(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (module, name) of the methods of Transformers' models and torch's encoders that are replaced while the model is sharded."""
    models = [module for module in model.modules() if hasattr(type(module), "resize_token_embeddings")]
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    pairs = (models, "resize_token_embeddings"), (models, "save_pretrained"), (models, "generate"), (encoders, "forward")
    return [(module, name) for modules, name in pairs for module in modules if hasattr(type(module), name)]


def _resize(
    module: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: object, **kwargs: object
) -> object:
    """Replace `resize_token_embeddings` while sharded: raise ModelChanged unless the asked size is the present one."""
    rows = module.get_input_embeddings().weight.shape[0]
    wanted = rows if new_num_tokens is None else new_num_tokens
    wanted = wanted if pad_to_multiple_of is None else -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != rows:
        raise ModelChanged(
            f"{type(module).__name__}.resize_token_embeddings({wanted}): the embedding has {rows} rows, and what is sharded can not be "
            "resized. Resize before zs.shard() and before the optimizer is built; or zs.close(model), resize, build a new optimizer, "
            "and zs.shard() again. Nothing was changed."
        )
    return type(module).resize_token_embeddings(module, new_num_tokens, pad_to_multiple_of, *args, **kwargs)


def _save(
    module: Any, save_directory: object, is_main_process: bool = True, state_dict: object = None, *args: object, **kwargs: object
) -> object:
    """Replace `save_pretrained` while sharded: only the main process, which writes the files, needs weights; others pass none.

    Raise ShardedAccessError if tensor parallelism has cut parameters: one process alone can not gather them.
    """
    if state_dict is None and any(distribution_of(param) is not None for param in module.parameters()):
        raise ShardedAccessError(
            f"{type(module).__name__}.save_pretrained: tensor parallelism has cut its parameters. Pass whole ones: "
            "save_pretrained(folder, is_main_process=rank == 0, state_dict=zs.full_state_dict(model)), on all ranks; or zs.save_safetensors."
        )
    state_dict = {} if state_dict is None and not is_main_process else state_dict
    return type(module).save_pretrained(module, save_directory, is_main_process, state_dict, *args, **kwargs)


def _encode(module: Any, *args: object, **kwargs: object) -> object:
    """Replace `forward` of nn.TransformerEncoder while sharded: where torch may take its fast path, gather the first layer before.

    torch looks at that layer's parameters before it runs the layer. If they are plain tensors, and there is padding, it computes
    without the padded positions, where the encoder's output is then 0; slices would leave values there.
    """
    layer, call = module.layers[0], functools.partial(type(module).forward, module)
    if not (torch.compiler.is_compiling() or layer.training):
        params: list[Any] = [param for param in layer.parameters() if isinstance(param, ShardedParameter)]
        if not (torch.is_grad_enabled() and any(param.requires_grad for param in params)):
            for unit in dict.fromkeys(param._home.group.unit for param in params):
                call = functools.partial(unit.groups[0].runtime.run_inside, unit, call)
    return call(*args, **kwargs)


def _generate(module: Any, *args: object, **kwargs: object) -> object:
    """Replace `generate` while sharded: a rank whose sequences have ended runs forwards until those of all ranks have, if gathers
    need every rank, as Transformers has it for DeepSpeed and FSDP. A StallError names the argument where that was not asked for.

    Ranks tell it over the default process group: others than those that gather would not answer, nor ranks whose data has ended.
    """
    generate = type(module).generate
    given = inspect.signature(generate).bind(module, *args, **kwargs)
    # not stored with the method: a module without sharded parameters may be copied
    runtime = next((each for each in hooks.attached() if any(inner is module for inner in each.model.modules())), None)
    meets = answered = False
    if runtime is not None:
        meets = runtime.attendance.gathers_meet and not all(unit.pinned for unit in runtime.units if unit.sharded)
        answered = dist.is_initialized() and runtime.topology.shards.world_size == dist.get_world_size()
        answered = answered and not runtime.attendance.joined
    synced = given.arguments.get("synced_gpus") if "synced_gpus" in given.signature.parameters else False
    if meets and answered and synced is None:
        synced = given.arguments["synced_gpus"] = True
    try:
        return generate(*given.args, **given.kwargs)
    except StallError as error:
        if synced or not meets:
            raise
        raise StallError(
            "in generate() every rank takes part in the forwards of the others: where ranks end at other lengths, pass "
            f"synced_gpus=True on all of them. {error}"
        ) from error


_REPLACEMENTS: dict[str, Callable] = {
    "resize_token_embeddings": _resize,
    "save_pretrained": _save,
    "generate": _generate,
    "forward": _encode,
}
