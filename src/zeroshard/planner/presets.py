"""The shape of a GPT, and models and layouts of published runs that trained with ZeRO on a mesh: Turing-NLG, BLOOM, MT-NLG.

    ranks = tp x pp x dp          tp: parts of each weight, pp: stages of blocks, dp: replicas that share the batch

A *scale* is a shape of the same architecture: "full", as published, or "tiny", which trains on a few CPU ranks and can still
be split in two or four along each axis. Every number has its source; unpublished ones are None, or are marked in `sources`.
"""

import math
from dataclasses import asdict, dataclass, replace

POSITIONS = ("learned", "alibi")
SCALES = ("tiny", "full")
_GPT2_VOCABULARY = "GPT-2's 50,257 tokens, padded to a multiple of 128 x tp as Megatron-LM does (arXiv 1909.08053, section 3)"


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. `seq_len` is the longest sequence it can read."""

    vocab_size: int = 256
    seq_len: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    mlp_ratio: int = 4
    tied: bool = False
    dropout: float = 0.0
    ngram_rows: int = 0  # rows of each n-gram table; 0: no tables
    positions: str = "learned"  # a vector for each position, or "alibi": attention falls with distance (arXiv 2108.12409)
    bias: bool = False  # biases in linear layers and norms; the head never has one
    embedding_norm: bool = False  # a norm after the embedding, as in BLOOM (arXiv 2211.05100, section 3.2)
    experts: int = 0  # experts of a block in place of its MLP; 0: an MLP
    experts_per_token: int = 2
    init_std: float = 0.02  # standard deviation of the normal distribution from which weights are drawn

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_len", "dim", "layers", "heads", "mlp_ratio"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value!r}")
        if self.dim % self.heads:
            raise ValueError(f"heads: expected a divisor of dim={self.dim}, got {self.heads}; change heads or dim")
        if self.ngram_rows < 0:
            raise ValueError(f"ngram_rows: expected 0 (none) or a positive integer, got {self.ngram_rows}")
        if self.experts < 0 or self.experts_per_token < 1 or 0 < self.experts < self.experts_per_token:
            raise ValueError(
                f"experts: expected 0 (none) or at least experts_per_token={self.experts_per_token}, which is positive; got {self.experts}"
            )
        if self.positions not in POSITIONS:
            raise ValueError(f"positions: expected one of {', '.join(POSITIONS)}, got {self.positions!r}")
        if not 0.0 < self.init_std < math.inf:
            raise ValueError(f"init_std: expected a positive number, got {self.init_std}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: expected 0 <= dropout < 1, got {self.dropout}")

    def to_dict(self) -> dict[str, int | float | bool | str]:
        """Return the fields as a dictionary in types that JSON has."""
        return asdict(self)


@dataclass(frozen=True)
class PublishedLayout:
    """Arrangement of the ranks of a published run, and its batch sizes."""

    tp: int
    pp: int
    dp: int
    stage: int  # ZeRO stage over dp
    precision: str
    global_batch: int  # sequences per step, after any warm-up of the batch size
    micro_batch: int | None  # sequences of one forward pass of one data-parallel rank
    device: str

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class CaseStudy:
    """A published run: its architecture at each scale, its layout, and the sources of the numbers."""

    full: GPTConfig
    tiny: GPTConfig
    layout: PublishedLayout
    billions: float  # billions of parameters, as published
    sources: dict[str, str]  # names of fields -> document and section

    def config(self, scale: str) -> GPTConfig:
        """Return the architecture at a scale. Raises ValueError for unknown scales."""
        if scale not in SCALES:
            raise ValueError(f"scale: expected one of {', '.join(SCALES)}, got {scale!r}")
        return self.full if scale == "full" else self.tiny


def _case_study(full: GPTConfig, heads: int, layout: PublishedLayout, billions: float, sources: dict[str, str]) -> CaseStudy:
    """Make a case study, with a tiny scale of the full one: bytes as tokens, four blocks of dim 96, `heads` heads."""
    tiny = replace(full, vocab_size=256, seq_len=128, dim=96, layers=4, heads=heads, init_std=0.02)
    return CaseStudy(full, tiny, layout, billions, sources)


CASE_STUDIES: dict[str, CaseStudy] = {
    "turing-nlg": _case_study(
        GPTConfig(vocab_size=50688, seq_len=1024, dim=4256, layers=78, heads=28, bias=True, tied=True),
        heads=4,
        layout=PublishedLayout(tp=4, pp=1, dp=64, stage=1, precision="fp16", global_batch=512, micro_batch=None, device="V100 32 GB"),
        billions=17,
        sources={
            "layers, dim, heads, seq_len, global_batch, precision, tp":
                "Microsoft Research blog, Turing-NLG: A 17-billion-parameter language model, 2020-02-13",
            "dp, stage":
                "Microsoft Research blog, ZeRO & DeepSpeed, 2020-02-13: 256 GPUs, partitioned optimizer states",
            "bias, tied, learned positions": "Megatron-LM, on which it was built: arXiv 1909.08053, section 3",
            "vocab_size": "not published; " + _GPT2_VOCABULARY,
        },
    ),
    "bloom": _case_study(
        GPTConfig(
            vocab_size=250880, seq_len=2048, dim=14336, layers=70, heads=112, positions="alibi", embedding_norm=True,
            bias=True, tied=True, init_std=0.0048,
        ),
        heads=12,  # like 112 no power of two, so that ALiBi has slopes of both kinds
        layout=PublishedLayout(tp=4, pp=12, dp=8, stage=1, precision="bf16", global_batch=2048, micro_batch=2, device="A100 80 GB"),
        billions=176.247,
        sources={
            "layers, dim, heads, seq_len, global_batch, billions": "BLOOM, arXiv 2211.05100, table 3",
            "positions, embedding_norm": "BLOOM, arXiv 2211.05100, section 3.2",
            "tp, pp, dp, stage, precision": "BLOOM, arXiv 2211.05100, section 3.4",
            "vocab_size, init_std, micro_batch": "bigscience-workshop/bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm",
        },
    ),
    "mt-nlg": _case_study(
        GPTConfig(vocab_size=51200, seq_len=2048, dim=20480, layers=105, heads=128, bias=True, tied=True, init_std=4e-3),
        heads=8,
        layout=PublishedLayout(tp=8, pp=35, dp=8, stage=1, precision="bf16", global_batch=1920, micro_batch=None, device="A100 80 GB"),
        billions=530,
        sources={
            "layers, dim, heads, seq_len, global_batch, init_std, tp, pp": "MT-NLG, arXiv 2201.11990, section 3.2",
            "dp": "MT-NLG, arXiv 2201.11990, section 2: 280, 350 and 420 servers of 8 GPUs, 280 GPUs a model",
            "stage": "not published; ZeRO-1, the stage that reduces gradients once a step, as pipelines of DeepSpeed do",
            "bias, tied, learned positions": "Megatron-LM, on which it was built: arXiv 1909.08053, section 3",
            "vocab_size": _GPT2_VOCABULARY,
        },
    ),
}  # fmt: skip
