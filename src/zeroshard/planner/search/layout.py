"""A layout: how a step of a model is spread over ranks and tiers, as options of zs.shard, and what its collectives send.

Ranks are numbered pp outermost, tp, ep or sp innermost, as `zeroshard train --mesh` numbers them: these stay inside a node where they
can.
Volumes are those of the runtime's Comms (docs/learn/network.md tells their sums).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...comm.topology import imagined_topology
from ...config import DEVICE_NAMES, PRECISIONS, STAGES, STATES, Config, Tier
from ...errors import ConfigError, did_you_mean
from ...formats import coded_column
from ...packing.codecs import packing
from ...seam import StateColumn, Topology, rests_away
from ...utils.axes import DP, EP, PLANNED, SP, TP
from ...utils.compression import GRADIENT_CODECS, Compression
from ...utils.state_format import FORMATS, StateFormat
from ..simulator.trace import Resource

# a way to keep activations -> zs.checkpoint_activations: not called, called, or called with options
CHECKPOINTING: dict[str, Any] = {"none": False, "blocks": True, "partitioned": {"partition": True}, "host": {"offload": "cpu"}}
_CHECKPOINT_WORDS = {
    "none": "", "blocks": ", activations checkpointed", "partitioned": ", activations checkpointed, in parts over tp",
    "host": ", activations checkpointed on the host",
}  # fmt: skip
_SAMPLE_NUMEL = 1 << 20  # elements whose packed bytes stand for those of any buffer

# the fields that determine a layout's Comms
_ROUTES = (
    DP, TP, EP, SP, "stage", "separate", "node_size", "shard_size", "hpz", "quantized_weights", "quantized_gradients", "hops", "sums",
)  # fmt: skip

Bytes = dict[Resource, float]
Hop = tuple[Bytes, int]  # what a rank sends in one collective, and the ranks that meet in it


@dataclass(frozen=True)
class Layout:
    """A way to spread a step. dp, pp, tp, ep, sp: ranks along each axis; ep or sp only beside dp. stage: of ZeRO. optimizer, gradient,
    parameter: where they rest.

    micro_batch: sequences of one forward of one rank. micro_batches: their number in a step. hold: run all but the last under
        zs.accumulate, as zs.parallelize does; else each is reduced.
    checkpointing: "none"; "blocks": each keeps its input; "partitioned": ranks of tp keep a part each; "host": the host keeps it.
    shard_size (HSDP, MiCS), hpz, quantized_weights, quantized_gradients, sums, prefetch_nbytes, max_unit_numel: see Config.
        Where prefetch_nbytes is None, computation waits for each gather and reduction (overlap=False).
    mlp_tokens, loss_tokens: tokens that MLPs and the loss compute at a time, see zs.long_context; None: all.
    node_size: ranks of a node. hops: a collective across nodes takes "two", the default, or "one" (hierarchical=False), where the
        bytes are those sent to each peer directly; the simulator makes rings of them.
    optimizer_states: the format in which they rest, by its name. master_weights: see Config.
    gradient_itemsize: bytes of a gradient's element at rest. state_itemsize: of an element's fp32 optimizer states, without masters.
    separate: the device has a memory of its own. rings: reductions go around rings of ranks, as in published runs; in this
        library each rank sends to each directly (engine/comm/base.py:collect). stops_early: a recomputed forward ends where backward has
        all that it needs, as in torch's checkpoints; those of Megatron-LM and DeepSpeed repeat all of it.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    ep: int = 1
    sp: int = 1
    stage: int = 3
    optimizer: Tier = Tier.DEVICE
    gradient: Tier = Tier.DEVICE
    parameter: Tier = Tier.DEVICE
    micro_batch: int = 1
    micro_batches: int = 1
    hold: bool = False
    checkpointing: str = "none"
    mlp_tokens: int | None = None
    loss_tokens: int | None = None
    precision: str = "bf16"
    shard_size: int | None = None
    hpz: int = 1
    quantized_weights: str | Compression | None = None
    quantized_gradients: str | Compression | None = None
    node_size: int = 8
    hops: str = "two"
    sums: str = "ordered"
    prefetch_nbytes: int | None = Config.prefetch_nbytes
    max_unit_numel: int | None = None
    optimizer_states: str | None = None
    master_weights: bool | str = True
    gradient_itemsize: int = 4
    state_itemsize: int = 8
    separate: bool = True
    stops_early: bool = True
    rings: bool = False

    def __post_init__(self) -> None:
        choices = {
            "checkpointing": tuple(CHECKPOINTING),
            "hops": ("one", "two"),
            "sums": ("ordered", "backend"),
            "stage": tuple(STAGES),
            "precision": tuple(PRECISIONS),
            "optimizer_states": (None, *FORMATS),
            "master_weights": (True, False, "split"),
        }
        for name, known in choices.items():
            value, words = getattr(self, name), list(map(str, known))
            if value not in known:
                raise ConfigError(f"{name}: expected one of {', '.join(words)}, got {value!r}.{did_you_mean(str(value), words)}")
        for name in (*PLANNED, EP, SP, "micro_batch", "micro_batches", "node_size", "hpz"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}: expected a whole number of at least 1, got {value!r}.")
        if (self.ep > 1) + (self.sp > 1) + (self.pp * self.tp > 1) > 1:
            raise ConfigError(f"layouts have an axis ep or sp only beside dp, got {self.mesh}: plan this mesh without --auto.")
        for size, name in ((self.shard_size, "shard_size"), (self.hpz, "hpz")):
            if size is not None and (self.data % size or (self.dp % size and self.ep > 1)):
                raise ConfigError(f"{name}: expected a divisor of the {self.data} ranks of data parallelism, got {size}.")

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def data(self) -> int:
        """Number of ranks over which ZeRO works; over dp alone where ep divides the parameters."""
        return self.dp * self.ep * self.sp

    @property
    def tiers(self) -> tuple[Tier, Tier, Tier]:
        """The tiers on which optimizer, gradient and parameter rest."""
        return self.optimizer, self.gradient, self.parameter

    @property
    def itemsize(self) -> int:
        """Bytes of an element of parameters and of activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def one_host(self) -> bool:
        """True if the ranks of data parallelism read each other's memory."""
        return not self.separate and self.data <= max(self.node_size // self.tp, 1)

    @property
    def by_backend(self) -> bool:
        """True if the backend sums gradients; ranks that read each other's memory sum them in rank order."""
        return self.sums == "backend" and not self.one_host

    @property
    def sent_dtype(self) -> torch.dtype:
        """Dtype in which gradients are sent."""
        return torch.float32 if self.by_backend else self.compute_dtype

    def shards(self, divided: bool = False) -> int:
        """Return the number of ranks over which each parameter is sharded. divided: those that ep divides."""
        return self.shard_size or (self.dp if divided else self.data)

    @property
    def master(self) -> torch.dtype | None:
        """Dtype of masters (int16: the lower halves of split ones); None: the optimizer steps the parameters themselves."""
        if self.precision != "fp32" and self.master_weights:
            return torch.int16 if self.master_weights == "split" else torch.float32
        steps_on_host, away = self.optimizer is not Tier.DEVICE, rests_away(self.parameter, self.separate)
        needed = (self.separate and self.parameter is Tier.DEVICE) if steps_on_host else away
        return self.compute_dtype if needed else None

    @property
    def state_format(self) -> StateFormat | None:
        """The format in which the optimizer states of most matrices rest; None: as the optimizer has them."""
        form = None if self.optimizer_states is None else StateFormat(self.optimizer_states)
        return None if form is None or form.format == "fp32" else form

    def columns(self, coded: bool) -> tuple[StateColumn, ...]:
        """Return the optimizer states of a parameter. coded: they rest in `state_format`."""
        form = self.state_format if coded else None
        column = StateColumn("") if form is None else coded_column("exp_avg", form)
        return (column,) * (self.state_itemsize // 4)

    def kept_itemsize(self, coded: bool) -> float:
        """Return the bytes at rest of an element's masters and optimizer states: coded or as the optimizer has them."""
        stepped = torch.float32 if self.master_weights else self.compute_dtype
        states = sum(column.nbytes(column.elements, stepped) / column.elements for column in self.columns(coded))
        return states + (0 if self.master is None else self.master.itemsize)

    @property
    def steps_on(self) -> Resource:
        """The resource that computes the optimizer's step: DEVICE if ranks are a host's cores, wherever states rest."""
        return Resource.DEVICE if self.optimizer is Tier.DEVICE or not self.separate else Resource.HOST

    @property
    def held(self) -> bool:
        """True if the rank adds up micro-batches' gradients in fp32: with `hold`, over pp, over tp or ep if they rest on the device."""
        over_mesh = self.tp * self.ep > 1 and not rests_away(self.gradient, self.separate)
        return self.micro_batches > 1 and (self.hold or self.pp > 1 or over_mesh)

    @property
    def compute_dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype of gradients at rest, of those that the runtime has."""
        return torch.float32 if self.gradient_itemsize >= 4 else self.compute_dtype

    @property
    def sequences(self) -> int:
        """Number of sequences of a step, over all ranks."""
        return self.dp * self.ep * self.micro_batch * self.micro_batches

    def options(self, path: str | None = None) -> dict[str, Any]:
        """Return the layout as options of zs.shard. path: the folder for what rests on disk."""
        found: dict[str, Any] = {"stage": self.stage, "precision": self.precision}
        for name, tier in zip(STATES, self.tiers, strict=True):
            if tier is not Tier.DEVICE:
                found[name] = DEVICE_NAMES[tier]
        if Tier.DISK in self.tiers and path is not None:
            found["offload_path"] = path
        named: dict[str, object] = {
            "shard_size": self.shard_size, "zero_hpz_partition_size": self.hpz if self.hpz > 1 else None, "max_unit_numel": self.max_unit_numel,
            "zero_quantized_weights": self.quantized_weights, "zero_quantized_gradients": self.quantized_gradients,
            "sums": "backend" if self.by_backend else None,
            "optimizer_states": self.optimizer_states, "master_weights": None if self.master_weights is True else self.master_weights,
        }  # fmt: skip
        if self.prefetch_nbytes != Config.prefetch_nbytes:
            named |= {"overlap": False} if self.prefetch_nbytes is None else {"prefetch_nbytes": self.prefetch_nbytes}
        inside = self.node_size // self.tp
        if self.hops == "one" and self.data > inside > 1 and self.data % inside == 0:
            named["hierarchical"] = False
        return found | {name: value for name, value in named.items() if value is not None}

    @property
    def mesh(self) -> dict[str, int]:
        """Ranks by axis, as a Request has them: ep and sp only where there are several."""
        sizes = {axis: getattr(self, axis) for axis in (*PLANNED, EP, SP)}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis in PLANNED}

    def __str__(self) -> str:
        words = [f"ZeRO-{self.stage}" if self.stage else "plain data parallelism"]
        words += [f"dp={self.dp},{axis}={getattr(self, axis)}" for axis in (EP, SP) if getattr(self, axis) > 1]
        if self.pp * self.tp > 1:
            words.append(f"dp={self.dp},pp={self.pp},tp={self.tp}")
        places = zip(("optimizer", "gradient", "parameter"), self.tiers, strict=True)
        words += [f"{name} on {tier.value}" for name, tier in places if tier is not Tier.DEVICE]
        words += [f"groups of {self.shard_size}"] * (self.shard_size is not None) + [f"hpZ {self.hpz}"] * (self.hpz > 1)
        packed = {"weights": self.quantized_weights, "gradients": self.quantized_gradients}
        words += [f"{what} in {getattr(given, 'codec', given)}" for what, given in packed.items() if given]
        words += [f"optimizer states in {self.optimizer_states}"] * (self.state_format is not None)
        words += ["sums by the backend"] * self.by_backend
        words += ["masters split" if self.master_weights else "no masters"] * (self.master_weights is not True)
        shared = f"shared by {self.sp} ranks" if self.sp > 1 else "a rank"
        words.append(f"{self.micro_batches} x {self.micro_batch} sequences {shared}")
        return ", ".join(words) + _CHECKPOINT_WORDS[self.checkpointing]


# -- volumes -------------------------------------------------------------------------------------------------------


def comms_of(layout: Layout, divided: bool = False) -> Topology:
    """Return the Comms of an imagined rank of data parallelism, which tell what they hold and send. divided: those for parameters
    that ep divides."""
    return _comms(Layout(**{name: getattr(layout, name) for name in _ROUTES}), divided)


@functools.lru_cache(maxsize=256)
def _comms(layout: Layout, divided: bool) -> Topology:
    near = max(layout.node_size // layout.tp, 1)
    if divided:  # ranks with the same experts are ep apart
        near = max(near // layout.ep, 1)
    ranks = layout.dp if divided else layout.data
    return imagined_topology(Config(**layout.options()), ranks, near, layout.separate, layout.one_host)


def exchange(
    layout: Layout, kind: str, shards: Sequence[int], dtype: torch.dtype, packs: bool, divided: bool = False
) -> list[Hop]:  # fmt: skip
    """Return what one rank sends, hop after hop, for a collective of flat buffers, each with shards of so many elements.

    kind: see `Comm.hops`. packs: the values are packed if the layout asks for it. divided: see `comms_of`. A hop's second element:
    the ranks that meet in it.
    """
    comms, found = comms_of(layout, divided), []
    for numel in shards:
        comm_of = comms.gradients_of if kind == "reduce" else comms.values_of
        found.append(comm_of(packs, numel * layout.shards(divided)).hops(kind, numel, dtype))
    hops = []
    for buffers in zip(*found, strict=True):
        total = (sum(link) for link in zip(*(hop.sent for hop in buffers), strict=True))
        nbytes = {link: each for link, each in zip((Resource.INSIDE, Resource.BETWEEN), total, strict=True) if each}
        hops += [(nbytes, buffers[0].peers)] if nbytes else []
    return hops


def packed_nbytes(given: str | Compression | None, itemsize: int) -> float:
    """Return the bytes of an element as it is packed, or as it is: also for "low_rank", which packs no elements.

    given: a value of the options zero_quantized_weights and zero_quantized_gradients. Raises ConfigError for an unknown codec.
    """
    compression = Compression.of(given, "codec", GRADIENT_CODECS)
    if compression is None or compression.codec == "low_rank":
        return itemsize
    return packing(compression).packed_nbytes(_SAMPLE_NUMEL) / _SAMPLE_NUMEL
