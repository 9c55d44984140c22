"""The common options of `zeroshard plan` and `zeroshard simulate`, and the planner's request that they make."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..activations.token_tiles import TILES
from ..planner.model_source import example_of, source_of
from ..planner.request import FLAGS, Request
from ..planner.simulator.hardware import Hardware
from .arguments import Parser, UsageError, add_options
from .mesh_axes import MeshAxes
from .options import COMMON, MASTERS, MEMORY, MESH, NETWORK, OFFLOAD, RunOptions, option

RENAMED = {  # old name of an option -> new name
    "--device": "--hardware (--device is a torch device, of zeroshard train)", "--batch": "--micro-batch",
    "--micro-batches": "--accumulate", "--activation-checkpointing": "--checkpoint-activations",
}  # fmt: skip
OUTPUT = "output"  # a heading of --help, as COMMON
_SHARD = {flag: option for option, flag in FLAGS.items()}
_SAME = ("stage", "precision", "offload_optimizer", "offload_gradient", "offload_param", "shard_size", "hierarchical",
         "max_live_parameters", "max_unit_numel", "prefetch_bucket_size", "delayed_update", "optimizer_states")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """The common options. Each field is the option of that name, but for `model`, the positional argument."""

    HEADINGS: ClassVar = (COMMON, MESH, MEMORY, OFFLOAD, NETWORK)
    model: str
    ranks: int | None = option(None, "ranks in all (default: the mesh's, else a node)", type=int, group=COMMON)
    hardware: str = option("h100-80gb", "hardware by name, or a file that `zeroshard calibrate` wrote", group=COMMON)
    node_size: int | None = option(None, "ranks of a node (default: the hardware's devices)", type=int, group=COMMON)
    micro_batch: int = option(1, "sequences of one forward pass of one rank", type=int, group=COMMON)
    seq: int | None = option(None, "tokens of a sequence (default: the model's)", type=int, group=COMMON)
    example: str | None = option(
        None, "module:function that makes a micro-batch for a model that does not read tokens: a tensor, or a tuple or dictionary "
        "of arguments; it is called with --micro-batch where it takes an argument",
        metavar="FUNCTION", group=COMMON,
    )  # fmt: skip
    max_unit_numel: int | None = option(None, "split units of more elements into their child modules", type=int, group=MEMORY)
    mlp_tokens: int | None = option(None, "tokens that MLPs compute at a time (zs.long_context)", type=int, group=MEMORY)
    loss_tokens: int | None = option(
        None, "tokens whose logits and loss are computed at a time (zs.long_context)", type=int, group=MEMORY
    )
    hierarchical: bool | None = option(
        None, "two hops, between nodes and inside of them", action=argparse.BooleanOptionalAction, group=NETWORK
    )
    out: str | None = option(None, "folder for pictures, the page and report.json", metavar="DIR", group=OUTPUT)
    json: bool = option(False, "print JSON in place of text, at most 100 lines", action="store_true", group=OUTPUT)

    def __post_init__(self) -> None:
        self.expect_positive("ranks", "node_size", "micro_batch", "seq", "accumulate", "hpz", "shard_size", *TILES)

    def request(self) -> Request:
        """Return the planner's request. Raises UsageError, and ConfigError for the model, the hardware or options of zs.shard."""
        hardware = Hardware.named(self.hardware)
        source, axes = source_of(self.model), MeshAxes() if self.mesh is None else MeshAxes.parse(self.mesh)
        model = axes.pp * axes.tp * axes.ep * axes.sp
        if self.mesh is None:
            axes = MeshAxes(dp=self.ranks or hardware.devices_per_node)
        elif self.ranks is not None and "dp" not in self.mesh and self.ranks % model == 0:
            axes = replace(axes, dp=self.ranks // model)  # the rest is data parallel
        elif self.ranks is not None:
            axes.check_ranks(self.ranks)
        if self.example is not None:
            source = example_of(source, self.example)
            if model > 1 or self.seq is not None:
                raise UsageError(
                    "--example: expected neither --seq nor --mesh with pp, tp, ep or sp, which are for models of tokens"
                )
        if self.shard_size is not None and axes.dp % self.shard_size:
            raise UsageError(f"--shard-size: expected a divisor of the {axes.dp} ranks of dp, got {self.shard_size}")
        for name in ("schedule", "sequence_parallel", "partition_activations"):
            axis = "pp" if name == "schedule" else "tp"
            if getattr(self, name) and getattr(axes, axis) == 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected only with --mesh {axis}=2")
        checkpointing: bool | dict[str, Any] = self.checkpoint_activations
        if self.partition_activations or self.offload_activations != "none":
            checkpointing = {"partition": True} if self.partition_activations else {}
            checkpointing |= {"offload": self.offload_activations} if self.offload_activations != "none" else {}
            checkpointing |= {"path": "."} if self.offload_activations == "nvme" else {}
        request = Request(
            source, hardware, axes.planned, self.micro_batch, self.seq or source.default_seq,
            self.accumulate or (2 * axes.pp if axes.pp > 1 else 1), self.node_size, self._shard(hardware), checkpointing,
            {name: getattr(self, name) for name in ("schedule", "sequence_parallel") if getattr(self, name)},
            {name: getattr(self, name) for name in TILES if getattr(self, name)},
        )  # fmt: skip
        request.config  # noqa: B018  # raises ConfigError if it is wrong
        return request

    def _shard(self, hardware: Hardware) -> dict[str, Any]:
        given = {_SHARD.get(name, name): getattr(self, name) for name in (*_SAME, *_SHARD)}
        if self.master_weights is not None:
            given["master_weights"] = MASTERS[self.master_weights]
        usual = {"max_live_parameters": 0, "zero_hpz_partition_size": 1, "master_weights": True}
        found = {name: value for name, value in given.items() if value not in (None, "none") and value != usual.get(name, ...)}
        found.setdefault("stage", 3)
        found.setdefault("precision", "bf16" if hardware.separate else "fp32")
        return found | ({"offload_path": "."} if "nvme" in found.values() else {})  # planning writes no file there


def parse(kind: type[PlanOptions], program: str, description: str, argv: Sequence[str], renamed: Mapping[str, str]) -> Any:
    """Parse the command line into options of `kind`. Raises UsageError. renamed: old -> new names, in addition to RENAMED."""
    parser = Parser(prog=program, usage="%(prog)s [options] MODEL", description=description, renamed=RENAMED | dict(renamed))
    parser.add_argument(
        "model", metavar="MODEL",
        help="a preset, a Hugging Face model id whose config is in the local cache, a config.json or its folder, or module:function",
    )  # fmt: skip
    add_options(parser, kind)
    return kind(**vars(parser.parse(argv)))
