"""The options of `zeroshard train`, with their defaults, help and validation, in one frozen dataclass.

`--global-batch` counts sequences of one optimizer step over all ranks and micro-batches, so the same command reads the same
text on any number of ranks:   global batch = ranks x accumulate x sequences of one forward pass.
On a mesh of ranks (`--mesh`) the number of ranks along dp takes the place of that of all ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import zeroshard as zs

from ..errors import ConfigError
from ..planner.presets import CASE_STUDIES, SCALES, CaseStudy, GPTConfig
from ..utils.axes import cuts_model, planned_otherwise
from ..utils.compression import CODECS, GRADIENT_CODECS
from ..utils.option_names import FLAGS, PRESETS
from ..utils.state_format import FORMATS
from .arguments import Parser, UsageError, add_options
from .mesh_axes import MeshAxes

SIZES = {  # name -> layers, dim, heads
    "tiny": (3, 128, 4),  # 0.6 M parameters in blocks, 3.2 M in n-grams: a minute on two cores
    "small": (8, 384, 6),  # 14 M
    "medium": (12, 768, 12),  # 85 M, the shape of GPT-2 small
}
PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
OFFLOADS = ("none", "cpu", "nvme")
MASTERS: dict[str, bool | Literal["split"]] = {"fp32": True, "split": "split", "none": False}  # -> zs.shard's master_weights
# names of torch.distributed.pipelining
SCHEDULES = ("gpipe", "1f1b", "loopedbfs", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
SHARD_NAMES = {flag: name for name, flag in FLAGS.items()}  # option -> its name in zs.shard, where that is another
_PLANNED = ("stage", "precision", "offload_optimizer", "offload_gradient", "offload_param", "offload_path", "shard_size",
            "optimizer_states", "master_weights", *SHARD_NAMES)  # fmt: skip  # options that a plan's file sets
OFFLOAD_PATH = "runs"  # default folder of offload to nvme, in the working directory


def option(default: Any, text: str, **settings: Any) -> Any:
    """Return a dataclass field for an option with help `text`. settings: of argparse, and `group`, its heading in --help."""
    return field(default=default, metadata={"help": text, **settings})


_TIER: dict[str, Any] = {"choices": OFFLOADS, "metavar": "TIER"}
# headings of --help
COMMON, MESH, MEMORY = "common options", "tensor and pipeline parallelism", "memory of a device"
OFFLOAD, NETWORK = "offload", "communication"
_MODEL, _TRAINING, _OUTPUT = "model and text", "training", "checkpoints and the sample"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options that `zeroshard train`, `plan` and `simulate` share. Each field is the option of that name.

    A subclass that names one again changes its default alone.
    """

    stage: int | None = option(None, "ZeRO stage (default: 3)", choices=(0, 1, 2, 3), type=int, group=COMMON)
    precision: str | None = option(
        None, "fp32, bf16 or fp16 (default: bf16 on GPUs, fp32 on CPUs)", choices=PRECISIONS,
        metavar="DTYPE", group=COMMON,
    )  # fmt: skip
    mesh: str | None = option(None, "ranks along pp, dp, ep, tp, sp: dp=2,tp=2", metavar="AXES", group=MESH)
    accumulate: int | None = option(None, "micro-batches of a step (default: 1; pp: 2 each)", type=int, group=COMMON)
    schedule: str | None = option(
        None, f"order of micro-batches in stages of pp: {', '.join(SCHEDULES)} (default: 1f1b)", choices=SCHEDULES,
        type=str.lower, metavar="NAME", group=MESH,
    )  # fmt: skip
    sequence_parallel: bool = option(False, "split norms along the sequence over tp", action="store_true", group=MESH)
    partition_activations: bool = option(False, "split kept block inputs over the ranks of tp", action="store_true", group=MESH)
    checkpoint_activations: bool = option(False, "keep inputs of blocks, recompute the rest", action="store_true", group=MEMORY)
    max_live_parameters: int = option(0, "elements kept gathered for backward", type=int, group=MEMORY)
    prefetch_bucket_size: int | None = option(None, "elements gathered ahead (default: 64 MiB)", type=int, group=MEMORY)
    optimizer_states: str | None = option(
        None, f"{', '.join(FORMATS)} (default: fp32)", choices=FORMATS, metavar="FORMAT", group=MEMORY
    )  # fmt: skip
    master_weights: str | None = option(
        None, f"{', '.join(MASTERS)} (default: fp32)", choices=tuple(MASTERS), metavar="NAME", group=MEMORY
    )  # fmt: skip
    offload_optimizer: str | None = option(None, "TIER of states: none, cpu, nvme (files)", **_TIER, group=OFFLOAD)
    offload_gradient: str | None = option(None, "TIER of gradients (cpu if states are offloaded)", **_TIER, group=OFFLOAD)
    offload_param: str | None = option(None, "TIER of parameters", **_TIER, group=OFFLOAD)
    offload_activations: str = option("none", "TIER of kept inputs of blocks", **_TIER, group=OFFLOAD)
    delayed_update: int | None = option(None, "host steps beside computation, after N steps", type=int, group=OFFLOAD)
    shard_size: int | None = option(None, "shard over groups of N ranks (HSDP, MiCS)", type=int, group=NETWORK)
    hpz: int = option(1, "ranks of a secondary shard (hpZ)", type=int, group=NETWORK)
    sums: Literal["ordered", "backend"] = option(
        "ordered", "ordered, or by the backend", choices=("ordered", "backend"), metavar="HOW", group=NETWORK
    )  # fmt: skip
    quantized_weights: str | None = option(
        None, f"compress parameters (qwZ): {', '.join(CODECS)}", choices=tuple(CODECS), metavar="NAME", group=NETWORK
    )
    quantized_gradients: str | None = option(
        None, f"compress gradients (qgZ): {', '.join(GRADIENT_CODECS)}", choices=GRADIENT_CODECS, metavar="NAME", group=NETWORK
    )

    def expect(self, name: str, condition: bool, expected: str) -> None:
        """Raise UsageError, which says what was expected of the option `name`, unless a condition holds."""
        if not condition:
            raise UsageError(f"--{name.replace('_', '-')}: expected {expected}, got {getattr(self, name)}")

    def expect_positive(self, *names: str) -> None:
        """Raise UsageError for the first of these options that is neither positive nor None."""
        for name in names:
            self.expect(name, getattr(self, name) is None or getattr(self, name) > 0, "a positive integer")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """The validated options of a run. Each field is the option of that name; the values of a `preset` are in its fields."""

    HEADINGS: ClassVar = (COMMON, _MODEL, _TRAINING, _OUTPUT, MESH, MEMORY, OFFLOAD, NETWORK)
    stage: int = 3
    precision: str = "fp32"
    accumulate: int = 1
    offload_optimizer: str = "none"
    offload_param: str = "none"
    ranks: int | None = option(None, "local ranks (default: one per GPU; else 2)", type=int, group=COMMON)
    device: str = option("auto", "auto: a GPU per rank if there are enough", choices=DEVICES, group=COMMON)
    size: str | None = option(None, "layers, dim and heads (default: tiny)", choices=tuple(SIZES), group=COMMON)
    data: str | None = option(None, "folder of text (default: Python's library)", metavar="DIR", group=COMMON)
    steps: int = option(1000, "optimizer steps", type=int, group=COMMON)
    time_limit: float | None = option(None, "seconds after which training ends, if sooner", type=float, group=COMMON)
    global_batch: int = option(8, "sequences of a step over all ranks", type=int, group=COMMON)
    out: str | None = option(None, "results (default: runs/<date>-<time>)", metavar="DIR", group=COMMON)
    preset: str | None = option(
        None, f"stage and offload by name: {', '.join(PRESETS)}; or model and stage of a published run: "
        f"{', '.join(CASE_STUDIES)}; other options override it",
        choices=(*PRESETS, *CASE_STUDIES), metavar="NAME", group=COMMON,
    )  # fmt: skip
    config: str | None = option(
        None, "a plan that `zeroshard plan --auto` wrote; other options override it", metavar="FILE", group=COMMON
    )
    scale: str | None = option(None, "size of a published run (default: tiny)", choices=SCALES, group=_MODEL)
    layers: int | None = option(None, "blocks, instead of those of --size", type=int, group=_MODEL)
    dim: int | None = option(None, "width, instead of that of --size", type=int, group=_MODEL)
    heads: int | None = option(None, "attention heads, instead of those of --size", type=int, group=_MODEL)
    experts: int = option(0, "experts of a block; 0: an MLP", type=int, group=_MODEL)
    ngram_rows: int = option(8192, "rows of an n-gram table; 0: none", type=int, group=_MODEL)
    seq: int = option(256, "bytes of a sequence", type=int, group=_MODEL)
    lr: float = option(3e-3, "highest learning rate", type=float, group=_TRAINING)
    weight_decay: float = option(0.1, "decay of AdamW", type=float, group=_TRAINING)
    max_grad_norm: float = option(1.0, "clip to this norm; 0: never", type=float, group=_TRAINING)
    seed: int = option(0, "seed of weights and batches", type=int, group=_TRAINING)
    eval_every: int = option(200, "steps between evaluations", type=int, group=_TRAINING)
    eval_bytes: int = option(65536, "bytes of held-out text", type=int, group=_TRAINING)
    threads: int | None = option(None, "CPU threads of a rank (default: cores / ranks)", type=int, group=_TRAINING)
    save_every: int = option(0, "steps between checkpoints; 0: none", type=int, group=_OUTPUT)
    keep_last: int = option(2, "checkpoints to keep", type=int, group=_OUTPUT)
    save_in_background: bool = option(False, "write checkpoints while training goes on", action="store_true", group=_OUTPUT)
    resume: str | None = option(
        None, "go on with the newest checkpoint of this run (default: of --out, else of the newest run)", nargs="?", const="",
        metavar="DIR", group=_OUTPUT,
    )  # fmt: skip
    log: str | None = option(
        None, "also write metrics in this form: tensorboard", choices=("tensorboard",), metavar="NAME", group=_OUTPUT
    )  # fmt: skip
    sample_bytes: int = option(300, "bytes of the sample at the end", type=int, group=_OUTPUT)
    prompt: str | None = option(None, "start of the sample (default: 'def ')", group=_OUTPUT)
    tile_max_bytes: int | None = option(None, "cut larger weights into tiles of this size", type=int, group=MEMORY)
    offload_path: str | None = option(
        None, f"folder on a local disk, for nvme (default: {OFFLOAD_PATH}/)", metavar="DIR", group=OFFLOAD
    )
    offload_ratio: float = option(1.0, "share of states to offload", type=float, group=OFFLOAD)
    buffer_count: int = option(8, "host buffers of a rank", type=int, group=OFFLOAD)
    buffer_mib: int = option(16, "MiB of each of these buffers", type=int, group=OFFLOAD)
    pin_memory: bool = option(
        True, "page-lock host memory, with GPUs (default: yes)", action=argparse.BooleanOptionalAction, group=OFFLOAD
    )
    quantize_on_host: bool = option(False, "compress between ranks that share memory, too", action="store_true", group=NETWORK)
    error_feedback: bool = option(False, "add errors of compression to the next gradient", action="store_true", group=NETWORK)

    def __post_init__(self) -> None:
        self.expect_positive(
            "ranks", "layers", "dim", "heads", "steps", "seq", "global_batch", "accumulate", "eval_every", "threads"
        )
        self.expect_positive("keep_last")
        self.expect("lr", 0 < self.lr < math.inf, "a positive number")
        self.expect("time_limit", self.time_limit is None or self.time_limit > 0, "a positive number")
        self.expect("weight_decay", 0 <= self.weight_decay < math.inf, "zero or a positive number")
        for name in ("max_grad_norm", "sample_bytes", "ngram_rows", "save_every", "experts"):
            self.expect(name, getattr(self, name) >= 0, "zero or a positive number")
        self.expect("eval_bytes", self.eval_bytes >= 2, "at least 2")
        self.expect("seed", 0 <= self.seed < 2**63, "0 <= seed < 2^63")
        self.expect("save_in_background", self.save_every > 0 or not self.save_in_background, "only with --save-every")
        if self.log is not None and importlib.util.find_spec(self.log) is None:
            raise UsageError(f"--log: {self.log} is not installed: pip install {self.log}, or leave --log out")
        self._check_offload()
        self.expect("scale", self.case_study is not None or self.scale is None, f"only with --preset {', '.join(CASE_STUDIES)}")
        self.expect("size", self.size is None or not self.case_study, f"not with --preset {self.preset}; give --scale")
        axes = self.axes
        if self.mesh is not None and self.ranks is not None:
            axes.check_ranks(self.ranks)
        self.expect("schedule", self.schedule is None or axes.pp > 1, "only with stages (--mesh pp=2)")
        for name in ("sequence_parallel", "partition_activations"):
            self.expect(name, not getattr(self, name) or axes.tp > 1, "only with --mesh tp=2")
        if axes.cuts_model:
            self.expect("sample_bytes", not self.sample_bytes, f"0 with --mesh {axes}: a model in parts writes no text")
            self.expect("tile_max_bytes", self.tile_max_bytes is None, f"not with --mesh {axes}, which cuts weights itself")
        try:
            axes.check_model(self.model_config())
        except ValueError as error:
            raise UsageError(f"--{error}") from None

    def _check_offload(self) -> None:
        self.expect_positive("tile_max_bytes", "buffer_mib")
        try:
            config = self.sharding()
        except ConfigError as error:  # its message names fields of Config, which have the names of the options
            raise UsageError(str(error)) from None
        packs = bool(self.quantized_weights or self.quantized_gradients)
        both = "only with --quantized-weights or --quantized-gradients"
        self.expect("quantize_on_host", packs or not self.quantize_on_host, both)
        feeds = bool(self.quantized_gradients) or not self.error_feedback
        self.expect("error_feedback", feeds, "only with --quantized-gradients")
        self.expect("offload_path", self.offload_path is None or self.uses_disk, "only with nvme")
        needs_states = config.offload_optimizer.tier is not zs.Tier.DEVICE
        self.expect("offload_ratio", self.offload_ratio == 1.0 or needs_states, "only with --offload-optimizer")
        for name, usual in (("buffer_count", 8), ("buffer_mib", 16)):
            self.expect(name, getattr(self, name) == usual or self.offloads, "only with an --offload option")
        if not (self.pin_memory or self.uses_tiers):
            raise UsageError("--no-pin-memory: expected only with an --offload option")

    @property
    def planned(self) -> dict[str, Any]:
        """The layout in the file of `config` (`config.read_layout`); {} without one."""
        from ..config import read_layout

        return {} if self.config is None else read_layout(self.config)

    def model_config(self) -> GPTConfig:
        """Return the model's shape: that of --size or of a published run, changed by --layers, --dim and --heads."""
        if self.case_study is not None:
            shape = self.case_study.config(self.scale or SCALES[0])
        else:
            layers, dim, heads = SIZES[self.size or "tiny"]
            shape = GPTConfig(vocab_size=256, layers=layers, dim=dim, heads=heads)
        given = {name: getattr(self, name) for name in ("layers", "dim", "heads") if getattr(self, name) is not None}
        return replace(shape, seq_len=self.seq, ngram_rows=self.ngram_rows, experts=self.experts, **given)

    @property
    def case_study(self) -> CaseStudy | None:
        """The published run that `preset` names; None if it names none."""
        return CASE_STUDIES.get(self.preset or "")

    @property
    def axes(self) -> MeshAxes:
        """The axes of `--mesh`; without it all are 1, whatever the number of ranks."""
        return MeshAxes() if self.mesh is None else MeshAxes.parse(self.mesh)

    def sharding(self) -> zs.Config:
        """Return the configuration for zs.shard. Options that have none of this command come from the file of `config`."""
        planned = self.planned.get("shard", {})
        return zs.Config(
            **{name: planned[name] for name in ("max_unit_numel", "prefetch_nbytes", "hierarchical") if name in planned},
            stage=self.stage,
            precision=self.precision,
            max_grad_norm=self.max_grad_norm,
            offload_optimizer=self.offload(self.offload_optimizer, ratio=self.offload_ratio),
            offload_gradient=None if self.offload_gradient is None else self.offload(self.offload_gradient),
            offload_param=self.offload(self.offload_param),
            delayed_update=self.delayed_update,
            max_live_parameters=self.max_live_parameters,
            prefetch_bucket_size=self.prefetch_bucket_size,
            optimizer_states=self.optimizer_states,
            master_weights=MASTERS[self.master_weights or "fp32"],
            shard_size=self.shard_size,
            zero_hpz_partition_size=self.hpz,
            sums=self.sums,
            zero_quantized_weights=self._packed(self.quantized_weights),
            zero_quantized_gradients=self._packed(self.quantized_gradients, self.error_feedback),
        )

    def _packed(self, codec: str | None, error_feedback: bool = False) -> zs.Compression | None:
        return None if codec is None else zs.Compression(codec, error_feedback=error_feedback, force=self.quantize_on_host)

    def offload(self, device: str, ratio: float = 1.0) -> zs.Offload:
        """Return a device's tier with the buffers of this run."""
        path = (self.offload_path or OFFLOAD_PATH) if device == "nvme" else None
        return zs.Offload(
            device, path=path, pin_memory=self.pin_memory, ratio=ratio, buffer_count=self.buffer_count,
            buffer_nbytes=self.buffer_mib << 20,
        )  # fmt: skip

    @property
    def offloads(self) -> bool:
        """True if a model state rests off the device."""
        config = self.sharding()
        tiers = (config.offload_optimizer.tier, config.offload_gradient.tier, config.offload_param.tier)
        return any(tier is not zs.Tier.DEVICE for tier in tiers)

    @property
    def uses_tiers(self) -> bool:
        """True if a model state or activations rest off the device."""
        return self.offloads or self.offload_activations != "none"

    @property
    def uses_disk(self) -> bool:
        """True if a model state or activations rest on disk."""
        return "nvme" in (self.offload_optimizer, self.offload_gradient, self.offload_param, self.offload_activations)

    @property
    def checkpoints(self) -> bool:
        """True if activations are checkpointed."""
        return self.checkpoint_activations or self.partition_activations or self.offload_activations != "none"

    def check_batch(self, world_size: int) -> None:
        """Raise UsageError unless the mesh has as many ranks, and the batch divides over them and over micro-batches."""
        if self.mesh is not None:
            try:
                self.axes.check_ranks(world_size)
            except UsageError as error:
                if self.planned.get("mesh") != self.axes.planned:
                    raise
                again = f"--ranks {world_size} --auto --global-batch {self.global_batch} --write-config {self.config}"
                told = f"the mesh is that of --config {self.config}: plan again with `zeroshard plan MODEL {again}`"
                raise UsageError(f"{error}; {told}") from None
        word = f"dp{' x ep' * (self.axes.ep > 1)}" if self.axes.cuts_model or self.axes.sp > 1 else "ranks"
        readers = world_size if word == "ranks" else self.axes.readers
        parts = readers * self.accumulate
        if self.global_batch % parts:
            above = (self.global_batch // parts + 1) * parts
            raise UsageError(
                f"--global-batch: expected a multiple of {word} x accumulate = {readers} x {self.accumulate} = {parts}, "
                f"got {self.global_batch}; try --global-batch {above}"
            )

    def planned_otherwise(self, world_size: int) -> str:
        """Return a sentence that says so if the file of `config` was made for other numbers of ranks; else ""."""
        axes = self.axes.planned if self.mesh is not None else {"dp": world_size}
        return "" if self.config is None else planned_otherwise(self.config, self.planned, axes)


def parse_train(argv: Sequence[str]) -> TrainOptions:
    """Parse the command line into options. Raises UsageError, which names the option that is wrong."""
    command = Parser(prog="zeroshard train", description="Train a byte-level GPT on a folder of text, sharded by ZeRO.")
    add_options(command, TrainOptions)
    chosen = command.parse(argv)
    command.set_defaults(**_other_defaults(chosen))  # then parse again: options that were given override these defaults
    return TrainOptions(**vars(command.parse(argv)))


def _other_defaults(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the defaults that follow from a preset, a plan's file and a mesh."""
    row: dict[str, Any] = dict(PRESETS.get(chosen.preset, {}))
    if chosen.preset in CASE_STUDIES:
        study, scale = CASE_STUDIES[chosen.preset], chosen.scale or SCALES[0]
        row |= {"stage": study.layout.stage, "seq": study.config(scale).seq_len, "ngram_rows": 0}
        if scale == "full":
            row |= {"global_batch": study.layout.global_batch, "precision": study.layout.precision}
    row |= _of_plan(chosen) if chosen.config is not None else {}
    mesh = chosen.mesh or row.get("mesh")
    axes = MeshAxes() if mesh is None else MeshAxes.parse(mesh)
    if axes.sp > 1:
        row.setdefault("global_batch", math.lcm(8, axes.dp))
    if axes.cuts_model:
        row["sample_bytes"] = 0
        row.setdefault("accumulate", 2 * axes.pp if axes.pp > 1 else 1)
        row.setdefault("global_batch", math.lcm(8, axes.readers * row["accumulate"]))
    ranks = chosen.ranks or row.get("ranks") or (axes.ranks if mesh is not None else 1)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    import torch  # a mistake in the words of the call has been told without it

    on_gpus = chosen.device != "cpu" and torch.cuda.device_count() >= ranks
    row.setdefault("precision", "bf16" if on_gpus else "fp32")
    return row


def _of_plan(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a plan's file contains. Raises UsageError if the file is no plan."""
    from ..config import read_layout

    try:
        plan = read_layout(chosen.config)
    except ConfigError as error:
        raise UsageError(f"--{error}") from None
    row = {name: plan["shard"][key] for name in _PLANNED if (key := SHARD_NAMES.get(name, name)) in plan["shard"]}
    if "master_weights" in row:
        row["master_weights"] = next(name for name, value in MASTERS.items() if value == row["master_weights"])
    row |= {"accumulate": plan["micro_batches"], "global_batch": plan["global_batch"], "seq": plan.get("seq", TrainOptions.seq)}
    kept = plan.get("checkpoint_activations") or {}
    row |= {"checkpoint_activations": bool(kept), "offload_activations": kept.get("offload", "none")}
    row["partition_activations"] = bool(kept.get("partition"))
    if cuts_model(plan["mesh"]) or plan["mesh"].get("sp", 1) > 1:
        row["mesh"] = ",".join(f"{axis}={size}" for axis, size in plan["mesh"].items())
    elif chosen.mesh is None:
        row["ranks"] = plan["mesh"]["dp"]
    return row
