"""The options of `zeroshard train`: their defaults, help and validation in one frozen dataclass.

`--batch` counts sequences of one optimizer step over all ranks and micro-batches, so the same command reads the same
text on any number of ranks:   batch = ranks x accumulate x sequences of one forward pass.
On a mesh of ranks (`--mesh`), those along its axis dp read different text, and take the place of the ranks there.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import zeroshard as zs

from ..compression import CODECS, GRADIENT_CODECS
from ..config import PRESETS, Tier, cuts_model, planned_otherwise, read_layout
from ..models import CASE_STUDIES, CaseStudy, GPTConfig
from ..models.presets import SCALES
from .arguments import Parser, UsageError
from .mesh_axes import MeshAxes

SIZES = {  # name -> layers, dim, heads
    "tiny": (3, 128, 4),  # 0.6 M parameters in blocks, 3.2 M in n-grams: a minute on two cores
    "small": (8, 384, 6),  # 14 M
    "medium": (12, 768, 12),  # 85 M, the shape of GPT-2 small
}
PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
OFFLOADS = ("none", "cpu", "nvme")
# names of torch.distributed.pipelining
SCHEDULES = ("gpipe", "1f1b", "loopedbfs", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
_PLANNED = {  # option -> what zs.shard calls it
    **{name: name for name in ("stage", "precision", "offload_optimizer", "offload_gradient", "offload_param", "offload_path", "shard_size")},
    "hpz": "zero_hpz_partition_size", "quantized_weights": "zero_quantized_weights", "quantized_gradients": "zero_quantized_gradients",
}  # fmt: skip
_WITHOUT_OPTION = ("max_unit_numel", "prefetch_nbytes", "hierarchical")
OFFLOAD_PATH = "runs"  # on the disk of the working directory


def _option(default: Any, text: str, **settings: Any) -> Any:
    return field(default=default, metadata={"help": text, **settings})


@dataclass(frozen=True)
class TrainOptions:
    """A validated call of `zeroshard train`. Each field is the option of that name; what `preset` stands for is in the others."""

    preset: str | None = _option(
        None, "stage and offload by the field's name for them, or model and stage of a published run; options beside it count",
        choices=(*PRESETS, *CASE_STUDIES),
    )  # fmt: skip
    scale: str | None = _option(None, "of a published run: its own, or a small one of its kind (default: tiny)", choices=SCALES)
    stage: int = _option(3, "ZeRO stage: what is sharded", choices=(0, 1, 2, 3), type=int)
    config: str | None = _option(
        None, "a file of `zeroshard plan --auto`: its stage, tiers, mesh and batch; options beside it count"
    )
    ranks: int | None = _option(None, "local ranks to start (default: the mesh's, else one per GPU, without GPUs 2)", type=int)
    mesh: str | None = _option(None, "ranks along each axis: dp=2,pp=2,tp=2 (data, pipeline and tensor parallel)")
    schedule: str | None = _option(
        None, "order of micro-batches in stages of pp (default: 1f1b)", choices=SCHEDULES, type=str.lower
    )
    sequence_parallel: bool = _option(False, "cut norms and dropout along the sequence over the ranks of tp", action="store_true")
    size: str | None = _option(None, "preset of layers, dim and heads (default: tiny)", choices=tuple(SIZES))
    layers: int | None = _option(None, "blocks, instead of the preset's", type=int)
    dim: int | None = _option(None, "width, instead of the preset's", type=int)
    heads: int | None = _option(None, "attention heads, instead of the preset's", type=int)
    ngram_rows: int = _option(8192, "rows of each n-gram table; 0: none", type=int)
    data: str | None = _option(None, "folder of text files (default: the Python standard library)")
    steps: int = _option(1000, "optimizer steps", type=int)
    time_limit: float | None = _option(None, "seconds of training after which it ends well, if sooner", type=float)
    seq: int = _option(256, "bytes per sequence", type=int)
    batch: int = _option(8, "sequences per step, over all ranks", type=int)
    accumulate: int = _option(
        1, "micro-batches per step (default: 1, with stages of pp 2 a stage)", type=int, also=("--micro-batches",)
    )
    precision: str = _option("fp32", "compute precision; master weights stay fp32", choices=PRECISIONS)
    lr: float = _option(3e-3, "highest learning rate", type=float)
    weight_decay: float = _option(0.1, "decay of AdamW", type=float)
    max_grad_norm: float = _option(1.0, "clip gradients to this global norm; 0: never", type=float)
    seed: int = _option(0, "of weights, batches and the sample", type=int)
    eval_every: int = _option(200, "steps between looks at the held-out text", type=int)
    eval_bytes: int = _option(65536, "bytes of held-out text to look at", type=int)
    sample_bytes: int = _option(300, "bytes to write at the end; 0: none", type=int)
    prompt: str | None = _option(None, "what the sample continues (default: 'def ' or a line break)")
    device: str = _option("auto", "auto: GPUs if there is one per rank", choices=DEVICES)
    threads: int | None = _option(None, "CPU threads per rank (default: cores / ranks)", type=int)
    out: str | None = _option(None, "folder for the results (default: runs/<date>-<time>)")
    save_every: int = _option(0, "steps between checkpoints (and one at the end); 0: none", type=int)
    keep_last: int = _option(2, "checkpoints to keep; older ones are removed", type=int)
    save_in_background: bool = _option(False, "write checkpoints while training goes on (takes host memory)", action="store_true")
    resume: str | None = _option(
        None, "go on with the newest checkpoint of --out (without it: of the newest run), or of this folder", nargs="?", const=""
    )
    offload_optimizer: str = _option("none", "where optimizer states rest and are stepped: cpu, nvme (files)", choices=OFFLOADS)
    offload_gradient: str | None = _option(
        None, "where gradients rest (default: cpu if the states are offloaded)", choices=OFFLOADS
    )
    offload_param: str = _option("none", "where parameters rest; the model is then never whole on a rank", choices=OFFLOADS)
    offload_path: str | None = _option(None, f"folder on a local disk, for nvme (default: {OFFLOAD_PATH}/)")
    offload_ratio: float = _option(1.0, "fraction of the optimizer states that is offloaded", type=float)
    buffer_count: int = _option(8, "host buffers of a rank through which offloaded states pass", type=int)
    buffer_mib: int = _option(16, "MiB of each of these buffers", type=int)
    pin_memory: bool = _option(
        True, "page-lock the host memory of what is offloaded, where there is a GPU", action=argparse.BooleanOptionalAction
    )
    delayed_update: int | None = _option(None, "after so many steps the host steps beside the next step's computation", type=int)
    max_live_parameters: int = _option(0, "keep units gathered for backward while at most so many elements are", type=int)
    prefetch_bucket_size: int | None = _option(None, "elements gathered ahead of use (default: 64 MiB of them)", type=int)
    shard_size: int | None = _option(None, "shard over groups of so many ranks, alike in all groups (HSDP, MiCS)", type=int)
    hpz: int = _option(1, "nodes of so many ranks keep a secondary shard of parameters, stage 3 (hpZ); 1: none", type=int)
    quantized_weights: str | None = _option(None, "parameters travel packed (qwZ)", choices=CODECS)
    quantized_gradients: str | None = _option(None, "gradients travel packed (qgZ)", choices=GRADIENT_CODECS)
    quantize_on_host: bool = _option(False, "pack also between ranks that share memory, which gain nothing", action="store_true")
    error_feedback: bool = _option(False, "what packing a gradient loses is added to the next one", action="store_true")
    checkpoint_activations: bool = _option(False, "keep the inputs of blocks only, compute the rest again", action="store_true")
    offload_activations: str = _option("none", "checkpoint activations, and keep the inputs there", choices=OFFLOADS)
    partition_activations: bool = _option(
        False, "keep a part of each input on each rank of tp (with --mesh tp=2)", action="store_true"
    )
    tile_max_bytes: int | None = _option(None, "cut larger weights into tiles of at most so many bytes", type=int)

    def __post_init__(self) -> None:
        for name in (
            "ranks",
            "layers",
            "dim",
            "heads",
            "steps",
            "seq",
            "batch",
            "accumulate",
            "eval_every",
            "threads",
            "keep_last",
        ):
            self._expect(name, (getattr(self, name) or 0) > 0 or getattr(self, name) is None, "a positive integer")
        self._expect("lr", 0 < self.lr < math.inf, "a positive number")
        self._expect("time_limit", self.time_limit is None or self.time_limit > 0, "a positive number")
        self._expect("weight_decay", 0 <= self.weight_decay < math.inf, "zero or a positive number")
        for name in ("max_grad_norm", "sample_bytes", "ngram_rows", "save_every"):
            self._expect(name, getattr(self, name) >= 0, "zero or a positive number")
        self._expect("eval_bytes", self.eval_bytes >= 2, "at least 2")
        self._expect("seed", 0 <= self.seed < 2**63, "0 <= seed < 2^63")
        self._expect("save_in_background", self.save_every or not self.save_in_background, "none without --save-every")
        self._check_offload()
        self._expect("scale", self.case_study or self.scale is None, f"none without --preset {', '.join(CASE_STUDIES)}")
        self._expect("size", self.size is None or not self.case_study, f"none with --preset {self.preset}; give --scale")
        self._check_mesh()
        try:
            self.axes.check_model(self.model_config())
        except ValueError as error:
            raise UsageError(f"--{error}") from None

    def _check_mesh(self) -> None:
        axes = self.axes
        if self.mesh is not None and self.ranks is not None:
            axes.check_ranks(self.ranks)
        self._expect("schedule", self.schedule is None or axes.pp > 1, "none without stages (--mesh pp=2)")
        for name in ("sequence_parallel", "partition_activations"):
            self._expect(name, not getattr(self, name) or axes.tp > 1, "none without --mesh tp=2")
        if axes.cuts_model:
            self._expect("sample_bytes", not self.sample_bytes, f"0 with --mesh {axes}: a model in parts writes no text")
            self._expect("tile_max_bytes", self.tile_max_bytes is None, f"none with --mesh {axes}, which cuts weights itself")

    def _check_offload(self) -> None:
        for name in ("tile_max_bytes", "buffer_mib"):
            self._expect(name, getattr(self, name) is None or getattr(self, name) > 0, "a positive integer")
        try:
            config = self.sharding()
        except zs.ConfigError as error:  # says what is wrong in the names of Config, which are those of the options
            raise UsageError(str(error)) from None
        packs = self.quantized_weights or self.quantized_gradients
        self._expect(
            "quantize_on_host", packs or not self.quantize_on_host, "none without --quantized-weights or --quantized-gradients"
        )
        self._expect("error_feedback", self.quantized_gradients or not self.error_feedback, "none without --quantized-gradients")
        self._expect("offload_path", self.offload_path is None or self.uses_disk, "no folder without nvme")
        needs_states = config.offload_optimizer.tier is not Tier.DEVICE
        self._expect("offload_ratio", self.offload_ratio == 1.0 or needs_states, "none without --offload-optimizer")
        for name, usual in (("buffer_count", 8), ("buffer_mib", 16)):
            self._expect(name, getattr(self, name) == usual or self.offloads, "none without an --offload option")
        if not (self.pin_memory or self.uses_tiers):
            raise UsageError("--no-pin-memory: expected none without an --offload option")

    def _expect(self, name: str, condition: bool, expected: str) -> None:
        if not condition:
            raise UsageError(f"--{name.replace('_', '-')}: expected {expected}, got {getattr(self, name)}")

    def model_config(self) -> GPTConfig:
        """The model's shape: the preset of `--size`, or a published run's, with what was given one by one."""
        if self.case_study is not None:
            shape = self.case_study.config(self.scale or SCALES[0])
        else:
            layers, dim, heads = SIZES[self.size or "tiny"]
            shape = GPTConfig(vocab_size=256, layers=layers, dim=dim, heads=heads)
        given = {name: getattr(self, name) for name in ("layers", "dim", "heads") if getattr(self, name) is not None}
        return replace(shape, seq_len=self.seq, ngram_rows=self.ngram_rows, **given)

    @property
    def case_study(self) -> CaseStudy | None:
        """The published run that `preset` names, if it names one."""
        return CASE_STUDIES.get(self.preset or "")

    @property
    def axes(self) -> MeshAxes:
        """The axes of `--mesh`; all 1 without it, whatever the number of ranks."""
        return MeshAxes() if self.mesh is None else MeshAxes.parse(self.mesh)

    def sharding(self) -> zs.Config:
        """The options of zs.shard."""
        return zs.Config(
            **self._planned(),
            stage=self.stage,
            precision=self.precision,
            max_grad_norm=self.max_grad_norm,
            offload_optimizer=self._offload(self.offload_optimizer, ratio=self.offload_ratio),
            offload_gradient=None if self.offload_gradient is None else self._offload(self.offload_gradient),
            offload_param=self._offload(self.offload_param),
            delayed_update=self.delayed_update,
            max_live_parameters=self.max_live_parameters,
            prefetch_bucket_size=self.prefetch_bucket_size,
            shard_size=self.shard_size,
            zero_hpz_partition_size=self.hpz,
            zero_quantized_weights=self._packed(self.quantized_weights),
            zero_quantized_gradients=self._packed(self.quantized_gradients, self.error_feedback),
        )

    def _planned(self) -> dict[str, Any]:
        """What the file of `config` says beside what has an option of its own."""
        planned = {} if self.config is None else read_layout(self.config)["shard"]
        return {name: planned[name] for name in _WITHOUT_OPTION if name in planned}

    def _packed(self, codec: str | None, error_feedback: bool = False) -> zs.Compression | None:
        return None if codec is None else zs.Compression(codec, error_feedback=error_feedback, force=self.quantize_on_host)

    def _offload(self, device: str, ratio: float = 1.0) -> zs.Offload:
        path = (self.offload_path or OFFLOAD_PATH) if device == "nvme" else None
        return zs.Offload(
            device, path=path, pin_memory=self.pin_memory, ratio=ratio, buffer_count=self.buffer_count,
            buffer_nbytes=self.buffer_mib << 20,
        )  # fmt: skip

    def activations(self) -> zs.Offload:
        """Where the inputs of checkpointed blocks rest."""
        return self._offload(self.offload_activations)

    @property
    def offloads(self) -> bool:
        """Whether a model state rests off the device."""
        config = self.sharding()
        tiers = (config.offload_optimizer.tier, config.offload_gradient.tier, config.offload_param.tier)
        return any(tier is not Tier.DEVICE for tier in tiers)

    @property
    def uses_tiers(self) -> bool:
        """Whether a model state or activations rest off the device."""
        return self.offloads or self.offload_activations != "none"

    @property
    def uses_disk(self) -> bool:
        """Whether anything rests in files."""
        return "nvme" in (self.offload_optimizer, self.offload_gradient, self.offload_param, self.offload_activations)

    @property
    def checkpoints(self) -> bool:
        """Whether activations are checkpointed."""
        return self.checkpoint_activations or self.partition_activations or self.offload_activations != "none"

    def check_batch(self, world_size: int) -> None:
        """Raise unless the mesh has as many ranks, and the batch divides evenly over them and over micro-batches."""
        if self.mesh is not None:
            try:
                self.axes.check_ranks(world_size)
            except UsageError as error:
                raise UsageError(f"{error}{self._of_config(world_size)}") from None
        readers, word = (self.axes.dp, "dp") if self.axes.cuts_model else (world_size, "ranks")
        parts = readers * self.accumulate
        if self.batch % parts:
            above = (self.batch // parts + 1) * parts
            raise UsageError(
                f"--batch: expected a multiple of {word} x accumulate = {readers} x {self.accumulate} = {parts}, "
                f"got {self.batch}; try --batch {above}"
            )

    def _of_config(self, world_size: int) -> str:
        """Where the mesh is that of a plan's file: which, and what to do."""
        if self.config is None or read_layout(self.config)["mesh"] != asdict(self.axes):
            return ""
        again = f"zeroshard plan MODEL --ranks {world_size} --auto --global-batch {self.batch} --config {self.config}"
        return f"; the mesh is that of --config {self.config}: plan again with `{again}`"

    def planned_otherwise(self, world_size: int) -> str:
        """A sentence where the file of `config` was made for other ranks; "" where for these, or without one."""
        axes = asdict(self.axes) if self.mesh is not None else {"dp": world_size}
        return "" if self.config is None else planned_otherwise(self.config, read_layout(self.config), axes)

    def to_dict(self) -> dict[str, Any]:
        """All options, ready for JSON."""
        return asdict(self)


