"""The common options of `zeroshard plan` and `zeroshard simulate`, and the planner's request that they make."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..planner.model_source import example_of, source_of
from ..planner.request import FLAGS, Request
from ..planner.simulator.hardware import Hardware
from ..utils.compression import CODECS, GRADIENT_CODECS
from .arguments import Parser, UsageError, add_options
from .mesh_axes import MeshAxes
from .options import OFFLOADS, PRECISIONS, SCHEDULES, _option

RENAMED = {  # old name of an option -> new name
    "--device": "--hardware (--device is a torch device, of zeroshard train)", "--batch": "--micro-batch",
    "--micro-batches": "--accumulate", "--activation-checkpointing": "--checkpoint-activations",
}  # fmt: skip
_RUN, _MEMORY, _OFFLOAD, _NETWORK, _OUTPUT = "the run", "memory of a device", "offload", "communication", "output"
_SHARD = {flag: option for option, flag in FLAGS.items()}
_SAME = ("stage", "precision", "offload_optimizer", "offload_gradient", "offload_param", "shard_size", "hierarchical",
         "max_live_parameters", "max_unit_numel", "prefetch_bucket_size", "delayed_update")  # fmt: skip


@dataclass(frozen=True)
class PlanOptions:
    """The common options. Each field is the option of that name, but for `model`, the positional argument."""

    model: str
    ranks: int | None = _option(None, "ranks in all (default: the mesh's, else a node)", type=int, group=_RUN)
    mesh: str | None = _option(None, "ranks along each axis: dp=64,pp=4,tp=8 (data, pipeline and tensor parallel)", group=_RUN)
    hardware: str = _option("h100-80gb", "hardware by name, or a file that `zeroshard calibrate` wrote", group=_RUN)
    node_size: int | None = _option(None, "ranks of a node (default: the hardware's devices)", type=int, group=_RUN)
    micro_batch: int = _option(1, "sequences of one forward pass of one rank", type=int, group=_RUN)
    seq: int | None = _option(None, "tokens of a sequence (default: the model's)", type=int, group=_RUN)
    example: str | None = _option(
        None, "module:function that makes a micro-batch for a model that does not read tokens: a tensor, or a tuple or dictionary "
        "of arguments; it is called with --micro-batch where it takes an argument",
        metavar="FUNCTION", group=_RUN,
    )  # fmt: skip
    accumulate: int | None = _option(
        None, "micro-batches of a step (default: 1, with stages of pp 2 a stage)", type=int, group=_RUN
    )
    precision: str | None = _option(
        None, "compute precision; master weights stay fp32 (default: bf16 on GPUs, fp32 on CPUs)", choices=PRECISIONS, group=_RUN
    )
    stage: int | None = _option(None, "ZeRO stage (default: 3)", choices=(0, 1, 2, 3), type=int, group=_RUN)
    checkpoint_activations: bool = _option(
        False, "keep only the inputs of blocks, and recompute the rest in backward", action="store_true", group=_MEMORY
    )
    partition_activations: bool = _option(
        False, "keep a part of each input on each rank of tp (with --mesh tp=2)", action="store_true", group=_MEMORY
    )
    max_live_parameters: int = _option(
        0, "keep units gathered for backward, up to this number of elements", type=int, group=_MEMORY
    )
    max_unit_numel: int | None = _option(None, "split units of more elements into their child modules", type=int, group=_MEMORY)
    prefetch_bucket_size: int | None = _option(
        None, "elements gathered ahead of use (default: 64 MiB of them)", type=int, group=_MEMORY
    )
    offload_optimizer: str | None = _option(
        None, "tier of optimizer states: cpu, nvme (files); both step on the host", choices=OFFLOADS, group=_OFFLOAD
    )
    offload_gradient: str | None = _option(
        None, "tier of gradients (default: cpu if the states are offloaded)", choices=OFFLOADS, group=_OFFLOAD
    )
    offload_param: str | None = _option(None, "tier of parameters", choices=OFFLOADS, group=_OFFLOAD)
    offload_activations: str = _option(
        "none", "checkpoint activations, and keep inputs of blocks on this tier", choices=OFFLOADS, group=_OFFLOAD
    )
    delayed_update: int | None = _option(
        None, "after so many steps, step on the host while the next step computes", type=int, group=_OFFLOAD
    )
    shard_size: int | None = _option(
        None, "shard over groups of so many ranks, replicate over groups (HSDP, MiCS)", type=int, group=_NETWORK
    )
    hpz: int = _option(1, "ranks that share a secondary copy of parameters, stage 3 (hpZ); 1: none", type=int, group=_NETWORK)
    quantized_weights: str | None = _option(None, "compress parameters (qwZ)", choices=CODECS, group=_NETWORK)
    quantized_gradients: str | None = _option(None, "compress gradients (qgZ)", choices=GRADIENT_CODECS, group=_NETWORK)
    hierarchical: bool | None = _option(
        None, "two hops, between nodes and inside of them", action=argparse.BooleanOptionalAction, group=_NETWORK
    )
    schedule: str | None = _option(
        None, "order of micro-batches in stages of pp (default: 1f1b)", choices=SCHEDULES, type=str.lower, group=_NETWORK
    )
    sequence_parallel: bool = _option(
        False, "split norms and dropout along the sequence over the ranks of tp", action="store_true", group=_NETWORK
    )
    out: str | None = _option(None, "folder for pictures, the page and report.json", metavar="DIR", group=_OUTPUT)
    json: bool = _option(False, "print JSON in place of text, at most 100 lines", action="store_true", group=_OUTPUT)

    def __post_init__(self) -> None:
        for name in ("ranks", "node_size", "micro_batch", "seq", "accumulate", "hpz", "shard_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected a positive integer, got {value}")

    def request(self) -> Request:
        """Return the planner's request. Raises UsageError, and ConfigError for the model, the hardware or options of zs.shard."""
        hardware = Hardware.named(self.hardware)
        source, axes = source_of(self.model), self._axes(hardware)
        if self.example is not None:
            source = example_of(source, self.example)
            if axes.pp * axes.tp > 1 or self.seq is not None:
                raise UsageError("--example: expected neither --seq nor --mesh with pp or tp, which are for models of tokens")
        if self.shard_size is not None and axes.dp % self.shard_size:
            raise UsageError(f"--shard-size: expected a divisor of the {axes.dp} ranks of dp, got {self.shard_size}")
        for name in ("schedule", "sequence_parallel", "partition_activations"):
            axis = "pp" if name == "schedule" else "tp"
            if getattr(self, name) and getattr(axes, axis) == 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected only with --mesh {axis}=2")
        request = Request(
            source, hardware, {"pp": axes.pp, "dp": axes.dp, "tp": axes.tp}, self.micro_batch, self.seq or source.default_seq,
            self.accumulate or (2 * axes.pp if axes.pp > 1 else 1), self.node_size, self._shard(hardware), self._checkpointing(),
            {name: getattr(self, name) for name in ("schedule", "sequence_parallel") if getattr(self, name)},
        )  # fmt: skip
        request.config  # noqa: B018  # raises ConfigError if it is wrong
        return request

    def _axes(self, hardware: Hardware) -> MeshAxes:
        axes = MeshAxes() if self.mesh is None else MeshAxes.parse(self.mesh)
        if self.mesh is None:
            return MeshAxes(dp=self.ranks or hardware.devices_per_node)
        if self.ranks is not None and "dp" not in self.mesh and self.ranks % (axes.pp * axes.tp) == 0:
            return MeshAxes(axes.pp, self.ranks // (axes.pp * axes.tp), axes.tp)  # the rest is data parallel
        if self.ranks is not None:
            axes.check_ranks(self.ranks)
        return axes

    def _shard(self, hardware: Hardware) -> dict[str, Any]:
        given = {_SHARD.get(name, name): getattr(self, name) for name in (*_SAME, *_SHARD)}
        usual = {"max_live_parameters": 0, "zero_hpz_partition_size": 1}
        found = {name: value for name, value in given.items() if value not in (None, "none") and value != usual.get(name, ...)}
        found.setdefault("stage", 3)
        found.setdefault("precision", "bf16" if hardware.separate else "fp32")
        return found | ({"offload_path": "."} if "nvme" in found.values() else {})  # planning writes no file there

    def _checkpointing(self) -> bool | dict[str, Any]:
        found: dict[str, Any] = {"partition": True} if self.partition_activations else {}
        if self.offload_activations != "none":
            found |= {"offload": self.offload_activations} | ({"path": "."} if self.offload_activations == "nvme" else {})
        return found or self.checkpoint_activations


def parse(kind: type[PlanOptions], program: str, description: str, argv: Sequence[str], renamed: Mapping[str, str]) -> Any:
    """Parse the command line into options of `kind`. Raises UsageError. renamed: old -> new names, in addition to RENAMED."""
    parser = Parser(prog=program, usage="%(prog)s [options] MODEL", description=description, renamed=RENAMED | dict(renamed))
    parser.add_argument(
        "model", metavar="MODEL",
        help="a preset, a Hugging Face model id whose config is in the local cache, a config.json or its folder, or module:function",
    )  # fmt: skip
    add_options(parser, kind)
    return kind(**vars(parser.parse(argv)))
