"""Differences between the supported releases of torch (>= 2.11), and every private name of torch that the library uses.

If a release removes a private name, tests/utils/test_torch_compat.py says which name, and what here uses it. No other file of
the library uses private names (tests/test_architecture.py).
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import functools
import hashlib
import importlib
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter, methodcaller
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._ops import OpOverload  # noqa: F401
from torch._subclasses.fake_tensor import (  # noqa: F401
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.autograd import Variable
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # noqa: F401
from torch.nn.utils import parametrize
from torch.optim._muon import muon  # noqa: F401
from torch.utils._python_dispatch import (  # noqa: F401
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes  # noqa: F401
from torch.utils._pytree import tree_map_only  # noqa: F401
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# renamed in torch 2.13; the old names warn there
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# the kernels of scaled_dot_product_attention on a CPU, which also return or take the log-sum-exp of each query's scores
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# GradScaler's operator: (gradients, found_inf, 1 / scale) multiplies gradients, and sets found_inf if one is not finite
unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

_LATER = {  # names imported on first use, since their modules take a second: name here -> (module, name there)
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    "StorageInfo": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    "StridedShard": ("torch.distributed.tensor.placement_types", "_StridedShard"),
    "replicate_with_fsdp": ("torch.distributed._composable.replicate_with_fsdp", "replicate"),
    "stage_backward_weight": ("torch.distributed.pipelining._backward", "stage_backward_weight"),
}
DYNAMO = "torch._dynamo"  # the module's name, for importing it ahead of use
# attributes under which torch.compile, torch's activation wrappers and FullyShardedDataParallel hold the module that they wrap
WRAPPED_AS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _LATER[name]
    return getattr(importlib.import_module(module), there)


# -- tensors -----------------------------------------------------------------------------------------------------

version = attrgetter("_version")  # tensor -> number of in-place writes; raises for an inference tensor
base = attrgetter("_base")  # tensor -> the tensor that it is a view of, or None
storage_id = attrgetter("_cdata")  # storage -> identity of its memory while it lives
local_part = attrgetter("_local_tensor")  # DTensor -> this rank's part, not recorded by autograd
# storage -> offset of its bytes in the file, if torch.load did not read them (FakeTensorMode); else None
checkpoint_offset = attrgetter("_checkpoint_offset")
HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor; swapping tensors leaves them where they are
FAKE_DEVICE = ("fake_device", "_fake_device")  # attributes with a fake tensor's device
# torch's descriptors of `.grad` and `.data`, which subclasses may override
grad_attribute = cast(GetSetDescriptorType, torch.Tensor.grad)
data_attribute = cast(GetSetDescriptorType, torch.Tensor.data)
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
# as `__torch_function__` of a subclass: torch's functions without any override
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
assert_async = torch._assert_async
# tensor classes for which torch's optimizers use foreach functions; classes may be appended
FOREACH_TYPES: list[type[torch.Tensor]] = torch.utils._foreach_utils._foreach_supported_types
fused_adam_, fused_adamw_, fused_sgd_, fused_adagrad_ = (
    torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_,
)  # fmt: skip
_DTENSORS = "torch.distributed.tensor"


def set_local_part(tensor: DTensor, part: torch.Tensor) -> None:
    """Replace this rank's part of a DTensor."""
    tensor._local_tensor = part


