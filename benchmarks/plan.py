"""The settings of a benchmark run, as plain data: contenders, model, rounds.

The controller builds them, and sends each worker process its contender and the workload.
A contender's name is its kind, its stage, its offload and, if it is not fp32, its precision: `zs3`, `ddp`,
`zs3-disk`, `fsdp2-offload-bf16`.
"""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("fp32", "bf16")
TIERS_ROUNDS = 4
LENGTHS = (1024, 4096, 16384, 65536)  # tokens of a sequence, in the section sequences

LABELS = {
    "local": "no exchange", "ddp": "DDP", "ddp+zero": "DDP + ZeroRed.Opt.",
    "replicate": "replicate", "fsdp2": "FSDP2", "zs": "zeroshard", "ds": "DeepSpeed", "engine": "zeroshard.deepspeed",
    "door": "zeroshard.fsdp",
    "sp": "zeroshard sp", "long": "zeroshard long_context", "ulysses": "DeepSpeed Ulysses",
}  # fmt: skip

OFFLOAD_LABELS = {  # what is offloaded, and to where; zeroshard's options for each are in contenders.py
    "": "",
    "opthost": "opt. host",
    "host": "all host",
    "disk": "opt. disk",
    "infinity": "all disk",
    "host8": "all host, int8",  # with int8 states and split masters: some 11 bytes a parameter
    "int8": "int8 states",  # nothing: they rest in fewer bits
    "backend": "sums by gloo",  # nothing: the backend sums gradients
    "offload": "offload",  # for the peers: parameters, gradients and optimizer states on the host
}


@dataclass(frozen=True)
class Contender:
    """One library with its stage (None where it has none), precision, and what it offloads ("": nothing)."""

    kind: str
    stage: int | None = None
    precision: str = "fp32"
    offload: str = ""

    def __post_init__(self) -> None:
        kinds, precisions = ("a contender", self.kind, LABELS), ("a precision", self.precision, PRECISIONS)
        for what, given, known in (kinds, precisions, ("an offload", self.offload, OFFLOAD_LABELS)):
            if given not in known:
                raise ValueError(f"expected {what} among {', '.join(filter(None, known))}, got {given!r}")

    @property
    def on_disk(self) -> bool:
        """True where a step moves states between host and disk."""
        return self.offload in ("disk", "infinity")

    @property
    def name(self) -> str:
        """The name in results.json and on the command line, such as `zs3` or `fsdp2-bf16`."""
        stage = "" if self.stage is None else str(self.stage)
        return "-".join(filter(None, (self.kind + stage, self.offload, self.suffix)))

    @property
    def label(self) -> str:
        """The name in tables and plots."""
        stage = "" if self.stage is None else str(self.stage)
        return " ".join(filter(None, (LABELS[self.kind], stage, OFFLOAD_LABELS[self.offload], self.suffix)))

    @property
    def suffix(self) -> str:
        """The end of the name: the precision, "" for fp32."""
        return "" if self.precision == "fp32" else self.precision


# In the order of the table and of the start: where memory runs out, the contenders that goals name have started already.
# DeepSpeed has no bf16 row, since no goal names one.
CONTENDERS = (
    *(Contender("zs", stage) for stage in range(4)),
    Contender("zs", 3, offload="int8"),
    Contender("engine", 3),
    *(Contender("ddp"), Contender("fsdp2"), Contender("door")),
    *(Contender("ds", stage) for stage in (3, 2, 1)),
    *(Contender("ddp+zero"), Contender("local")),
    *(Contender("zs", stage, "bf16") for stage in (2, 3)),
    *(Contender(kind, precision="bf16") for kind in ("ddp", "fsdp2")),
)

# Raced where they are named (with ZEROSHARD_COMM=dist: ranks that share memory sum in rank order).
SOCKET_CONTENDERS = tuple(Contender("zs", stage, offload="backend") for stage in (2, 3))

# The race of the tiers: contenders that offload, and the same without offload.
TIER_CONTENDERS = (
    Contender("zs", 3),
    *(Contender("zs", 3, offload=offload) for offload in ("host", "disk", "infinity")),
    Contender("fsdp2", offload="offload"),
    *(Contender("door", offload=offload) for offload in ("offload", "opthost", "disk")),
    Contender("ds", 3, offload="offload"),
    Contender("fsdp2"),
    Contender("ds", 3),
)

# The race on a mesh of pipeline, data and tensor parallelism (parallel.py).
MESH_CONTENDERS = (*(Contender("zs", stage) for stage in (1, 2, 3)), Contender("fsdp2"), Contender("replicate"))

