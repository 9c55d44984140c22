"""The options of `zeroshard plan` and `zeroshard simulate`, and the planner's request that they make. Reading them needs no torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..utils.axes import EP, SP
from ..utils.option_names import TILES
from .arguments import Parser, UsageError, add_options, closest
from .mesh_axes import MeshAxes
from .options import COMMON, MASTERS, MEMORY, MESH, NETWORK, OFFLOAD, SHARD_NAMES, RunOptions, option

if TYPE_CHECKING:
    from ..planner.request import Request
    from ..planner.simulator.hardware import Hardware

OUTPUT, _SEARCH, _SIMULATED = "output", "search for the fastest layout", "simulation"  # headings of --help, as COMMON
SWEPT = ("ranks", "micro-batch", "pp", "tp", "ep", "sp")
_SAME = ("stage", "precision", "offload_optimizer", "offload_gradient", "offload_param", "shard_size", "hierarchical", "sums",
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
        from ..planner.dry_run import checked_axes
        from ..planner.model_source import example_of, source_of
        from ..planner.request import Request
        from ..planner.simulator.hardware import Hardware

        hardware = Hardware.named(self.hardware)
        source, axes = source_of(self.model), MeshAxes() if self.mesh is None else MeshAxes.parse(self.mesh)
        model = axes.pp * axes.tp * axes.ep * axes.sp
        if self.mesh is None:
            axes = MeshAxes(dp=self.ranks or hardware.devices_per_node)
        elif self.ranks is not None and "dp" not in self.mesh and self.ranks % model == 0:
            axes = replace(axes, dp=self.ranks // model)  # the rest is data parallel
        elif self.ranks is not None:
            axes.check_ranks(self.ranks)
        checked_axes(None, axes.planned)
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
        given = {SHARD_NAMES.get(name, name): getattr(self, name) for name in (*_SAME, *SHARD_NAMES)}
        if self.master_weights is not None:
            given["master_weights"] = MASTERS[self.master_weights]
        usual = {"sums": "ordered", "max_live_parameters": 0, "zero_hpz_partition_size": 1, "master_weights": True}
        found = {name: value for name, value in given.items() if value not in (None, "none") and value != usual.get(name, ...)}
        found.setdefault("stage", 3)
        found.setdefault("precision", "bf16" if hardware.separate else "fp32")
        return found | ({"offload_path": "."} if "nvme" in found.values() else {})  # planning writes no file there


@dataclass(frozen=True, kw_only=True)
class PlanCommand(PlanOptions):
    """The options of `zeroshard plan`."""

    auto: bool = option(
        False, "search stage, tiers, mesh, batches and checkpointing for the fastest layout that fits", action="store_true",
        group=_SEARCH,
    )  # fmt: skip
    global_batch: int | None = option(
        None, "sequences of one optimizer step over all ranks, with --auto (default: those of the other options)", type=int,
        group=_SEARCH,
    )  # fmt: skip
    lossy: bool = option(
        False, "with --auto: also consider compression of parameters and gradients, which changes results", action="store_true",
        group=_SEARCH,
    )  # fmt: skip
    write_config: str | None = option(
        None, "with --auto: the file to write, for train --config, zs.shard(config=) and zeroshard.deepspeed", metavar="FILE",
        group=_SEARCH,
    )  # fmt: skip
    offload_path: str | None = option(
        None, "with --auto: folder on a local disk of the machines that will train, for nvme", group=_SEARCH
    )
    try_seconds: float = option(30.0, "seconds to search for changes that make it fit; 0: none", type=float, group=OUTPUT)
    brief: bool = option(False, "print one line", action="store_true", group=OUTPUT)
    full: bool = option(False, "print the tables with all numbers after the page", action="store_true", group=OUTPUT)
    json_full: bool = option(
        False, "print JSON with every task of the step and every moment of memory", action="store_true", group=OUTPUT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_positive("global_batch")
        if not self.try_seconds >= 0:  # also true for NaN
            raise UsageError(f"--try-seconds: expected seconds of at least 0, got {self.try_seconds:g}")
        for name in ("global_batch", "lossy", "write_config", "offload_path"):
            if getattr(self, name) and not self.auto:
                raise UsageError(f"--{name.replace('_', '-')}: expected only with --auto")
        for name in TILES:
            if getattr(self, name) and self.write_config is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')}: expected without --write-config, whose file has no place for it: pass it to zs.long_context"
                )
        path = self.write_config
        if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):  # before the search
            raise UsageError(f"--write-config: expected the name of a file in a folder that exists, got {path!r}")
        if self.auto and (self.offload_optimizer or self.offload_gradient or self.offload_param):
            raise UsageError("--auto searches where states are kept: leave out the --offload options")

    def fixed(self, request: Request) -> dict[str, Any]:
        """Return the settings that were given, which --auto does not search."""
        found: dict[str, Any] = {EP: 1, SP: 1, **request.axes} if self.mesh is not None else {}
        found |= {"stage": self.stage} if self.stage is not None else {}
        found |= {"hpz": self.hpz} if self.hpz > 1 else {}
        found |= {"shard_size": self.shard_size} if self.shard_size is not None else {}
        found |= {name: request.options[name] for name in ("optimizer_states", "master_weights") if name in request.options}
        found |= {"prefetch_nbytes": request.config.prefetch_limit_nbytes} if self.prefetch_bucket_size is not None else {}
        return found | ({"checkpointing": "blocks"} if self.checkpoint_activations else {})


@dataclass(frozen=True, kw_only=True)
class SimulateCommand(PlanOptions):
    """The options of `zeroshard simulate`."""

    utilisation: str = option(
        "1", "share of each link's bandwidth that is achieved; several with a comma, for a sweep", group=_SIMULATED
    )
    latency: str | None = option(
        None, "microseconds of a hop between ranks, in place of the hardware's; several with a comma", group=_SIMULATED
    )
    sweep: str | None = option(
        None,
        "simulate each: ranks=8,64,512, micro-batch=1,2,4, an axis: sp=1,2,4, or several: ranks=8,64;sp=1,8",
        group=_SIMULATED,
    )

    def swept(self, request: Request) -> dict[str, list[int]]:
        """Return the lists of numbers of ranks, of micro-batch sizes and of ranks along axes to simulate."""
        found = {"ranks": [request.ranks], "micro-batch": [request.rows]}
        seen: set[str] = set()
        for part in self.sweep.split(";") if self.sweep is not None else ():
            name, _, values = part.partition("=")
            if name.strip() in seen:
                raise UsageError(f"--sweep: expected each name once, got {name.strip()} twice in {self.sweep!r}")
            seen.add(name.strip())
            if name.strip() not in SWEPT:
                raise UsageError(
                    f"--sweep: expected ranks=8,16, micro-batch=8,16 or an axis (sp=1,8), got {part!r}{closest(name, SWEPT)}"
                )
            found[name.strip()] = [int(each) for each in numbers("sweep", values)]
        return found


def numbers(name: str, text: str) -> list[float]:
    """Return the numbers of a text such as 8,16; those of --sweep are whole. Raises UsageError."""
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = [math.nan]
    least, whole = (1, True) if name == "sweep" else (0, False)
    if not all(math.isfinite(each) and each >= least and not (whole and each % 1) for each in found):
        raise UsageError(f"--{name}: expected positive numbers with commas between, got {text!r}")
    return found


def _parse(kind: type[PlanOptions], program: str, description: str, argv: Sequence[str]) -> Any:
    """Parse the command line into options of `kind`. Raises UsageError."""
    parser = Parser(prog=f"zeroshard {program}", usage="%(prog)s [options] MODEL", description=description)
    parser.add_argument(
        "model", metavar="MODEL",
        help="a preset, a Hugging Face model id whose config is in the local cache, a config.json or its folder, or module:function",
    )  # fmt: skip
    add_options(parser, kind)
    return kind(**vars(parser.parse(argv)))


# of the words after the command's name; each raises UsageError
parse_plan = partial(_parse, PlanCommand, "plan", "Tell what a run will hold and send, and whether it fits, without running it.")
parse_simulate = partial(
    _parse, SimulateCommand, "simulate", "Tell how long a step of a run will take, and what bounds it, without running it."
)
