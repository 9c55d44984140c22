"""The options of `zeroshard train`: their defaults, help and validation in one frozen dataclass.

`--batch` counts sequences of one optimizer step over all ranks and micro-batches, so the same command reads the same
text on any number of ranks:   batch = ranks x accumulate x sequences of one forward pass.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from zeroshard.models import GPTConfig

from .arguments import Parser, UsageError

SIZES = {  # name -> layers, dim, heads
    "tiny": (3, 128, 4),  # 0.6 M parameters in blocks, 3.2 M in n-grams: a minute on two cores
    "small": (8, 384, 6),  # 14 M
    "medium": (12, 768, 12),  # 85 M, the shape of GPT-2 small
}
PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")


def _option(default: Any, text: str, **settings: Any) -> Any:
    return field(default=default, metadata={"help": text, **settings})


@dataclass(frozen=True)
class TrainOptions:
    """A validated call of `zeroshard train`. Each field is the option of that name."""

    stage: int = _option(3, "ZeRO stage: what is sharded", choices=(0, 1, 2, 3), type=int)
    ranks: int | None = _option(None, "local ranks to start (default: one per GPU, without GPUs 2)", type=int)
    size: str = _option("tiny", "preset of layers, dim and heads", choices=tuple(SIZES))
    layers: int | None = _option(None, "blocks, instead of the preset's", type=int)
    dim: int | None = _option(None, "width, instead of the preset's", type=int)
    heads: int | None = _option(None, "attention heads, instead of the preset's", type=int)
    ngram_rows: int = _option(8192, "rows of each n-gram table; 0: none", type=int)
    data: str | None = _option(None, "folder of text files (default: the Python standard library)")
    steps: int = _option(1000, "optimizer steps", type=int)
    time_limit: float | None = _option(None, "seconds of training after which it ends well, if sooner", type=float)
    seq: int = _option(256, "bytes per sequence", type=int)
    batch: int = _option(8, "sequences per step, over all ranks", type=int)
    accumulate: int = _option(1, "micro-batches per step", type=int)
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

    def __post_init__(self) -> None:
        for name in ("ranks", "layers", "dim", "heads", "steps", "seq", "batch", "accumulate", "eval_every", "threads"):
            self._expect(name, (getattr(self, name) or 0) > 0 or getattr(self, name) is None, "a positive integer")
        for name in ("lr", "time_limit"):
            self._expect(name, getattr(self, name) is None or getattr(self, name) > 0, "a positive number")
        for name in ("weight_decay", "max_grad_norm", "sample_bytes", "ngram_rows"):
            self._expect(name, getattr(self, name) >= 0, "zero or a positive number")
        self._expect("eval_bytes", self.eval_bytes >= 2, "at least 2")
        self._expect("seed", 0 <= self.seed < 2**63, "0 <= seed < 2^63")
        try:
            self.model_config()
        except ValueError as error:
            raise UsageError(f"--{error}") from None

    def _expect(self, name: str, condition: bool, expected: str) -> None:
        if not condition:
            raise UsageError(f"--{name.replace('_', '-')}: expected {expected}, got {getattr(self, name)}")

    def model_config(self) -> GPTConfig:
        """The model's shape: the preset of `--size` with what was given one by one."""
        layers, dim, heads = SIZES[self.size]
        return GPTConfig(
            vocab_size=256,
            seq_len=self.seq,
            layers=self.layers or layers,
            dim=self.dim or dim,
            heads=self.heads or heads,
            ngram_rows=self.ngram_rows,
        )

    def check_batch(self, world_size: int) -> None:
        """Raise unless the batch divides evenly over ranks and micro-batches."""
        parts = world_size * self.accumulate
        if self.batch % parts:
            above = (self.batch // parts + 1) * parts
            raise UsageError(
                f"--batch: expected a multiple of ranks x accumulate = {world_size} x {self.accumulate} = {parts}, "
                f"got {self.batch}; try --batch {above}"
            )

    def to_dict(self) -> dict[str, Any]:
        """All options, ready for JSON."""
        return asdict(self)


def parse_train(argv: Sequence[str]) -> TrainOptions:
    """Options from the command line; `UsageError` names the one that is wrong."""
    parser = Parser(prog="zeroshard train", description="Train a byte-level GPT on a folder of text, sharded by ZeRO.")
    for option in fields(TrainOptions):
        parser.add_argument(f"--{option.name.replace('_', '-')}", default=option.default, **option.metadata)
    return TrainOptions(**vars(parser.parse(argv)))