def parse_train(argv: Sequence[str]) -> TrainOptions:
    """Options from the command line; `UsageError` names the one that is wrong."""
    parser = Parser(prog="zeroshard train", description="Train a byte-level GPT on a folder of text, sharded by ZeRO.")
    for option in fields(TrainOptions):
        settings = dict(option.metadata)
        names = (f"--{option.name.replace('_', '-')}", *settings.pop("also", ()))
        parser.add_argument(*names, default=option.default, **settings)
    chosen = parser.parse(argv)
    defaults = _other_defaults(chosen)
    if defaults:  # another row of defaults: what was given beside it counts
        parser.set_defaults(**defaults)
        chosen = parser.parse(argv)
    return TrainOptions(**vars(chosen))


def _other_defaults(chosen: argparse.Namespace) -> dict[str, Any]:
    """What a preset and a mesh stand for, where nothing else is given."""
    if chosen.preset in PRESETS:
        row = dict(PRESETS[chosen.preset])
    else:
        row = _published(CASE_STUDIES[chosen.preset], chosen.scale) if chosen.preset else {}
    row |= _of_plan(chosen) if chosen.config is not None else {}
    mesh = chosen.mesh or row.get("mesh")
    axes = MeshAxes() if mesh is None else MeshAxes.parse(mesh)
    if axes.cuts_model:
        row["sample_bytes"] = 0
        row.setdefault("accumulate", 2 * axes.pp if axes.pp > 1 else 1)
        row.setdefault("batch", math.lcm(8, axes.dp * row["accumulate"]))
    return row


