"""The options of zs.shard, their validation, and the table of stages.

A *stage* is a row of that table: the placement of each model state over the data-parallel ranks (ZeRO, arXiv 1910.02054,
section 5). All other code reads the row, never the stage number.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import nn

from .errors import ConfigError, did_you_mean
from .utils.axes import EP, PLANNED, SP
from .utils.compression import CODECS, GRADIENT_CODECS, Compression
from .utils.option_kinds import (
    BOOL,
    BOUND,
    COUNT,
    FOLDER,
    LENGTH,
    POSITIVE,
    SECONDS,
    SKIPS,
    UNITS,
    WHOLE,
    Kind,
    check_fields,
    check_names,
    is_number,
    is_scale,
    option,
)
from .utils.option_names import PRESETS
from .utils.registry import Registry
from .utils.state_format import StateFormat

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Tier(Enum):
    """Memory or disk in which a model state rests."""

    DEVICE = "device"  # memory of the device that computes (on a CPU: host memory)
    HOST = "host"
    DISK = "disk"


class Placement(Enum):
    """Placement of one model state over the data-parallel ranks."""

    REPLICATED = "replicated"  # every rank holds the whole state (of gradients: the whole reduced gradient)
    PARTIAL = "partial"  # every rank has memory for the whole state; only its own shard is reduced
    SHARDED = "sharded"  # every rank holds 1/N of the state


@dataclass(frozen=True)
class Row:
    """Placement of parameters, gradients and optimizer states."""

    parameter: Placement
    gradient: Placement
    optimizer: Placement


_R, _P, _S = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED
STAGES: dict[int, Row] = {
    0: Row(_R, _R, _R),  # plain data parallelism
    1: Row(_R, _P, _S),  # Pos
    2: Row(_R, _S, _S),  # Pos+g
    3: Row(_S, _S, _S),  # Pos+g+p
}
STATES = ("offload_optimizer", "offload_gradient", "offload_param")
DEVICE_NAMES = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.DISK: "nvme"}
_D, _H, _F = Tier.DEVICE, Tier.HOST, Tier.DISK  # F: files
# A stage, and the tiers of STATES, worth choosing from, in the order of the time that a step sends and waits: stages 1 and 2 send
# as much as plain data parallelism, stage 3 half as much again (ZeRO, section 7); copies to the host come on top, a disk last.
CHOICES: tuple[tuple[int, tuple[Tier, Tier, Tier]], ...] = (
    (0, (_D, _D, _D)), (1, (_D, _D, _D)), (2, (_D, _D, _D)), (3, (_D, _D, _D)),
    (2, (_H, _H, _D)), (1, (_H, _D, _D)), (3, (_H, _H, _D)), (3, (_H, _H, _H)),
    (2, (_F, _H, _D)), (1, (_F, _D, _D)), (3, (_F, _H, _D)), (2, (_F, _F, _D)), (3, (_F, _H, _H)), (3, (_F, _F, _H)), (3, (_F, _F, _F)),
)  # fmt: skip


def written(options: Mapping[str, object]) -> str:
    """Return options as a program gives them to zs.shard, with a folder for what rests on disk."""
    path = {"offload_path": "FOLDER"} if "nvme" in options.values() else {}
    return ", ".join(f"{name}={value!r}" for name, value in {**options, **path}.items())


_TIERS = {"none": Tier.DEVICE, "device": Tier.DEVICE, "cpu": Tier.HOST, "host": Tier.HOST, "nvme": Tier.DISK, "disk": Tier.DISK}
OWN_RESTS = Registry("resting place", _TIERS)  # the program's: (numel, dtype, Links) -> engine/rest.py:Rest in host memory
_OFFLOAD_KINDS = {
    "device": Kind("'none', 'cpu' or 'nvme'", lambda value: isinstance(value, str)),
    "path": FOLDER,
    **dict.fromkeys(("pin_memory", "fused", "checksum", "any_filesystem"), BOOL),
    "ratio": Kind("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1),
    **dict.fromkeys(("buffer_count", "buffer_nbytes"), WHOLE),
}


@dataclass(frozen=True)
class Offload:
    """The tier of one model state. Options of this type also accept a str, which is the `device`.

    device: "none", "cpu" (host memory) or "nvme" (files on a local disk); for the optimizer also a name of
        `zeroshard.seam.register`.
    path: for "nvme": an existing folder on that disk. Each run makes a folder in it, and removes that at its end. None:
        Config.offload_path (in zs.checkpoint_activations: its `path`).
    pin_memory: page-locked host memory if there is a GPU, so that copies overlap with the computation.
    ratio: for the optimizer: the fraction of the states that is offloaded, 0 to 1. The rest stays on the device.
    buffer_count, buffer_nbytes: number and size of each rank's host buffers, through which states are copied. For parameters
        there are half as many buffers, each as large as the largest shard.
    fused: for the optimizer: the host steps with torch's fused kernels. None: True for a model on a GPU; for one on the CPU as
        the optimizer was built, which gives the same bits as without offload.
    checksum: for "nvme": compute a checksum of all bytes written, and compare it when they are read.
    any_filesystem: for "nvme": accept tmpfs and network file systems.
    """

    device: str = "none"
    path: str | None = None
    pin_memory: bool = True
    ratio: float = 1.0
    buffer_count: int = 8
    buffer_nbytes: int = 16 << 20
    fused: bool | None = None
    checksum: bool = False
    any_filesystem: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _OFFLOAD_KINDS, "offload ")
        if self.device not in _TIERS and self.device not in OWN_RESTS:
            also = "".join(f", or {name!r} of this program" for name in OWN_RESTS)
            hint = did_you_mean(self.device, (*_TIERS, *OWN_RESTS))
            raise ConfigError(f"offload device: expected 'none', 'cpu' or 'nvme'{also}, got {self.device!r}.{hint}")
        if self.buffer_count < 2 or self.buffer_nbytes < 1 << 16:
            raise ConfigError(
                "offload buffers: expected a buffer_count of at least 2 and buffer_nbytes of at least 65536, got "
                f"{self.buffer_count} and {self.buffer_nbytes}."
            )

    @property
    def tier(self) -> Tier:
        return _TIERS.get(self.device, Tier.HOST)

    @property
    def own(self) -> bool:
        """True where the device is a resting place that the program has registered."""
        return self.device not in _TIERS

    def check_use(self, name: str) -> None:
        """Raise ConfigError if the device is a registered resting place and the option is not the one for optimizer states."""
        if self.own and name != "offload_optimizer":
            raise ConfigError(
                f"{name}={self.device!r}: a registered resting place is for optimizer states and masters, which a step reads and "
                "writes piece by piece. Give it to offload_optimizer."
            )

    @classmethod
    def of(cls, given: object, path: str | None, name: str, option: str = "offload_path") -> Offload:
        """Make an Offload from an Offload, a device name, a mapping of fields, or None ("none").

        path: the folder for "nvme" if `given` has no path. name, option: the options' names, for messages.
        """
        if given is None or isinstance(given, str):
            offload = cls(given or "none")
        elif isinstance(given, Offload):
            offload = given
        elif isinstance(given, Mapping):
            fields = {"path" if key == "nvme_path" else key: value for key, value in given.items()}
            check_names(cls, fields, name)
            if fields and "device" not in fields:
                raise ConfigError(f"{name}: {fields} names no device, so nothing would be offloaded: add 'device': 'cpu'.")
            for key in ("ratio", "fused"):
                if key in fields and name != "offload_optimizer":
                    raise ConfigError(f"{name}: {key} applies to optimizer states only: give it to offload_optimizer.")
            offload = cls(**fields)
        else:
            got = type(given).__name__
            raise ConfigError(f"{name}: expected 'none', 'cpu', 'nvme', an Offload or a mapping, got {got}.")
        offload.check_use(name)
        if offload.tier is not Tier.DISK or offload.path is not None:
            return offload
        if path is None:
            raise ConfigError(
                f"{name}: offload to 'nvme' needs a path, of a folder on a local disk: {option}='...' for all that "
                "name none, or Offload('nvme', path='...')."
            )
        return dataclasses.replace(offload, path=path)


PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GROUPS = ("group", "process_group", "mesh", "device_mesh")  # names in other libraries of zs.shard's argument `comm`
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
UNIT_CHOICES = ("auto", "model", "leaf")


def _precision_name(value: object) -> str:
    """Return the short name of a precision: 'bf16' for 'bfloat16' or torch.bfloat16. Unknown names are returned as they are."""
    name = str(value).removeprefix("torch.")
    return _ALIASES.get(name, name)


def _as_dtype(value: object) -> Any:
    """Return the dtype of a precision's name; return any other value unchanged."""
    return PRECISIONS.get(_precision_name(value), value)


