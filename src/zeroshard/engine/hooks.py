"""Attaches a runtime to its model: registers all module and gradient hooks, and removes them on close.

Around a block that was compiled before sharding (`block.compile()`) the runtime is called outside of the compiled call, so that
torch.compile traces nothing of this library; in a later compilation `torch.compiler.disable` makes the hooks opaque.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from ..config import Config
from ..errors import ModelChanged, ShardedAccessError, StallError
from ..utils import torch_compat
from ..utils.dtypes import follows_precision
from ..utils.module_names import take_own_names
from ..utils.tensor_tree import Exchanged, cast_floating, caster
from .auto_wrap import Policy, casts
from .part import distribution_of
from .reduction import gradient_hook
from .runtime import Runtime
from .tensor.sharded_tensor import ShardedParameter
from .unit import Unit

_attached: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()


def attach(runtime: Runtime) -> None:
    """Register all hooks of a runtime; `detach` is the inverse."""
    model = runtime.model
    runtime.comm.progress.models.add(model)
    _attached[id(runtime)] = runtime
    torch_compat.watch_backwards((Exception,), _backward_failed)  # once for the process; later calls do nothing
    for module, inside, around in casts(model, runtime.config):
        _attach_policy(runtime, module, inside, around)
    if runtime.config.cast_buffers:
        runtime.handles.append(_CastBuffers(model, runtime.config))
    for unit in runtime.units:
        for module in unit.modules if unit.sharded or unit.entries.distributed else ():
            _attach_unit(runtime, unit, module)
            if unit.sharded:  # torch.save(module) raises this, not an error about hooks
                module.__dict__["__reduce_ex__"] = runtime.__reduce_ex__
        for group in unit.trainable:  # by torch's method: a parameter's own one wraps hooks of the program (engine/user_hooks.py)
            for index, param in enumerate(group.compute):
                runtime.handles.append(Tensor.register_post_accumulate_grad_hook(param, gradient_hook(group, index)))

    def zero_grad(set_to_none: bool = True) -> None:
        """Drop or zero gradients as torch does, and also local sums, weights and norms, which `p.grad` does not show."""
        runtime.zero_grad(set_to_none)
        if type(model).zero_grad is not nn.Module.zero_grad:  # the user's class has one of its own
            type(model).zero_grad(model, set_to_none)

    before = torch.compiler.disable(lambda _module, args, kwargs: runtime.root_enter(args, kwargs))
    after = torch.compiler.disable(lambda _module, _args, output: runtime.root_exit(output))
    runtime.handles.append(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    runtime.handles.append(model.register_forward_hook(after, always_call=True))
    model.__dict__["zero_grad"] = zero_grad
    model.__dict__["__reduce_ex__"] = runtime.__reduce_ex__
    for module, name in _replaced(model):
        module.__dict__.setdefault(name, functools.partial(_REPLACEMENTS[name], module))  # the program's own stays
    runtime.handles.append(model.register_load_state_dict_pre_hook(take_own_names))


def also_remove(runtime: Runtime, handles: Iterable[Any]) -> None:
    """Let `detach` remove the hooks of another package as well."""
    runtime.handles += handles


def detach(runtime: Runtime) -> None:
    """Remove every hook; the inverse of `attach`."""
    runtime.comm.progress.models.discard(runtime.model)
    _attached.pop(id(runtime), None)
    for handle in runtime.handles:
        handle.remove()
    for module, compiled in runtime.compiled:
        torch_compat.set_compiled_call(module, compiled)
    runtime.model.__dict__.pop("zero_grad", None)
    for module in (runtime.model, *(module for unit in runtime.units for module in unit.modules)):
        module.__dict__.pop("__reduce_ex__", None)
    for module, name in _replaced(runtime.model):
        if getattr(module.__dict__.get(name), "func", None) is _REPLACEMENTS[name]:
            del module.__dict__[name]
    runtime.handles, runtime.compiled = [], []


def _registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Ignore the version that torch counts when a forward registers a parametrization (PEFT's LoRA): no value was written."""
    if type(module) is ParametrizationList and param is not None:
        for runtime in filter(None, [where() for where in _attached.valuerefs()]):
            for unit in runtime.units:
                unit.entries.set_to_itself(param)


