"""deepspeed.zero: Init, GatheredParameters, and DeepSpeed's attributes of partitioned parameters (`param.ds_*`).

    with zero.Init(config_dict_or_path=config): model = Net()               zs.init, in the dtype of the configuration
    with zero.GatheredParameters(params, modifier_rank=0): ...              zs.gathered of parameters

Only parameters of stage 3 (also small ones that stay whole) and parameters made under zero.Init have the attributes ds_*, so
`hasattr(p, "ds_id")` identifies ZeRO-3. Importing this module adds the attributes, as properties, to the classes of sharded
parameters. A gathered parameter is an ordinary one, and gets them from `GatheredParameters`; the compute parameters that modules
have inside a forward get them from `attach`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from ...api import init
from ...comm import backend_select
from ...config import Tier
from ...engine.comm import talking_device
from ...seam import ParameterInfo, ReplicatedParameter, ShardedParameter, engine_of, info_of
from ...tensor.attributes import whole_now
from ...values import BirthHome, Gathering, cut_module, cut_whole, home_of, is_born, is_gathered, refuse, whole_births
from . import communication
from .accelerator import get_accelerator
from .ds_config import get_bfloat16_config, get_float16_config, read_config, zero_section
from .logs import warning_once

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ZeroParamStatus = Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])  # gathered, not, being gathered
DeepSpeedTensorOverride = Enum("DeepSpeedTensorOverride", ["dtype", "device"])  # what zero.Init sets for new parameters
DEFAULT_TENSOR_OVERRIDES = list(DeepSpeedTensorOverride)
partitioned_param_data_shape = [0]  # shape of `param.data` at rest in DeepSpeed; here a parameter always has its true shape
_orig_torch_arange, _orig_torch_empty = torch.arange, torch.empty  # frameworks assign them; torch's constructors are not replaced


def zero_wrapper_for_fp_tensor_constructor(fn: Callable, target_fp_dtype: torch.dtype | None, target_device: object) -> Callable:
    """Wrap a tensor constructor: cast floating-point tensors to a dtype, and use a device if the caller names none."""

    def construct(*args: object, **kwargs: object) -> Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if target_fp_dtype is not None and made.is_floating_point() else made

    return construct


def is_zero_param(parameter: object) -> TypeGuard[Tensor]:
    """Return whether a parameter is partitioned."""
    return isinstance(parameter, Tensor) and (hasattr(parameter, "ds_id") or is_born(parameter))


# -- models that are partitioned from the start ------------------------------------------------------------------------------


class Init:
    """Context in which modules are made with partitioned parameters. With `module`, partition an existing module's at once.

    dtype: dtype of floating-point parameters. None: fp16, bf16 or fp32, by the configuration; without one fp16 (bf16 if the
    device has no fp16), as in DeepSpeed. remote_device: "cpu" and "nvme" make parameters on the host, other values on the
    accelerator. If the configuration's stage is not 3, nothing is partitioned, and a warning is logged. All ranks get the values
    that rank 0 draws, whatever their seeds. A function given to `module.apply` inside sees each module's own parameters whole,
    and rank 0's writes are kept. Torch's constructors are not replaced. tensor_overrides without DeepSpeedTensorOverride.dtype:
    parameters keep the dtypes that the modules give them.

    Raises ValueError or RuntimeError for contradictory arguments, before anything changes.
    """

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: ProcessGroup | None = None, mem_efficient_linear: bool = True,
        remote_device: object = None, pin_memory: bool = False, config_dict_or_path: object = None, config: object = None,
        enabled: bool = True, dtype: torch.dtype | None = None, mpu: object = None, zero_param_parallel_group: object = None,
        zero_quantized_weights: bool = False, zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: ProcessGroup | None = None, param_swapper: object = None,
        tensor_overrides: Collection[DeepSpeedTensorOverride] | None = DEFAULT_TENSOR_OVERRIDES,
    ) -> None:  # fmt: skip
        self.enabled, self.module = enabled, module
        self._open = False
        if not enabled:
            return
        given = config if config_dict_or_path is None else config_dict_or_path
        given = getattr(given, "_param_dict", given)  # a DeepSpeedConfig keeps the dictionary that it was made of
        self.config = None if given is None else read_config(given)
        self.dtype = self._dtype(dtype) if DeepSpeedTensorOverride.dtype in (tensor_overrides or ()) else None
        if data_parallel_group is not None and sequence_data_parallel_group is not None:
            raise ValueError("zero.Init: give data_parallel_group or sequence_data_parallel_group, not both.")
        without_effect = {
            "zero_param_parallel_group": zero_param_parallel_group, "param_swapper": param_swapper,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        }  # fmt: skip
        for name, value in without_effect.items():
            if value not in (None, False):
                warning_once(
                    f"zero.Init: {name} has no effect: parameters are partitioned over all data-parallel ranks, as they are."
                )
        section = None if self.config is None else zero_section(self.config)
        offload = None if section is None else section.offload_param
        place = remote_device if offload is None or "device" not in offload.given else offload.device
        place = getattr(place, "value", place)
        if place not in (None, "none", "cpu", "nvme"):
            raise ValueError(f"zero.Init: remote_device: expected None, 'none', 'cpu' or 'nvme', got {place!r}.")
        self.remote_device, self.pin_memory = None if place == "none" else place, pin_memory
        self.local_device = torch.device("cpu")
        if torch.cuda.is_available():
            self.local_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
        self._birthplace = torch.device("cpu") if self.remote_device in ("cpu", "nvme") else self.local_device
        self.ds_process_group = data_parallel_group if data_parallel_group is not None else sequence_data_parallel_group
        stage = 3 if section is None else section.stage
        self.partitions = stage == 3
        if section is not None:
            here.checks_writes = section.enable_sanity_checks
        if not self.partitions:
            warning_once(
                f"zero.Init: the configuration asks for stage {stage}, which keeps whole parameters: nothing is partitioned."
            )
            return
        if not backend_select.is_started():
            communication.init_distributed()
        self._comm = backend_select.current(
            self.ds_process_group, talking_device(self.local_device), communication.stall_timeout_s()
        )
        self.rank, self.dp_world_size = self._comm.rank, self._comm.world_size
        if told := _contradicting_single_rank_pg_error(self.dp_world_size, self.ds_process_group):
            raise RuntimeError(told)
        if module is not None:
            cut_module(module.to(self._birthplace), self._comm)

    def _dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        if dtype is None and self.config is not None:
            bf16, fp16 = get_bfloat16_config(self.config).enabled, get_float16_config(self.config).enabled
            if bf16 and fp16:
                raise RuntimeError("bf16 and fp16 are both enabled: choose one.")
            dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
        if dtype is None:
            dtype = torch.float16 if get_accelerator().is_fp16_supported() else torch.bfloat16
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"zero.Init: dtype: expected torch.float16, torch.bfloat16 or torch.float32, got {dtype}.")
        return dtype

    def __enter__(self) -> None:
        if self.enabled and self.partitions:
            self._open = True
            self._resume()
            here.inits.append(self)
            _gather_in_apply(1)

    def __exit__(self, *failure: Any) -> None:
        if self._open:
            here.inits.remove(self)
            _gather_in_apply(-1)
            self._births.__exit__(*failure)  # after an error nothing is cut
            self._open = False

    def _resume(self) -> None:
        self._births = contextlib.ExitStack()
        if self._birthplace.type != "cpu":
            self._births.enter_context(self._birthplace)
        self._births.enter_context(init(stage=3, comm=self._comm, dtype=self.dtype))


class _OfRank(threading.local):
    """State of a rank, which may be a thread.

    inits: open `Init` contexts, the outermost first. checks_writes: whether `GatheredParameters` raises for writes without
    modifier_rank (`enable_sanity_checks`).
    """

    def __init__(self) -> None:
        self.inits: list[Init] = []
        self.checks_writes = False


here = _OfRank()
_plain_apply = nn.Module.apply
_apply_lock, _applying = threading.Lock(), 0  # number of open contexts in all threads


def _gather_in_apply(opened: int) -> None:
    """Replace nn.Module.apply while any thread has an `Init` open; it gathers in that thread only. opened: 1, at the end -1."""
    global _applying
    with _apply_lock:
        _applying += opened
        nn.Module.apply = _apply if _applying else _plain_apply  # type: ignore[method-assign,assignment]


def _apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Call `fn` with each module's own parameters gathered, and keep rank 0's writes."""

    def on_whole(module: nn.Module) -> None:
        at_rest = [param for param in module.parameters(recurse=False) if not is_gathered(param)]
        with GatheredParameters(at_rest, modifier_rank=0):
            fn(module)

    on_whole.zeroshard_gathers = True  # type: ignore[attr-defined]  # submodules get this function
    return _plain_apply(self, on_whole if here.inits and not hasattr(fn, "zeroshard_gathers") else fn)