def _of_plan(chosen: argparse.Namespace) -> dict[str, Any]:
    """The options that a plan's file stands for. Raises UsageError for a file that is none."""
    try:
        plan = read_layout(chosen.config)
    except zs.ConfigError as error:
        raise UsageError(f"--{error}") from None
    row = {name: plan["shard"][key] for name, key in _PLANNED.items() if key in plan["shard"]}
    row |= {"accumulate": plan["micro_batches"], "batch": plan["global_batch"], "seq": plan.get("seq", TrainOptions.seq)}
    kept = plan.get("checkpoint_activations") or {}
    row |= {"checkpoint_activations": bool(kept), "offload_activations": kept.get("offload", "none")}
    row["partition_activations"] = bool(kept.get("partition"))
    if cuts_model(plan):
        row["mesh"] = ",".join(f"{axis}={size}" for axis, size in plan["mesh"].items())
    elif chosen.mesh is None:
        row["ranks"] = plan["mesh"]["dp"]
    return row


def _published(study: CaseStudy, scale: str | None) -> dict[str, Any]:
    """The stage and the length of sequences of a published run; at full scale also its batch and precision."""
    row = {"stage": study.layout.stage, "seq": study.config(scale or SCALES[0]).seq_len, "ngram_rows": 0}
    if scale == "full":
        row |= {"batch": study.layout.global_batch, "precision": study.layout.precision}
    return row