def _backward_failed(error: BaseException) -> None:
    """Get the error that ended a backward of this process; raise another one if a sharded model ran out of memory in it."""
    runtimes = [found for where in _attached.valuerefs() if (found := where()) is not None and not found.closed]
    # on a GPU autograd runs hooks on the device's thread; on CPUs the ranks of other backwards may be threads of this process
    running = [(each, each.backward) for each in runtimes if each.backward is not None and each.backward.thread is not None]
    running = [each for each in running if each[0].comm.device.type != "cpu" or each[1].thread == threading.get_ident()]
    for _, backward in running:
        backward.thread = None  # it is over, and a later thread may have the same number
    mine = [runtime for runtime, _ in running]
    if not mine and len(runtimes) == 1:  # it failed before a gradient reached the model's outputs
        mine = runtimes
    if mine:
        mine[-1].watches.tell(error, mine[-1], "the backward")


register_module_parameter_registration_hook(_registered)  # once: torch calls them for every module of the process


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
    runtimes = filter(None, [where() for where in _attached.valuerefs()])
    runtime = next((each for each in runtimes if any(inner is module for inner in each.model.modules())), None)
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


def _attach_unit(runtime: Runtime, unit: Unit, module: nn.Module) -> None:
    compiled = torch_compat.compiled_call(module)
    if compiled is not None:
        runtime.compiled.append((module, compiled))
        torch_compat.set_compiled_call(module, functools.partial(runtime.run_inside, unit, compiled))
        return

    @torch.compiler.disable
    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        outermost = unit.depth == 0
        runtime.enter(unit)
        return runtime.mark_inputs(unit, args, kwargs) if outermost and unit.marked else None

    after = torch.compiler.disable(lambda _module, _args, output: runtime.exit(unit, output))
    runtime.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    runtime.handles.append(module.register_forward_hook(after, always_call=True))


def _attach_policy(runtime: Runtime, module: nn.Module, inside: torch.dtype, around: torch.dtype) -> None:
    """Run a module in the dtype `inside`: register hooks that cast its inputs to it, and its outputs to `around`."""
    running: list[Exchanged] = []  # arguments of the module's running forwards (they nest)

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if torch.compiler.is_compiling():  # a trace can not follow `Exchanged`
            return cast_floating((args, kwargs), inside)
        running.append(Exchanged(caster(inside), (args, kwargs)))
        return running[-1].value

    def after(module: nn.Module, args: tuple, output: object) -> object:
        if not torch.compiler.is_compiling() and running:
            running.pop().hand_back()
        return cast_floating(output, around)

    runtime.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    runtime.handles.append(module.register_forward_hook(after, always_call=True))


class _CastBuffers:
    """Casts floating-point buffers (not fp64, fp8, fp4) to the dtype of their module; `remove` restores their dtypes."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        default = None if config.precision == "fp32" else config.compute_dtype
        dtypes = Policy(model, config).modules
        self._given: list[tuple[dict, str, torch.dtype]] = []
        wanted = []
        for module in model.modules():
            for name, buffer in torch_compat.own_buffers(module).items():
                dtype = dtypes.get(id(module), default)
                if buffer is not None and dtype is not None and follows_precision(buffer.dtype):
                    self._given.append((torch_compat.own_buffers(module), name, buffer.dtype))
                    wanted.append((torch_compat.own_buffers(module), name, dtype))
        _cast_entries(wanted)

    def remove(self) -> None:
        """Restore the buffers' dtypes on close; values that were rounded stay rounded."""
        _cast_entries(self._given)


def _cast_entries(entries: list[tuple[dict, str, torch.dtype]]) -> None:
    """Cast tensors in dictionaries; a tensor that several dictionaries hold is cast once and stays shared."""
    cast: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}  # holds the original, so that its id is not reused
    for holder, name, dtype in entries:
        given = holder[name]
        holder[name] = cast.setdefault((id(given), dtype), (given, given.to(dtype)))[1]