def _are_dtypes(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(dtype, torch.dtype) and dtype.is_floating_point for key, dtype in value.items()
    )


_DTYPES = Kind("{class name or name pattern: floating-point dtype}", _are_dtypes)
_DTYPE = Kind("torch.float32, bfloat16 or float16", lambda value: value in PRECISIONS.values())
_MASTERS = Kind("True, False or 'split'", lambda value: isinstance(value, bool) or value == "split")
_SUMS = Kind("'ordered' or 'backend'", lambda value: value in ("ordered", "backend"))
_LOSS_SCALE = Kind("'dynamic' or a number above 0", lambda value: value == "dynamic" or is_scale(value))
_SCALE = Kind("a number above 0", is_scale)

SECTION = "zeroshard"  # zeroshard's section of a layout's file; the other sections are a DeepSpeed configuration
_LAYOUT_KEYS = ("shard", "mesh", "micro_batch", "micro_batches", "global_batch")


def read_layout(path: str | os.PathLike) -> dict[str, Any]:
    """Return the layout in a file of `zeroshard plan --auto`: shard (options of zs.shard), mesh (ranks by axis), micro_batch, ...

    Raise ConfigError if the file can not be read, or is no valid layout.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise ConfigError(
            f"config: {path} can not be read: {error.strerror}. `zeroshard plan --auto` writes such a file."
        ) from None
    except ValueError as error:
        raise ConfigError(f"config: {path} is not JSON: {error}.") from None
    section: Any = found.get(SECTION) if isinstance(found, dict) else None
    missing = [key for key in _LAYOUT_KEYS if key not in section] if isinstance(section, dict) else [SECTION]
    if missing:
        raise ConfigError(
            f"config: {path} has no {missing[0]!r}: expected a file that `zeroshard plan --auto` has written. A configuration of "
            "DeepSpeed is for zeroshard.deepspeed.initialize(config=...)."
        )
    mesh = section["mesh"] if isinstance(section["mesh"], dict) else {}
    if unknown := [axis for axis in mesh if axis not in (*PLANNED, EP, SP)]:
        raise ConfigError(f"config: {path}: mesh: expected ranks along pp, dp, ep, tp and sp, got {unknown[0]!r}.")
    counts = {f"mesh: {axis}": size for axis, size in mesh.items()}
    counts |= {"mesh: dp": mesh.get("dp")} | {key: section[key] for key in _LAYOUT_KEYS[2:]}
    counts |= {key: section[key] for key in ("seq", "node_size") if key in section}
    for name, value in counts.items():  # the file may have been edited
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"config: {path}: {name}: expected a whole number of at least 1, got {value!r}.")
    if not isinstance(section.get("checkpoint_activations"), (dict, type(None))):
        raise ConfigError(
            f"config: {path}: checkpoint_activations: expected options of zs.checkpoint_activations by name, or null, got "
            f"{section['checkpoint_activations']!r}."
        )
    if not isinstance(section["shard"], dict):
        raise ConfigError(f"config: {path}: shard: expected options of zs.shard by name, got {section['shard']!r}.")
    try:
        Config.build(None, **section["shard"])
    except ConfigError as error:
        raise ConfigError(f"config: {path}: shard: {error}") from None
    return section


Units = str | tuple[str | type, ...] | Callable[[str, nn.Module], bool]
_CHOSEN: Any = None  # default of a field that __post_init__ replaces


@dataclass(frozen=True)
class Config:
    """Every option of `zs.shard`. Immutable, and validated when built. `Config.preset(name)`, or preset=name beside the options,
    sets several of them at once. The names: "ddp", "zero-1", "zero-2", "zero-3", "zero-offload", "zero-3-offload",
    "zero-infinity" (which needs offload_path).

    stage: 0: nothing is sharded; 1: optimizer states are; 2: also gradients; 3: also parameters. `zs.shard` also takes "auto"
        (see its `sample`).
    precision: dtype of parameters, activations and sent gradients: "fp32", "bf16" or "fp16". Frozen parameters have no fp32
        masters: they are rounded, and stay rounded in exports and after zs.close (see `dtypes`).
    units: modules whose parameters are gathered and reduced together: "auto" (the classes that repeat in a container), "model"
        (one unit), "leaf" (each module with parameters), a tuple of classes or class names, or a function (name, module) -> bool.
    max_unit_numel: units with more elements are split into their child modules, if they have any (0: split all units).
    min_unit_numel: neighbouring units are merged until they have this many elements; 0: no units are merged.
    max_grad_norm: clip the global norm to this before each step; None or 0: never.
    overlap: overlap reductions and gathers with the computation; False waits for each (for debugging).
    prefetch_nbytes: bound on the bytes gathered ahead of use. One unit is gathered ahead in any case, also with 0.
    gradient_dtype: dtype in which reduced gradients are stored and accumulated.
    reduce_dtype: dtype in which gradients are sent; None: the precision's, or with sums="backend" at least fp32.
    sums: "ordered": every rank sends each other one its slice, and sums are computed in fp32 in rank order: the same bits on every
        backend. "backend": the process group sums, by reduce_scatter_tensor, in the dtype in which gradients are sent, as FSDP2
        and DeepSpeed do it: nothing is received beside the shard, and the bits depend on the backend and the number of ranks.
    master_weights: keep fp32 masters and states if the precision is below fp32. False: the optimizer steps the low-precision
        parameters with states of their dtype, and rank 0 prints a line. "split" (bf16): the masters are the parameters and 16
        more bits each, 2 bytes less; one value in 131,072, half-way between two bf16 numbers, loses its last bit.
    optimizer_states: format in which optimizer states rest, on every tier: "fp32", "bf16", "fp8", "int8", "int4", a
        zs.StateFormat, or a mapping from names of states to these, {"exp_avg": "int8"}. Norms, biases, embeddings and small
        parameters keep fp32 states.
    dtypes: a dtype for some modules: {class name or name pattern: dtype or its name}, e.g. {"LayerNorm": "fp32"}. It applies to
        the module and everything inside; of several matching keys that of the innermost module wins. Inputs and outputs are cast
        where the dtype changes. A key that matches no module names parameters ({"router.weight": "fp32"}), and casts no inputs.
        Norms with running statistics are fp32 unless a key matches them. Integer parameters keep their dtype, and so do fp64 and
        frozen fp8 and fp4 parameters that no key matches.
    cast_inputs: cast the floating-point inputs of the model's forward to the dtype in which the model computes, which rounds
        them: in bf16 999.0 becomes 1000.0. False hands them over as they are, for timesteps, tables or coordinates; the program
        then casts what a low-precision module takes. A model whose parameters are all fp32 gets its inputs as they are.
    cast_buffers: cast floating-point buffers to the dtype in which their module computes. False leaves them: rotary tables need
        fp32, but a table that is added to activations must be cast.
    agree_buffers: buffers begin with rank 0's values, as parameters do; False: each rank keeps its own.
    loss_scale: fp16: "dynamic", or a fixed number above 0.
    initial_loss_scale, loss_scale_window: fp16, dynamic scale: its first value, and the good steps before it doubles.
    loss_scale_delay: fp16: this many good steps, at the start and after each overflow, do not count for the window.
    loss_scale_hysteresis, consecutive_hysteresis: fp16: the scale is halved by the n-th overflow, and by each one after it.
        Counting begins again when the scale doubles, and with consecutive_hysteresis after every good step.
    min_loss_scale: fp16: the dynamic scale is not halved below this.
    skip_nonfinite: all ranks skip a step whose gradients are not finite; False takes it, as plain torch does (not in fp16).
    max_skipped_steps: after this many non-finite steps in a row the step raises NonFiniteError; inf: never.
    hold_schedulers: torch's schedulers do not advance after a skipped step, whoever calls them.
    map_shared: ranks on one CPU host read each other's shards in place, without copies.
    keep_host_memory: CPU: have the C allocator, for the whole process, keep freed memory between steps (utils/host_memory.py).
        With parameters on disk it returns large blocks to the system at once instead.
    offload_optimizer: stages 1 to 3: tier on which optimizer states and master weights rest; off the device, the host steps them.
        An Offload, its device ("none", "cpu", "nvme"), or a mapping of its fields.
    offload_gradient: stages 2 and 3: tier of reduced gradient shards. Default: the host if the optimizer is offloaded.
    offload_param: stage 3: tier of parameter shards.
    offload_path: folder for the states on "nvme" whose Offload has no path.
    delayed_update: after this many warm-up steps (0: from the first) the host's update of a step runs during the next step's
        forward and backward, one step late (ZeRO-Offload, arXiv 2101.06840, section 4.3; 40 in the paper). None: never.
    param_persistence_threshold: stage 3: parameters of at most this many elements stay whole on every rank's device, as at stage
        2, and need no gather; 0: none. DeepSpeed's stage3_param_persistence_threshold.
    model_persistence_threshold: stage 3: bound on the elements of all such parameters; the first ones in the model stay whole.
    max_live_parameters: stage 3: keep a unit gathered from forward to backward if at most this many elements are gathered in
        between; 0: none.
    prefetch_bucket_size: prefetch_nbytes as a number of elements.
    shard_size, mics_shard_size: shard states over groups of this many consecutive ranks, each of which holds all shards (MiCS,
        arXiv 2205.00119, section 3.2; HSDP). Gathers stay inside of a group.
    replicate_optimizer: with groups, or a mesh of two axes: each group holds all optimizer states. False: optimizer states and
        gradients are sharded over all ranks, and parameters over each group, as with zero_hpz_partition_size.
    zero_hpz_partition_size: stage 3: the ranks of each node of this many ranks keep secondary shards of the parameters: the
        forward's gathers bring them, and later gathers stay inside of the node: hpZ (ZeRO++, arXiv 2306.10209, 4.2). 1: none.
    zero_quantized_weights: parameters are sent packed: qwZ (ibid., section 4.1). True ("int8"), "int8", "int4", "fp8", or a
        zs.Compression.
    zero_quantized_gradients: gradients are sent packed: qgZ (ibid., section 4.3), in two hops if ranks are in nodes. The same
        values, and "top_k", "low_rank" (arXiv 1905.13727).
    hierarchical: gathers and reductions take two hops, between nodes and inside of them. None: if nodes are given, or found
        (several hosts with the same number of ranks).
    stall_timeout_s: a rank that waits longer than this raises StallError on every rank, which names the missing ranks. Above 0,
        at most 2,000,000.

    A bound on a number of elements or bytes may be inf: no bound.
    """

    stage: int = 3
    precision: str = "fp32"
    units: Units = option("auto", UNITS)
    max_unit_numel: int | None = option(None, BOUND)
    min_unit_numel: int = option(0, COUNT)
    max_grad_norm: float | None = option(None, LENGTH)
    overlap: bool = option(True, BOOL)
    prefetch_nbytes: int = option(64 << 20, BOUND)
    gradient_dtype: torch.dtype = option(torch.float32, _DTYPE)
    reduce_dtype: torch.dtype | None = option(None, _DTYPE)
    sums: Literal["ordered", "backend"] = option("ordered", _SUMS)
    master_weights: bool | Literal["split"] = option(True, _MASTERS)
    optimizer_states: StateFormat | Mapping[str, StateFormat] | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict, metadata={"kind": _DTYPES})
    cast_inputs: bool = option(True, BOOL)
    cast_buffers: bool = option(False, BOOL)
    agree_buffers: bool = option(True, BOOL)
    loss_scale: str | float = option("dynamic", _LOSS_SCALE)
    initial_loss_scale: float = option(2.0**16, _SCALE)
    loss_scale_window: int = option(2000, POSITIVE)
    loss_scale_delay: int = option(0, COUNT)
    loss_scale_hysteresis: int = option(1, POSITIVE)
    consecutive_hysteresis: bool = option(False, BOOL)
    min_loss_scale: float = option(2.0**-14, _SCALE)
    skip_nonfinite: bool = option(True, BOOL)
    max_skipped_steps: float = option(50, SKIPS)
    hold_schedulers: bool = option(True, BOOL)
    map_shared: bool = option(True, BOOL)
    keep_host_memory: bool = option(True, BOOL)
    offload_optimizer: Offload = _CHOSEN
    offload_gradient: Offload = _CHOSEN
    offload_param: Offload = _CHOSEN
    offload_path: str | None = option(None, FOLDER)
    delayed_update: int | None = option(None, COUNT)
    param_persistence_threshold: float = option(0, BOUND)
    model_persistence_threshold: float = option(math.inf, BOUND)
    max_live_parameters: int = option(0, BOUND)
    prefetch_bucket_size: int | None = option(None, BOUND)
    shard_size: int | None = option(None, POSITIVE)
    mics_shard_size: int | None = option(None, POSITIVE)
    replicate_optimizer: bool = option(True, BOOL)
    zero_hpz_partition_size: int = option(1, POSITIVE)
    zero_quantized_weights: Compression | None = None
    zero_quantized_gradients: Compression | None = None
    hierarchical: bool | None = option(None, BOOL)
    stall_timeout_s: float = option(60.0, SECONDS)

    if TYPE_CHECKING:  # fields have their validated types; the constructor accepts more

        def __init__(self, **fields: Unpack[ConfigFields]) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or not isinstance(self.stage, int) or self.stage not in STAGES:
            hint = " Pass the number, not the text." if str(self.stage) in map(str, STAGES) else ""
            raise ConfigError(f"stage: expected one of 0, 1, 2, 3, or 'auto' for zs.shard, got {self.stage!r}.{hint}")
        precision = _precision_name(self.precision)
        if precision not in PRECISIONS:
            known = ", ".join(map(repr, PRECISIONS))
            hint = did_you_mean(precision, PRECISIONS)
            raise ConfigError(f"precision: expected one of {known}, got {self.precision!r}.{hint}")
        object.__setattr__(self, "precision", precision)
        if isinstance(self.units, type) or (isinstance(self.units, str) and self.units not in UNIT_CHOICES):
            # accept a bare class, or its name, for a tuple of one
            object.__setattr__(self, "units", (self.units,))
        for name in ("gradient_dtype", "reduce_dtype"):
            object.__setattr__(self, name, _as_dtype(getattr(self, name)))
        if isinstance(self.dtypes, Mapping):
            object.__setattr__(self, "dtypes", {key: _as_dtype(dtype) for key, dtype in self.dtypes.items()})
        check_fields(self, {f.name: f.metadata["kind"] for f in dataclasses.fields(self) if f.metadata})
        if self.max_grad_norm == 0:
            object.__setattr__(self, "max_grad_norm", None)
        object.__setattr__(self, "optimizer_states", StateFormat.of(self.optimizer_states))
        self._normalise_offload()
        self._normalise_communication()
        rounds = self.zero_quantized_weights is not None and self.row.parameter is not Placement.SHARDED
        clashes = {
            f"precision={self.precision!r}: use precision='bf16', which has the exponent of fp32": self.precision != "bf16",
            "delayed_update, which steps masters while forward reads the parameters": self.delayed_update is not None,
            f"zero_quantized_weights at stage {self.stage}, which rounds the parameters: use stage 3": rounds,
        }
        for why in (why for why, clashing in clashes.items() if clashing and self.master_weights == "split"):
            raise ConfigError(f"master_weights='split' does not go with {why}; or use master_weights=True.")

    def _normalise_offload(self) -> None:
        for name in ("offload_optimizer", "offload_gradient", "offload_param"):
            given = getattr(self, name)
            if given is None and name == "offload_gradient" and self.row.gradient is Placement.SHARDED:
                # the host steps, so gradients go there in any case
                given = "cpu" if self.offload_optimizer.tier is not Tier.DEVICE else None
            object.__setattr__(self, name, Offload.of(given, self._offload_folder, name))
        needs = {
            "offload_optimizer": (self.row.optimizer, "1, 2 or 3"),
            "offload_gradient": (self.row.gradient, "2 or 3"),
            "offload_param": (self.row.parameter, "3"),
        }
        for name, (placement, stages) in needs.items():
            if name != "offload_optimizer" and getattr(self, name).tier is not Tier.DEVICE and getattr(self, name).ratio != 1:
                raise ConfigError(f"{name}: ratio applies to optimizer states only. Give {name} an Offload without it.")
            if getattr(self, name).tier is not Tier.DEVICE and placement is not Placement.SHARDED:
                raise ConfigError(
                    f"{name}={getattr(self, name).device!r} needs stage {stages}: at stage {self.stage} this state is "
                    f"{placement.value}. Raise the stage, or leave {name} out."
                )
        if self.delayed_update is not None and self.offload_optimizer.tier is Tier.DEVICE:
            raise ConfigError("delayed_update needs offload_optimizer='cpu' or 'nvme': it hides the host's update.")
        if self.delayed_update is not None and self.offload_param.tier is Tier.DISK:
            raise ConfigError("delayed_update with offload_param='nvme' would write parameters twice: choose one of them.")

    def _normalise_communication(self) -> None:
        for name, codecs in (("zero_quantized_weights", CODECS), ("zero_quantized_gradients", GRADIENT_CODECS)):
            object.__setattr__(self, name, Compression.of(getattr(self, name), name, codecs))
        if self.shard_size is not None and self.mics_shard_size not in (None, self.shard_size):
            raise ConfigError(f"shard_size={self.shard_size} and mics_shard_size={self.mics_shard_size} mean the same: give one.")
        object.__setattr__(self, "shard_size", self.shard_size or self.mics_shard_size)
        object.__setattr__(self, "mics_shard_size", self.shard_size)  # both names show the value
        if self.zero_hpz_partition_size > 1 and self.row.parameter is not Placement.SHARDED:
            raise ConfigError(
                f"zero_hpz_partition_size needs stage 3: at stage {self.stage} parameters are {self.row.parameter.value}."
            )
        if self.zero_hpz_partition_size > 1 and self.shard_size is not None:
            raise ConfigError(
                "zero_hpz_partition_size shards parameters over all ranks, shard_size over groups of ranks: give one of them."
            )
        if self.zero_hpz_partition_size > 1 and self.hierarchical is False:
            raise ConfigError(
                "hierarchical=False with zero_hpz_partition_size: secondary shards need communication in two hops. Give one of them."
            )
        if self.zero_quantized_gradients is not None and self.sums == "backend":
            raise ConfigError(
                "sums='backend' with zero_quantized_gradients: packed gradients are unpacked and summed in rank order. Give one of them."
            )
        if self.zero_quantized_weights is not None and self.row.optimizer is not Placement.SHARDED:
            raise ConfigError("zero_quantized_weights needs stage 1, 2 or 3: at stage 0 no parameters are sent.")

    def farther(self) -> Iterator[dict[str, Any]]:
        """Yield the options that lead to each of CHOICES with no lower stage and no nearer tiers than here, in their order."""
        order, now = list(Tier), [getattr(self, name).tier for name in STATES]
        for stage, tiers in CHOICES:
            nearer = any(order.index(new) < order.index(old) for new, old in zip(tiers, now, strict=True))
            found: dict[str, Any] = {"stage": stage} if stage != self.stage else {}
            found |= {name: DEVICE_NAMES[new] for name, new, old in zip(STATES, tiers, now, strict=True) if new is not old}
            if found and stage >= self.stage and not nearer:
                yield found

    @classmethod
    def build(
        cls, config: Config | str | os.PathLike | None = None, *, preset: str | None = None, **options: Unpack[ConfigFields]
    ) -> Config:
        """Return `config` with fields replaced by the preset's options, and then by `options`. An option of None is not given.

        config: a Config, or the path of a file that `zeroshard plan --auto` has written (`read_layout`).
        """
        if isinstance(config, (str, os.PathLike)):
            laid_over = {name: value for name, value in options.items() if value is not None}
            return cls.build(None, preset=preset, **{**read_layout(config)["shard"], **laid_over})
        if config is not None and not isinstance(config, Config):
            raise ConfigError(
                f"config: expected a zs.Config, got {type(config).__name__}. Give options by name: stage=3, or the path of a plan."
            )
        if preset is not None and preset not in list(PRESETS):
            raise ConfigError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}.{did_you_mean(preset, PRESETS)}")
        known = {"preset"} | {f.name for f in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                hint = " Did you mean comm?" if name in _GROUPS else did_you_mean(name, known)
                raise ConfigError(f"unknown option {name!r}.{hint} Known: {', '.join(sorted(known))}.")
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        given = {**PRESETS[preset], **given} if preset is not None else given
        if config is not None and "offload_path" in given:  # replace it also in states that took the folder of `config`
            for name in ("offload_optimizer", "offload_gradient", "offload_param"):
                state = getattr(config, name)
                if state.path is not None and state.path == config._offload_folder:
                    given.setdefault(name, dataclasses.replace(state, path=None))
        if {"shard_size", "mics_shard_size"} & given.keys():  # `config` shows its own value under both names
            given = {"shard_size": None, "mics_shard_size": None, **given}
        return dataclasses.replace(config, **given) if config is not None else cls(**given)

    @classmethod
    def preset(cls, name: str, **options: Unpack[ConfigFields]) -> Config:
        """Return the configuration of a preset (see PRESETS), with fields replaced by `options`."""
        return cls.build(None, preset=name, **options)

    @property
    def _offload_folder(self) -> str | None:
        return str(self.offload_path) if self.offload_path is not None else None

    @property
    def row(self) -> Row:
        return STAGES[self.stage]

    @property
    def prefetch_limit_nbytes(self) -> int | None:
        """Largest number of bytes that are gathered ahead of use, beside one unit; None: nothing is gathered ahead."""
        if not self.overlap or self.prefetch_bucket_size is None:
            return self.prefetch_nbytes if self.overlap else None
        return self.prefetch_bucket_size * self.compute_dtype.itemsize

    @property
    def compute_dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    def sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of `dtype` are sent."""
        return self.reduce_dtype or (torch.promote_types(dtype, torch.float32) if self.sums == "backend" else dtype)