def shutdown_init_context() -> None:
    """Suspend open `Init` contexts: modules made inside are ordinary until `restore_init_context`."""
    for each in reversed(here.inits):
        each._births.close()


def restore_init_context() -> None:
    """Resume open `Init` contexts: modules made inside are partitioned again."""
    for each in here.inits:
        each._resume()


def _contradicting_single_rank_pg_error(
    dp_world_size: int, explicit_process_group: object, env: Mapping[str, str | None] = os.environ
) -> str | None:
    """Return an error if a launcher started several ranks but the default process group has only one; else None."""
    said = env.get("WORLD_SIZE") or ""
    if dp_world_size != 1 or explicit_process_group is not None or not said.isdigit() or int(said) <= 1:
        return None
    return (
        f"zero.Init: the launcher says WORLD_SIZE={said}, and the process group has one rank: nothing would be partitioned. Call "
        "deepspeed.init_distributed() before, and let nothing else make a process group of one rank."
    )


# -- parameters that are gathered for a while -----------------------------------------------------------------------------


class GatheredParameters:
    """`with GatheredParameters(params, modifier_rank=0):` gathers parameters; writes of modifier_rank are sent to all ranks.

    params: a parameter or an iterable; entries that are not partitioned parameters are ignored. Without modifier_rank, writes are
    dropped, as in DeepSpeed, and one warning has the names of the parameters; with `enable_sanity_checks` in the configuration,
    every rank raises RuntimeError instead. fwd_module: see register_external_parameter.
    """

    def __init__(
        self, params: object, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        cut_whole()
        given: Iterable[object] = [params] if isinstance(params, Tensor) or not isinstance(params, Iterable) else params
        self.params = list({id(param): param for param in given if is_zero_param(param)}.values()) if enabled else []
        self.enabled, self.src_rank = bool(self.params), modifier_rank
        self._gathering: Gathering | None = None
        self._births = contextlib.ExitStack()
        if fwd_module is not None:
            for param in self.params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        if self.enabled:
            self._gathering = _opened(self.params, modifier_rank=self.src_rank)
            self._births.enter_context(whole_births())

    def __exit__(self, kind: type[BaseException] | None, *failure: Any) -> None:
        gathering, self._gathering = self._gathering, None
        if gathering is None:
            return
        _close(gathering)
        if kind is not None:
            self._births.__exit__(kind, *failure)
            return
        with self._births:
            problems = gathering.agree()
            if dropped := problems.pop("written", []):
                told = (
                    f"GatheredParameters: in-place modification of {', '.join(dropped[:6])} without modifier_rank: what was written is "
                    "dropped. Name the rank that writes: GatheredParameters(params, modifier_rank=0)."
                )
                if here.checks_writes:
                    raise RuntimeError(told)
                warning_once(told)
            refuse(problems)
            gathering.keep()


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Register that a module's forward uses another module's parameter; zeroshard does not need it, `ds_external_parameters()` lists it.

    Raises RuntimeError if `parameter` is not an nn.Parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"register_external_parameter: expected an nn.Parameter, got {type(parameter).__name__}.")
    show_external_parameters(module)
    module.__dict__["_external_params"][id(parameter)] = parameter


