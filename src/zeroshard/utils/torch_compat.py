"""What differs between the supported releases of torch (>= 2.11), and every private name of torch that the library uses.

A release may take a private name away: tests/utils/test_torch_compat.py then says which, and what here needs it. No other file
of the library uses one (tests/test_architecture.py).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._subclasses.fake_tensor import (  # noqa: F401
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
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

# renamed in torch 2.13; the old names warn there
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_LATER = {  # what takes a second to import: name here -> (module, name there)
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    "StorageInfo": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    "StridedShard": ("torch.distributed.tensor.placement_types", "_StridedShard"),
    "replicate_with_fsdp": ("torch.distributed._composable.replicate_with_fsdp", "replicate"),
    "stage_backward_weight": ("torch.distributed.pipelining._backward", "stage_backward_weight"),
}
DYNAMO = "torch._dynamo"  # the module, for who imports it ahead of use


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _LATER[name]
    return getattr(importlib.import_module(module), there)


# -- tensors -----------------------------------------------------------------------------------------------------

version = attrgetter("_version")  # tensor -> how often it was written in place; raises for an inference tensor
base = attrgetter("_base")  # tensor -> what it is a view of, or None
storage_id = attrgetter("_cdata")  # storage -> what identifies its memory while it lives
local_part = attrgetter("_local_tensor")  # DTensor -> this rank's part, past autograd
# storage -> where it begins in the file that torch.load skipped it in, or None
checkpoint_offset = attrgetter("_checkpoint_offset")
HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor: stay with the Python object when it is swapped
FAKE_DEVICE = ("fake_device", "_fake_device")  # attributes by which a fake tensor says where it is
grad_attribute: Any = torch.Tensor.grad  # descriptors: what `.grad` and `.data` are where no subclass has its own
data_attribute: Any = torch.Tensor.data
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
# as `__torch_function__` of a class: torch's functions as they are
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
assert_async = torch._assert_async
fused_adam_, fused_adamw_, fused_sgd_, fused_adagrad_ = (
    torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_,
)  # fmt: skip


def in_no_graph(tensor: Any) -> bool:
    """Whether no living graph of autograd refers to a tensor: it may be swapped then."""
    return tensor._use_count() <= 1


def set_local_part(tensor: Any, part: torch.Tensor) -> None:
    """Replace this rank's part of a DTensor."""
    tensor._local_tensor = part


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook for its gradient was registered on a tensor."""
    return any(getattr(tensor, table) for table in HOOK_TABLES)


def rebuilder(by_dtype: bool = False) -> Callable[..., torch.Tensor]:
    """The function by which a pickled tensor is made again. by_dtype: of a dtype without a class of storages, which is told last."""
    return torch._utils._rebuild_tensor_v3 if by_dtype else torch._utils._rebuild_tensor_v2


def faking() -> bool:
    """Whether tensors that are made now on this thread are fake ones."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def foreach_types() -> list[type[torch.Tensor]]:
    """The classes of tensors that torch's functions take many at a time, to be added to."""
    return torch.utils._foreach_utils._foreach_supported_types


def alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else has the memory of a tensor: no view, no detached alias, no array. False where torch does not tell."""
    return references(tensor) == references(torch.empty(1, device="cpu")) != 0


def references(tensor: torch.Tensor) -> int:
    """How many tensors (views, detached aliases, what autograd has saved) have the memory of this one; 0 where torch does not tell."""
    owners = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if owners is None else owners(tensor.untyped_storage()._cdata)


def swap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Exchange what two tensor objects are. False where torch can not, or a live graph would be made unusable."""
    if not (in_no_graph(one) and in_no_graph(other)):
        return False  # torch would swap, and poison the gradient accumulator that the graph keeps
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:
        return False
    return True


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """As `swap`, where graphs and weak references may refer to both: graphs go on with the tensors that they know."""
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def carry_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Tensor hooks follow to the tensor that autograd sees: swapping leaves their tables with the Python object."""
    for table in HOOK_TABLES:
        hooks = getattr(source, table)
        if hooks and getattr(target, table) is not hooks:
            setattr(target, table, hooks)


def post_accumulate_hooks(tensor: torch.Tensor) -> dict[int, Callable]:
    """The hooks of a tensor that run when its gradient is complete: torch's own table, in which they may be exchanged."""
    return tensor._post_accumulate_grad_hooks or {}


# -- modules and optimizers --------------------------------------------------------------------------------------

own_parameters = attrgetter("_parameters")  # module -> its own by attribute, without those of modules in it: the dict itself
own_buffers = attrgetter("_buffers")  # so
own_modules = attrgetter("_modules")  # so
compiled_call = attrgetter("_compiled_call_impl")  # module -> what `module.compile()` calls in place of its forward, or None
forward_hooks = attrgetter("_forward_hooks", "_forward_pre_hooks")  # module -> two dicts
state_dict_hooks = attrgetter("_state_dict_hooks", "_load_state_dict_pre_hooks", "_state_dict_pre_hooks")  # module -> three
STEP_METHODS = ("step", "_init_group")  # of an optimizer: what decides how it steps
NormBase = nn.modules.batchnorm._NormBase  # batch and instance norms
disable_dynamo = torch._disable_dynamo  # decorator: torch.compile leaves the function as it is


def early_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """`own_modules`; empty where nn.Module.__init__ has not run yet."""
    return vars(module).get("_modules", {})


def set_compiled_call(module: nn.Module, call: Callable | None) -> None:
    """Let calls of a module go there in place of its forward."""
    module._compiled_call_impl = call