# -- the same options as types, for editors and type checkers: a test compares them with the fields of Config


class ConfigFields(TypedDict, total=False):
    """The keyword arguments of `zs.Config`. None stands for an argument that is not given."""

    stage: int | Literal["auto"] | None
    precision: str | torch.dtype | None
    units: Units | None
    max_unit_numel: float | None
    min_unit_numel: float | None
    max_grad_norm: float | None
    overlap: bool | None
    prefetch_nbytes: float | None
    gradient_dtype: str | torch.dtype | None
    reduce_dtype: str | torch.dtype | None
    sums: Literal["ordered", "backend"] | None
    master_weights: bool | Literal["split"] | None
    optimizer_states: StateFormat | str | Mapping[str, object] | None
    dtypes: Mapping[str, str | torch.dtype] | None
    cast_inputs: bool | None
    cast_buffers: bool | None
    agree_buffers: bool | None
    loss_scale: str | float | None
    initial_loss_scale: float | None
    loss_scale_window: int | None
    loss_scale_delay: float | None
    loss_scale_hysteresis: int | None
    consecutive_hysteresis: bool | None
    min_loss_scale: float | None
    skip_nonfinite: bool | None
    max_skipped_steps: float | None
    hold_schedulers: bool | None
    map_shared: bool | None
    keep_host_memory: bool | None
    offload_optimizer: Offload | str | Mapping[str, object] | None
    offload_gradient: Offload | str | Mapping[str, object] | None
    offload_param: Offload | str | Mapping[str, object] | None
    offload_path: str | os.PathLike[str] | None
    delayed_update: float | None
    param_persistence_threshold: float | None
    model_persistence_threshold: float | None
    max_live_parameters: float | None
    prefetch_bucket_size: float | None
    shard_size: int | None
    mics_shard_size: int | None
    replicate_optimizer: bool | None
    zero_hpz_partition_size: int | None
    zero_quantized_weights: Compression | str | bool | Mapping[str, object] | None
    zero_quantized_gradients: Compression | str | bool | Mapping[str, object] | None
    hierarchical: bool | None
    stall_timeout_s: float | None


class ShardOptions(ConfigFields, total=False):
    """The keyword options of `zs.shard`: fields of Config, and a preset, whose values they override."""

    preset: str | None