def show_external_parameters(module: Any) -> None:
    """Give a module the method `ds_external_parameters()`, which trl calls."""
    if not hasattr(module, "_external_params"):
        module._external_params = {}
        module.ds_external_parameters = types.MethodType(lambda self: self._external_params.items(), module)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo register_external_parameter. Raises RuntimeError for a parameter that is not registered."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"unregister_external_parameter: expected an nn.Parameter, got {type(parameter).__name__}.")
    known, number = getattr(module, "_external_params", {}), getattr(parameter, "ds_id", None)
    keys = [
        key
        for key, other in known.items()
        if other is parameter or (number is not None and getattr(other, "ds_id", None) == number)
    ]
    if not keys:
        raise RuntimeError(f"this parameter is not a registered external parameter of {type(module).__name__}.")
    del known[keys[0]]  # by key: inside a forward, the module has another object (the compute parameter) for it


class MultipleAllGatherHandles:
    """DeepSpeed's handle of several gathers. Here `all_gather` returns when the gather has ended, so `wait` does nothing."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def wait(self, **options: object) -> None:
        for handle in self.handles:
            handle.wait(**options)


# -- attributes of a partitioned parameter --------------------------------------------------------------------------------


def _info(param: Tensor) -> ParameterInfo | BirthHome:
    """Describe a partitioned parameter. Raise AttributeError below stage 3, where parameters have no ds_* attributes."""
    info = info_of(param)
    if info is not None and (info.sharded or info.persistent):
        return info
    home = home_of(param)
    if not isinstance(home, BirthHome):
        raise AttributeError(f"{type(param).__name__!r} object is not partitioned")
    return home


def _persists(info: object) -> TypeGuard[ParameterInfo]:
    """Return whether a parameter of stage 3 stays whole at rest."""
    return isinstance(info, ParameterInfo) and info.persistent


def _ds_status(param: Tensor) -> ZeroParamStatus:
    info = _info(param)
    if _persists(info):
        return ZeroParamStatus.AVAILABLE
    gathered = info.gathered if isinstance(info, ParameterInfo) else None
    return {True: ZeroParamStatus.AVAILABLE, False: ZeroParamStatus.INFLIGHT, None: ZeroParamStatus.NOT_AVAILABLE}[gathered]


def _ds_tensor(param: Tensor) -> Tensor:
    """Return this rank's slice, flat, with the attributes of DeepSpeed's `ds_tensor`."""
    info = _info(param)
    local: Any = (info.local() if _persists(info) else param._local).detach()  # type: ignore[attr-defined]
    local.ds_numel, local.status, local.final_location = local.numel(), ZeroParamStatus.AVAILABLE, None
    if isinstance(info, ParameterInfo):
        local.final_location = {Tier.HOST: "cpu", Tier.DISK: "nvme"}.get(info.tier)
    return local


def _world_size(param: Tensor) -> int:
    info = _info(param)
    return (info.ranks if isinstance(info, ParameterInfo) else info.comm).world_size


def _active_sub_modules(param: Tensor) -> set[int]:
    info = _info(param)
    return {info.unit} if isinstance(info, ParameterInfo) and info.in_use else set()


def _all_gather_coalesced(
    param: object, params: Iterable[Tensor], safe_mode: bool = False, quantize: bool = False
) -> MultipleAllGatherHandles:
    """Gather parameters until `partition` is called (collective)."""
    for each in params:
        info = info_of(each)
        in_use = info is not None and info.in_forward  # inside a forward it is gathered where it is used
        if home_of(each) is not None and not in_use:
            _opened([each], write=True)
    return MultipleAllGatherHandles([])


def _partition(
    param: Tensor, param_list: Iterable[Tensor] | None = None, hierarchy: int = 0, has_been_updated: bool = False,
    free_data: bool = True,
) -> None:  # fmt: skip
    """Undo `all_gather`. has_been_updated: keep writes, which all ranks must have made equally (collective); else drop them."""
    for each in [param] if param_list is None else param_list:
        if not is_gathered(each):
            continue
        gathering = whole_now[id(each)].gathering
        _close(gathering)
        if has_been_updated:
            refuse(gathering.agree())
            gathering.keep()


def _ds_summary(param: Any, use_debug_name: bool = False) -> dict[str, object]:
    """Return DeepSpeed's summary of a parameter, without gathering it."""
    grad, local = None if is_gathered(param) else param.grad, getattr(param, "ds_tensor", None)
    return {
        "id": param.ds_id, "status": param.ds_status.name, "numel": param.numel(), "ds_numel": param.ds_numel,
        "shape": tuple(param.shape), "ds_shape": tuple(param.ds_shape), "requires_grad": param.requires_grad,
        "grad_shape": None if grad is None else tuple(grad.shape), "persist": param.ds_persist,
        "active_sub_modules": param.ds_active_sub_modules, "ds_tensor.shape": None if local is None else local.shape,
    }  # fmt: skip