# The race over the length of sequences (sequences.py).
SEQUENCE_CONTENDERS = (Contender("zs", 3), Contender("sp", 3), Contender("long", 3), Contender("ulysses", 3))

QUICK = ("zs2", "zs3", "ddp", "fsdp2", "zs3-bf16", "fsdp2-bf16")


@dataclass(frozen=True)
class ModelShape:
    """The shape of the GPT; the default is the 34M model of the goals."""

    vocab_size: int = 8192
    seq_len: int = 128
    dim: int = 512
    layers: int = 8
    heads: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"expected --{name.replace('_', '-')} of at least 1, got {value}")
        if self.dim % self.heads:
            raise ValueError(f"expected --dim divisible by --heads, got {self.dim} and {self.heads}")


@dataclass(frozen=True)
class Workload:
    """The work that every contender does: the same weights, batches and optimizer settings."""

    shape: ModelShape = ModelShape()
    sequences: int = 2  # per rank and step
    ranks: int = 2
    seed: int = 1234
    lr: float = 3e-4
    device: str = "cpu"  # "cpu" (gloo) or "cuda" (NCCL)
    pin_cores: bool = False
    swap_path: str | None = None  # folder on a local disk, for contenders that offload to it
    meta: bool = False  # build on the meta device, with other weights for each contender: only to see whether the model fits
    mesh: tuple[int, ...] = ()  # numbers of ranks along pp, dp and tp, see parallel.py; (): all ranks are data-parallel
    micro_batches: int = 1  # with a pipeline: number of parts into which `sequences` of each rank are cut
    long: bool = False  # the race over the length of sequences (sequences.py)
    checkpoint: bool = False  # activation checkpointing of each block
    limit_nbytes: int = 0  # CUDA: what the allocator may take once the model is sharded; 0: all of the device
    forked: bool = False  # ranks are forked from a server that has imported all they need: 0.1 s a rank, not 6 (not on CUDA)

    def __post_init__(self) -> None:
        if min(self.ranks, self.sequences) < 1:
            raise ValueError(f"expected --ranks and --micro-batch of at least 1, got {self.ranks}, {self.sequences}")


@dataclass(frozen=True)
class Rounds:
    """The numbers of steps and rounds: `warmup` unmeasured steps after the start, then `rounds` turns of `steps` steps.

    lead_in: unmeasured steps at the start of each turn. A contender that uses a disk prefetches the next step's states
    while it waits for its turn, which makes the first step too fast; later steps are as fast as in a run of its own.
    """

    warmup: int = 3  # DeepSpeed traces and allocates in its first steps
    rounds: int = 5
    steps: int = 3
    memory_steps: int = 2
    lead_in: int = 0

    def first_step(self, index: int) -> int:
        """Return the number of steps before the turn of round `index`."""
        return self.warmup + index * (self.lead_in + self.steps)

    def __post_init__(self) -> None:
        if min(self.rounds, self.steps, self.memory_steps) < 1 or min(self.warmup, self.lead_in) < 0:
            raise ValueError("expected --rounds and --steps of at least 1 and --warmup of at least 0")


def select(
    only: tuple[str, ...], precisions: tuple[str, ...], quick: bool = False, among: tuple[Contender, ...] = CONTENDERS
) -> list[Contender]:
    """Return the contenders to run, in table order.

    Args:
        only: names with or without a precision suffix; a kind ("zs", "ds") stands for all its stages.
            Empty for all, or for the short list if `quick`.
        precisions: keep these precisions.
        among: contenders of one race. `only` may also name contenders of other races.
    """
    chosen = [c for c in (*among, *(SOCKET_CONTENDERS if among is CONTENDERS and only else ())) if c.precision in precisions]
    if not only:
        return [c for c in chosen if not quick or c.name in QUICK]
    everybody = dict.fromkeys((*CONTENDERS, *SOCKET_CONTENDERS, *TIER_CONTENDERS, *MESH_CONTENDERS, *SEQUENCE_CONTENDERS))
    known = {alias for c in everybody for alias in _aliases(c)}
    for name in only:
        if name not in known:
            raise ValueError(f"expected contenders among {', '.join(c.name for c in everybody)}, got {name!r}")
    return [c for c in chosen if _aliases(c) & set(only)]


def _aliases(contender: Contender) -> set[str]:
    """Return the names that select a contender: its name, that without precision, and, without offload, its kind."""
    own = {contender.name, contender.name.removesuffix(f"-{contender.precision}")}
    return own if contender.offload else own | {contender.kind}