def original(module: nn.Module) -> nn.Module:
    """What `torch.compile(module)` wraps; every other module is its own."""
    return module._modules["_orig_mod"] if type(module).__name__ == "OptimizedModule" else module  # type: ignore[return-value]


def code_of_call() -> CodeType:
    """Of what runs while a module is called: hooks and forward."""
    return nn.Module._call_impl.__code__


# -- autograd ----------------------------------------------------------------------------------------------------

graph_task = torch._C._current_graph_task_id  # the number of the backward that runs on this thread, or -1
next_node = torch._C._autograd._get_sequence_nr  # the number of the node that autograd makes next on this thread
USED_NODES = ("_current_graph_task_id", "_will_engine_execute_node")  # of torch._C: needed by `nodes_to_run`


def number_of(node: Any) -> int:
    """The number of a node in the order in which they were made."""
    return node._sequence_nr()


@functools.cache
def watch_backwards(kinds: tuple[type[BaseException], ...], failed: Callable[[BaseException], None]) -> None:
    """Let `failed` see each error of these kinds by which a backward ends; it may raise another one in its place.

    It acts on the whole process from the first call on (torch has no hook for a backward that fails), and once: later calls with
    the same arguments do nothing. A backward without an error is not touched.
    """
    plain = torch.autograd._engine_run_backward

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except kinds as error:
            failed(error)
            raise

    torch.autograd._engine_run_backward = run


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call it when the backward that runs on this thread is over. Dropped, uncalled, where that fails."""
    Variable._execution_engine.queue_callback(call)


def tells_nodes_to_run() -> bool:
    """Whether `nodes_to_run` can be asked."""
    return hasattr(torch.autograd.graph, "_get_grad_fn_or_grad_acc") and all(hasattr(torch._C, name) for name in USED_NODES)


def nodes_to_run(tensors: list[torch.Tensor]) -> int:
    """How many nodes that make, or take in, the gradients of tensors the running backward will execute."""
    with torch.enable_grad():
        nodes = {torch.autograd.graph._get_grad_fn_or_grad_acc(tensor) for tensor in tensors}
    return sum(torch._C._will_engine_execute_node(node) for node in nodes - {None})


def in_derivative() -> bool:
    """Whether this thread is inside a grad or jvp of torch.func."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    kinds = torch._C._functorch.TransformType
    return any(each.key() in (kinds.Grad, kinds.Jvp) for each in retrieve_all_functorch_interpreters())


def top_saved_tensors_hooks() -> tuple[Callable, Callable] | None:
    """The innermost saved-tensor hooks (pack, unpack) in force on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@contextlib.contextmanager
def without_fake_logs() -> Iterator[None]:
    """Errors of operators on fake tensors are raised; torch would also log a page of its internals for each."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# -- distributed, devices, files ---------------------------------------------------------------------------------


def set_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup) -> None:
    """Of all collectives of a group from now on."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def clear_sharding_caches() -> None:
    """Forget how DTensor's operators were found to divide their results."""
    from torch.distributed.tensor import debug

    debug._clear_fast_path_sharding_prop_cache()
    debug._clear_python_sharding_prop_cache()


def call_when_cuda_starts(callback: Callable[[], None]) -> None:
    """At once where it has been used."""
    torch.cuda._lazy_call(callback)


def fp16_on_cpu() -> bool:
    """Whether the CPU multiplies matrices in fp16."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def file_writer(path: str) -> Any:
    """What torch.save uses: knows files and entries of more than 4 GiB."""
    return torch._C.PyTorchFileWriter(path)


def file_reader(path: str) -> Any:
    """What torch.load uses."""
    return torch._C.PyTorchFileReader(path)


# -- threads as ranks --------------------------------------------------------------------------------------------


class _ParametrizationCache(threading.local):
    """The values that `torch.nn.utils.parametrize` keeps while a thread is in `cached()`, for each thread its own.

    Torch's `_cache_enabled` counts those of all threads, and stays the integer that torch.compile reads.
    """

    depth = 0

    def __init__(self) -> None:
        self._values: dict[Any, torch.Tensor | None] = {}

    def get(self, key: Any) -> torch.Tensor | None:
        """The value of a parametrization; None, so that it is computed, where this thread is not in `cached()`."""
        return self._values.get(key)

    def __setitem__(self, key: Any, value: torch.Tensor | None) -> None:
        if self.depth:
            self._values[key] = value

    def move(self, by: int) -> None:
        """This thread enters `cached()` (1) or leaves it (-1)."""
        with _counting:
            parametrize._cache_enabled += by
        self.depth += by
        if not self.depth:
            self._values.clear()


_counting = threading.Lock()
_cache = _ParametrizationCache()


def _cached() -> Iterator[None]:
    """The body of `parametrize.cached`: it runs in that module, and finds `_cache` there."""
    _cache.move(1)
    try:
        yield
    finally:
        _cache.move(-1)


@functools.cache
def give_threads_their_own_parametrizations() -> None:
    """From now on `parametrize.cached()` concerns the thread that entered it. Call it while no thread is inside.

    Torch has one cache for the process. Of two threads in `cached()` the first that leaves it empties neither, so the other's
    next use, the repeated forward of a checkpoint say, finds the value of an earlier one instead of computing it.
    """
    parametrize._cache = _cache  # type: ignore[assignment]
    cached: Any = parametrize.cached
    cached.__wrapped__.__code__ = _cached.__code__  # its code: others hold the function by its name