def is_distributed(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor."""
    # without it, not imported, or by another thread in this moment: nobody has made one
    return isinstance(value, getattr(sys.modules.get(_DTENSORS), "DTensor", ()))


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a hook for its gradient was registered on a tensor."""
    return any(getattr(tensor, table) for table in HOOK_TABLES)


def rebuilder(by_dtype: bool = False) -> Callable[..., torch.Tensor]:
    """Return the function that unpickles tensors. by_dtype: for dtypes without a storage class; it takes the dtype last."""
    return torch._utils._rebuild_tensor_v3 if by_dtype else torch._utils._rebuild_tensor_v2


def faking() -> bool:
    """Return whether FakeTensorMode is active on this thread."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class QuickFakeMode(FakeTensorMode):
    """FakeTensorMode that finds an operator's cached result sooner: a dry run calls a few operators a hundred thousand times.

    A key has a strided tensor's sizes, dtype, device and flags as one tuple, of which torch derives the many fields of its own; a
    result is made without looking for symbolic sizes.
    """

    def _prep_args_for_hash(self, result: list[object], args: Any, state: Any, *rest: Any) -> None:
        if type(args) is dict:
            result.append(tuple(args))
            args = args.values()
        for arg in args:
            kind = type(arg)
            plain = isinstance(arg, FakeTensor) and arg.fake_mode is self and arg.constant is None and arg.layout is torch.strided
            if plain and not (arg.is_quantized or arg.is_conj() or arg.is_neg()):
                storage, offset = arg.untyped_storage().nbytes(), arg.storage_offset()
                flags = arg.dtype, arg.fake_device, arg.requires_grad, arg.is_inference()
                result.append((kind, arg.shape, arg.stride(), offset, storage, flags))
            elif kind in (list, tuple):
                result.append((kind, len(arg)))
                self._prep_args_for_hash(result, arg, state, *rest)
            elif kind in (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout):
                result.append((kind, arg))
            else:
                super()._prep_args_for_hash(result, (arg,), state, *rest)

    def _get_output_tensor_from_cache_entry(
        self, state: Any, entry: Any, key: Any, *rest: Any
    ) -> Any:  # rest: (func, args); since 2.15 (args,)
        known = entry.metadata
        plain = entry.inplace_idx is None and known is not None and known.layout is torch.strided and self.shape_env is None
        if not plain or known.is_quantized or known.is_conj or known.is_neg:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, *rest)
        with in_kernel_invocation_manager(self):
            made = torch.empty_strided(
                known.shape, known.stride, dtype=known.dtype, device="meta", requires_grad=known.requires_grad
            )
            if entry.view_idx is not None:
                made.set_(rest[-1][entry.view_idx].untyped_storage(), known.storage_offset, known.shape, known.stride)
        return FakeTensor(self, made, known.device)


def _calls(name: str, *parameters: str) -> bool:
    """Return whether torch's FakeTensorMode has a method with these parameters, by which QuickFakeMode knows what it is given."""
    found = list(inspect.signature(getattr(FakeTensorMode, name, lambda: None)).parameters)
    return found[: len(parameters) - 1] + found[-1:] == list(parameters)


# what dry runs use: torch's own mode, which is slower, where a release has changed the methods that QuickFakeMode replaces
PlanMode: type[FakeTensorMode] = (
    QuickFakeMode
    if _calls("_prep_args_for_hash", "self", "result", "args", "state", "id_hashed_objects")
    and _calls("_get_output_tensor_from_cache_entry", "self", "state", "entry", "key", "args")
    else type("PlanMode", (FakeTensorMode,), {})  # a class of its own, by which the tensors of a plan are known
)


def alone(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor or array shares the memory of a tensor. False if torch cannot tell."""
    return references(tensor) == references(torch.empty(1, device="cpu")) != 0


def references(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor's storage (views, detached aliases, saved tensors); 0 if torch cannot tell."""
    owners = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if owners is None else owners(tensor.untyped_storage()._cdata)


def swap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Exchange the contents of two tensor objects. Return False if torch cannot, or if a live graph would become unusable."""
    if any(uses() > 1 for uses in map(attrgetter("_use_count"), (one, other))):  # a living graph refers to it
        return False  # torch would swap them, and so break the gradient accumulator that the graph keeps
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:
        return False
    return True


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the contents of two tensor objects to which graphs or weak references refer; graphs keep the tensors they know."""
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def carry_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let `target` share the hook tables of `source`: after a swap these are still with the other Python object."""
    for table in HOOK_TABLES:
        hooks = getattr(source, table)
        if hooks and getattr(target, table) is not hooks:
            setattr(target, table, hooks)


def post_accumulate_hooks(tensor: torch.Tensor) -> dict[int, Callable]:
    """Return torch's own table of a tensor's hooks that run when its gradient is complete; its entries may be replaced."""
    return tensor._post_accumulate_grad_hooks or {}


def hand_over_gradients(tensor: torch.Tensor, to: Callable[[], torch.Tensor | None]) -> RemovableHandle:
    """Let a gradient that autograd accumulates on `tensor` become that of the tensor `to()`, whose hooks for a complete one are called.

    Hooks that `tensor` has are dropped.
    """
    # it may share a table with the other, or have one from before a swap, which is not called
    tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    def hand_over(tensor: torch.Tensor) -> None:
        other = to()
        if other is None:
            return
        with DisableTorchFunctionSubclass():  # the other's memory may be released: only its gradient is touched
            grad = grad_attribute.__get__(tensor)
            grad_attribute.__set__(tensor, None)
            grad_attribute.__set__(other, grad.to(other.dtype))
        for hook in list(post_accumulate_hooks(other).values()):
            hook(other)

    return torch.Tensor.register_post_accumulate_grad_hook(tensor, hand_over)


def wrapped_in_ddp() -> bool:
    """Return whether torch's DistributedDataParallel is on the stack of calls: it is being made, or runs."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.nn.parallel.distributed":
        frame = frame.f_back
    return frame is not None


# -- modules and optimizers --------------------------------------------------------------------------------------

own_parameters = attrgetter("_parameters")  # module -> the dict itself of its own parameters, without those of submodules
own_buffers = attrgetter("_buffers")  # likewise
own_modules = attrgetter("_modules")  # likewise
compiled_call = attrgetter("_compiled_call_impl")  # module -> function that `module.compile()` calls for its forward, or None
forward_hooks = attrgetter("_forward_hooks", "_forward_pre_hooks")  # module -> two dicts
state_dict_hooks = attrgetter("_state_dict_hooks", "_load_state_dict_pre_hooks", "_state_dict_pre_hooks")  # module -> three
OWN_UNSCALING = "_step_supports_amp_scaling"  # attribute of an optimizer whose step divides gradients by GradScaler's scale
STEP_METHODS = ("step", "_init_group")  # methods of an optimizer that determine its step
# classes that make states in their constructor alone, and fail on a parameter that comes later
EARLY_STATES = torch.optim.Adagrad if torch.__version__ < "2.13" else ()
NormBase = nn.modules.batchnorm._NormBase  # batch and instance norms
# decorator, as torch.compiler.disable, which imports torch._dynamo (1.5 s) where it decorates; this one does at the first call
disable_dynamo = torch._disable_dynamo
CODE_OF_CALL = nn.Module._call_impl.__code__  # of the function that runs a module's hooks and forward, to recognise its frames


def early_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return `own_modules`, or {} if nn.Module.__init__ has not run yet."""
    return vars(module).get("_modules", {})


def convert_own(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a conversion, as `module.to()` does, to a module's own parameters, their gradients and buffers."""
    nn.Module._apply(module, fn, recurse=False)


def set_compiled_call(module: nn.Module, call: Callable | None) -> None:
    """Set the function that calls of a module run in place of its forward."""
    module._compiled_call_impl = call


def original(module: nn.Module) -> nn.Module:
    """Return the module inside a `torch.compile(module)` wrapper, or the module itself."""
    return module._modules[WRAPPED_AS[0]] if type(module).__name__ == "OptimizedModule" else module  # type: ignore[return-value]


# -- autograd ----------------------------------------------------------------------------------------------------

graph_task = torch._C._current_graph_task_id  # returns the number of the backward running on this thread, or -1
next_node = torch._C._autograd._get_sequence_nr  # returns the number that autograd gives the next node on this thread
number_of = methodcaller("_sequence_nr")  # node -> its number in the order in which nodes were made
# returns the innermost saved-tensor hooks (pack, unpack) that are active on this thread, or None
top_saved_tensors_hooks: Callable[[], tuple[Callable, Callable] | None] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
# calls a function when the backward running on this thread has ended; not if the backward raises
at_end_of_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback


@functools.cache
def watch_backwards(kinds: tuple[type[BaseException], ...], failed: Callable[[BaseException], None]) -> None:
    """Let `failed` see each error of these kinds by which a backward ends; it may raise another one in its place.

    It acts on the whole process from the first call on (torch has no hook for a backward that fails), and once: later calls with
    the same arguments do nothing. A backward without an error is not touched.
    """
    plain = torch.autograd._engine_run_backward

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        try:
            return plain(*args, **kwargs)
        except kinds as error:
            failed(error)
            raise

    torch.autograd._engine_run_backward = run


def nodes_to_run(tensors: list[torch.Tensor]) -> int:
    """Return how many of the tensors' nodes (grad_fn, or gradient accumulator) the running backward will execute."""
    with torch.enable_grad():
        nodes = {torch.autograd.graph._get_grad_fn_or_grad_acc(tensor) for tensor in tensors}
    return sum(torch._C._will_engine_execute_node(node) for node in nodes - {None})


def in_derivative() -> bool:
    """Return whether this thread is inside a grad or jvp of torch.func."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    kinds = torch._C._functorch.TransformType
    return any(each.key() in (kinds.Grad, kinds.Jvp) for each in retrieve_all_functorch_interpreters())


@contextlib.contextmanager
def without_fake_logs() -> Iterator[None]:
    """Context without torch's log of internals, a page for each operator that raises on fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# -- distributed, devices, files ---------------------------------------------------------------------------------

set_timeout = dist.distributed_c10d._set_pg_timeout  # (timeout, group): of all collectives of a group from now on
file_writer: Any = torch._C.PyTorchFileWriter  # path -> zip writer of torch.save, for files and entries of more than 4 GiB too
file_reader: Any = torch._C.PyTorchFileReader  # path -> zip reader of torch.load


def dies_with(group: dist.ProcessGroup) -> object:
    """Return an object that torch drops when a process group is destroyed.

    The group itself may live on: functions of torch.distributed.nn keep the default group as an argument's default.
    """
    return dist.distributed_c10d._world.pg_map[group][1] or group  # its store


_groups_made: weakref.WeakKeyDictionary[object, collections.Counter] = weakref.WeakKeyDictionary()  # by store: of which ranks


def group_of_members(ranks: list[int], timeout: datetime.timedelta | None = None, backend: str | None = None) -> Any:
    """Return a process group of `ranks`, which these alone make (collective among them).

    torch names such a group by the number of groups that a process is in, or (from 2.14 on, and groups that all ranks make, too) has
    made. That differs between ranks once the program has made a group of some of them, and they would wait for each other under
    different names. Here it is the number of groups of these ranks, and torch's own numbers stay as they are.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _groups_made.setdefault(dies_with(world), collections.Counter())
    members = tuple(sorted(ranks))
    made[members] += 1
    name = hashlib.sha256(f"zeroshard {members} {made[members]}".encode()).hexdigest()
    c10d: Any = dist.distributed_c10d
    names, c10d._process_group_name = c10d._process_group_name, lambda ranks, use_hashed_name: name
    try:
        return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    finally:
        c10d._process_group_name = names


@functools.cache
def mend_dtensors() -> None:
    """Let DTensors of torch < 2.13 do what later ones do, in the whole process.

    A tensor gathered from unequal shards is contiguous, as its DTensor says. A split factor that is no order of mesh axes (the maps
    of a packed weight) is redistributed step by step.
    """
    if torch.__version__ >= "2.13":
        return
    from torch.distributed.tensor import Shard, _redistribute

    planner: Any = _redistribute.DTensorRedistributePlanner
    unpad, plan = Shard._maybe_unpad_tensor, planner.generate_graph_based_transform_infos

    def stepwise(self: Any, source: Any, target: Any, shape: tuple[int, ...]) -> list:
        try:
            return plan(self, source, target, shape)
        except ValueError:
            return self.generate_greedy_transform_infos(source, target)

    planner.generate_graph_based_transform_infos = stepwise
    Shard._maybe_unpad_tensor = lambda *args: unpad(*args).contiguous()  # type: ignore[method-assign]


def joined_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the axes of several meshes of one root, in order. Raise RuntimeError if they overlap."""
    return meshes[0]._concatenate(meshes)


def clear_sharding_caches() -> None:
    """Clear DTensor's caches of sharding propagation."""
    from torch.distributed.tensor import debug

    debug._clear_fast_path_sharding_prop_cache()
    debug._clear_python_sharding_prop_cache()


def fp16_on_cpu() -> bool:
    """Return whether the CPU has fp16 matrix multiplication."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


# -- threads as ranks --------------------------------------------------------------------------------------------


class _ParametrizationCache(threading.local):
    """Cache of `torch.nn.utils.parametrize.cached()` with separate values for each thread.

    Torch's `_cache_enabled` counts the contexts of all threads, and stays the integer that torch.compile reads.
    """

    depth = 0

    def __init__(self) -> None:
        self._values: dict[Hashable, torch.Tensor | None] = {}

    def get(self, key: Hashable) -> torch.Tensor | None:
        """Return the cached value of a parametrization. None if this thread is not in `cached()`, so that it is computed."""
        return self._values.get(key)

    def __setitem__(self, key: Hashable, value: torch.Tensor | None) -> None:
        if self.depth:
            self._values[key] = value

    def move(self, by: int) -> None:
        """Record that this thread enters `cached()` (1) or leaves it (-1)."""
        with _counting:
            parametrize._cache_enabled += by
        self.depth += by
        if not self.depth:
            self._values.clear()


_counting = threading.Lock()
_cache = _ParametrizationCache()


def _cached() -> Iterator[None]:
    """Body for `parametrize.cached`: its code runs in that module, and so uses the `_cache` there."""
    _cache.move(1)
    try:
        yield
    finally:
        _cache.move(-1)


@functools.cache
def give_threads_their_own_parametrizations() -> None:
    """Make `parametrize.cached()` affect only the thread that entered it. Call this while no thread is inside.

    Torch has one cache for the process, which is emptied when the last of several threads leaves `cached()`. A thread that enters
    it again before, as when a checkpoint recomputes a forward, would get the value of an earlier use instead of computing it.
    """
    parametrize._cache = _cache  # type: ignore[assignment]
    cached: Any = parametrize.cached
    cached.__wrapped__.__code__ = _cached.__code__  # replace the code, since others have imported the function


def say_fully_sharded(module: nn.Module) -> None:
    """Let torch's other functions on modules, as `replicate`, leave a module's parameters alone, as those of `fully_shard`."""
    contract = importlib.import_module("torch.distributed._composable.contract")  # the package has a function of that name
    module.__dict__.setdefault(contract.REGISTRY_KEY, {})["fully_shard"] = contract.RegistryItem()


def replace_state_dict_functions(
    gather: Callable[..., Any], broadcast: Callable[..., Any], in_one_box: Callable[[Any], Any]
) -> None:
    """Let torch.distributed.checkpoint call `gather` and `broadcast` where it gathers and broadcasts a state dictionary, and
    `in_one_box` on what it saves as safetensors.

    The first two get the function that they replace before the function's own arguments. zeroshard.fsdp needs it, since torch takes
    any tensor but a DTensor for a whole one, and writes only the last of a tensor's boxes to a file of safetensors.
    """
    import torch.distributed.checkpoint.state_dict as state_dict
    from torch.distributed import _state_dict_utils as utils
    from torch.distributed.checkpoint import state_dict_saver as saver

    plain = saver._save_state_dict

    @functools.wraps(plain)
    def save(state_dict: Any, storage_writer: Any, *args: Any, **kwargs: Any) -> Any:
        form = getattr(storage_writer, "serialization_format", None)
        given = in_one_box(state_dict) if getattr(form, "name", None) == "SAFETENSORS" else state_dict
        return plain(given, storage_writer, *args, **kwargs)

    saver._save_state_dict = save
    state_dict._gather_state_dict = functools.partial(gather, utils._gather_state_dict)
    utils._broadcast_tensors = functools.partial(broadcast, utils._broadcast_tensors)


def replace_stage_methods(**methods: Callable[..., Any]) -> None:
    """Let all stages of torch.distributed.pipelining use these methods; each gets the one that it replaces after `self`."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    for name, method in methods.items():
        setattr(_PipelineStageBase, name, functools.partialmethod(method, getattr(_PipelineStageBase, name)))
