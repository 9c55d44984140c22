"""What `zeroshard plan` and `zeroshard simulate` are asked: their common options, and the request that these are.

`--batch` counts sequences of one forward of one rank: planned is a rank, whatever the number of the others.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..compression import CODECS, GRADIENT_CODECS
from ..planner.model_source import source_of
from ..planner.request import FLAGS, Request
from ..simulator.hardware import Hardware
from .arguments import Parser, UsageError
from .mesh_axes import MeshAxes
from .options import OFFLOADS, PRECISIONS, SCHEDULES, _option

_SHARD = {flag: option for option, flag in FLAGS.items()}
_SAME = ("stage", "precision", "offload_optimizer", "offload_gradient", "offload_param", "shard_size", "hierarchical",
         "max_live_parameters", "max_unit_numel", "prefetch_bucket_size", "delayed_update")  # fmt: skip


@dataclass(frozen=True)
class PlanOptions:
    """Each field is the option of that name; `model` stands first, without one."""

    model: str
    ranks: int | None = _option(None, "ranks in all (default: the mesh's, else a node)", type=int)
    mesh: str | None = _option(None, "ranks along each axis: dp=64,pp=4,tp=8 (data, pipeline and tensor parallel)")
    device: str = _option(
        "h100-80gb", "hardware by name, or a file as `zeroshard bench --calibrate` writes it", also=("--hardware",)
    )
    node_size: int | None = _option(None, "ranks of a node (default: the hardware's devices)", type=int)
    stage: int | None = _option(None, "ZeRO stage: what is sharded (default: 3)", choices=(0, 1, 2, 3), type=int)
    batch: int = _option(1, "sequences of one forward of a rank", type=int)
    seq: int | None = _option(None, "tokens of a sequence (default: the model's)", type=int)
    accumulate: int | None = _option(
        None, "micro-batches per step (default: 1, with stages of pp 2 a stage)", type=int, also=("--micro-batches",)
    )
    precision: str = _option("bf16", "compute precision; master weights stay fp32", choices=PRECISIONS)
    offload_optimizer: str | None = _option(
        None, "where optimizer states rest and are stepped: cpu, nvme (files)", choices=OFFLOADS
    )
    offload_gradient: str | None = _option(
        None, "where gradients rest (default: cpu if the states are offloaded)", choices=OFFLOADS
    )
    offload_param: str | None = _option(None, "where parameters rest", choices=OFFLOADS)
    delayed_update: int | None = _option(None, "after so many steps the host steps beside the next step's computation", type=int)
    checkpoint_activations: bool = _option(
        False, "keep the inputs of blocks only, compute the rest again", action="store_true", also=("--activation-checkpointing",)
    )
    partition_activations: bool = _option(
        False, "keep a part of each input on each rank of tp (with --mesh tp=2)", action="store_true"
    )
    offload_activations: str = _option("none", "checkpoint activations, and keep the inputs there", choices=OFFLOADS)
    shard_size: int | None = _option(None, "shard over groups of so many ranks, alike in all groups (HSDP, MiCS)", type=int)
    hpz: int = _option(1, "nodes of so many ranks keep a secondary shard of parameters, stage 3 (hpZ); 1: none", type=int)
    quantized_weights: str | None = _option(None, "parameters travel packed (qwZ)", choices=CODECS)
    quantized_gradients: str | None = _option(None, "gradients travel packed (qgZ)", choices=GRADIENT_CODECS)
    hierarchical: bool | None = _option(None, "two hops, between nodes and inside of them", action=argparse.BooleanOptionalAction)
    max_live_parameters: int = _option(0, "keep units gathered for backward while at most so many elements are", type=int)
    max_unit_numel: int | None = _option(
        None, "split units of more elements at their children, as far as they have any", type=int
    )
    prefetch_bucket_size: int | None = _option(None, "elements gathered ahead of use (default: 64 MiB of them)", type=int)
    schedule: str | None = _option(
        None, "order of micro-batches in stages of pp (default: 1f1b)", choices=SCHEDULES, type=str.lower
    )
    sequence_parallel: bool = _option(False, "cut norms and dropout along the sequence over the ranks of tp", action="store_true")
    out: str | None = _option(None, "folder for pictures, the page and report.json")
    json: bool = _option(False, "print JSON in place of tables", action="store_true")

    def __post_init__(self) -> None:
        for name in ("ranks", "node_size", "batch", "seq", "accumulate", "hpz", "shard_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected a positive integer, got {value}")

    def request(self) -> Request:
        """What is to be planned. Raises UsageError, and ConfigError of the model, the hardware and zs.shard."""
        hardware, source = Hardware.named(self.device), source_of(self.model)
        axes = self._axes(hardware)
        if self.shard_size is not None and axes.dp % self.shard_size:
            raise UsageError(f"--shard-size: expected a divisor of the {axes.dp} ranks of dp, got {self.shard_size}")
        for name in ("schedule", "sequence_parallel", "partition_activations"):
            axis = "pp" if name == "schedule" else "tp"
            if getattr(self, name) and getattr(axes, axis) == 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected none without --mesh {axis}=2")
        request = Request(
            source, hardware, {"pp": axes.pp, "dp": axes.dp, "tp": axes.tp}, self.batch, self.seq or source.default_seq,
            self.accumulate or (2 * axes.pp if axes.pp > 1 else 1), self.node_size, self._shard(), self._checkpointing(),
            {name: getattr(self, name) for name in ("schedule", "sequence_parallel") if getattr(self, name)},
        )  # fmt: skip
        request.config  # noqa: B018  # raises what is wrong with it
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

    def _shard(self) -> dict[str, Any]:
        given = {_SHARD.get(name, name): getattr(self, name) for name in (*_SAME, *_SHARD)}
        usual = {"max_live_parameters": 0, "zero_hpz_partition_size": 1}
        found = {name: value for name, value in given.items() if value not in (None, "none") and value != usual.get(name, ...)}
        found.setdefault("stage", 3)
        return found | ({"offload_path": "."} if "nvme" in found.values() else {})  # nothing is written

    def _checkpointing(self) -> bool | dict[str, Any]:
        found: dict[str, Any] = {"partition": True} if self.partition_activations else {}
        if self.offload_activations != "none":
            found |= {"offload": self.offload_activations} | ({"path": "."} if self.offload_activations == "nvme" else {})
        return found or self.checkpoint_activations


def parse(kind: type[PlanOptions], program: str, description: str, argv: Sequence[str]) -> Any:
    """Options from the command line; `UsageError` names the one that is wrong."""
    parser = Parser(prog=program, description=description)
    parser.add_argument("model", metavar="MODEL", help="a preset, a Hugging Face config.json or its folder, or module:function")
    for option in fields(kind):
        if option.metadata:
            settings = dict(option.metadata)
            names = (f"--{option.name.replace('_', '-')}", *settings.pop("also", ()))
            parser.add_argument(*names, default=option.default, **settings)
    return kind(**vars(parser.parse(argv)))