_PROPERTIES: dict[str, Callable[[Tensor], object]] = {
    "ds_id": lambda param: _info(param).number,  # the same on every rank
    "ds_shape": lambda param: _info(param) and param.shape,
    "ds_numel": lambda param: _info(param) and param.numel(),
    "ds_status": _ds_status,
    "ds_tensor": _ds_tensor,
    "ds_persist": lambda param: _persists(_info(param)),
    "ds_active_sub_modules": _active_sub_modules,
    "ds_zero_partition_world_size": _world_size,
    "is_external_param": lambda param: (_info(param), False)[1],  # no parameter needs to be registered
}
_METHODS: dict[str, Callable[..., object]] = {
    "all_gather": lambda param, param_list=None, async_op=False, hierarchy=0: (
        _all_gather_coalesced(param, [param] if param_list is None else param_list)
    ),
    "all_gather_coalesced": _all_gather_coalesced, "partition": _partition, "ds_summary": _ds_summary,
    # DeepSpeed's padded number of elements; ds_tensor may have more
    "partition_numel": lambda param: -(-param.ds_numel // param.ds_zero_partition_world_size),
}  # fmt: skip
for _class in (ShardedParameter, ReplicatedParameter):
    for _name, _get in _PROPERTIES.items():
        setattr(_class, _name, property(_get))
    for _name, _method in _METHODS.items():
        # `_info` raises AttributeError for parameters that are not partitioned
        _bound = functools.partial(lambda method, param: _info(param) and types.MethodType(method, param), _method)
        setattr(_class, _name, property(_bound))


def _shown(param: object, whole: object) -> dict[str, object]:
    """Return the ds_* attributes for `whole`, the ordinary parameter in place of the sharded `param`."""
    on_device = getattr(param, "_held", param) is not None  # an offloaded slice would have to be fetched for ds_tensor
    fixed = {name: getattr(param, name) for name in _PROPERTIES if name != "ds_tensor" or on_device}
    methods = {name: types.MethodType(method, whole) for name, method in _METHODS.items()}
    return {**fixed, **methods, "ds_status": ZeroParamStatus.AVAILABLE, "ds_active_sub_modules": set()}


def _hide(whole: object) -> None:
    for name in (*_PROPERTIES, *_METHODS):
        whole.__dict__.pop(name, None)


def _opened(params: list[Tensor], write: bool = False, modifier_rank: int | None = None) -> Gathering:
    """Gather parameters and set their ds_* attributes (collective)."""
    shown = {id(param): _shown(param, param) for param in params if home_of(param) is not None}
    gathering = Gathering(params, write=write, modifier_rank=modifier_rank)
    gathering.open()
    for param in gathering.found:
        if is_gathered(param):
            param.__dict__.update(shown[id(param)])
    return gathering


def _close(gathering: Gathering) -> None:
    for param in gathering.found:
        if is_gathered(param):
            _hide(param)
    gathering.close()


def attach(model: nn.Module) -> None:
    """Set ds_* on the compute parameters of a sharded model, which its modules have inside a forward; ds_status is AVAILABLE."""
    for param, compute in engine_of(model).computed_parameters():
        compute.__dict__.update(_shown(param, compute))


def detach(model: nn.Module) -> None:
    """Undo `attach`, before zs.close."""
    for _, compute in engine_of(model).computed_parameters():
        _hide(compute)
