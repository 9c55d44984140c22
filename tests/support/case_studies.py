"""The published runs at full size on imagined ranks: counts, and formulas of a rank's memory and of bytes sent by axis.

`zs.parallelize` itself runs two steps of one rank of each stage (rank 0 along dp and tp) on fake tensors, with activation
checkpointing. Bytes sent along tp and pp are linear in the number of micro-batches of a step, so a step of two is enough.

The formulas use numbers of the publications alone. h: width, V: tokens, s: sequence, b: sequences of a micro-batch, m: number of
micro-batches, L: blocks of the stage, t, d: ranks along tp, dp; x = 2 b s h: bytes of an activation; n: parameters of the rank,
padding counted.

    parameters 2 n     gradients 4 n, in fp32     masters 4 n / d     states 8 n / d
    tp   2 (t-1)/t m [5 L x                two all-reduces in forward, two in backward, one in the recomputed forward
                      + x                  first stage: the output of the embedding
                      + x + 10 b s]        last stage: the gradient of the head's input; three numbers of each token's loss,
                                           (in fp16 12 b s) one of them in bf16
         A recomputed forward ends where backward has all that it needs: before the last all-reduce of the block. Megatron-LM
         makes that all-reduce, too: 6 L x.
    pp   m x (all but the last stage) + m x (all but the first) + 4 V h / (t d) (first and last, which share the embedding)
    dp   (d-1)/d (2 n to reduce + 2 n to gather)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import zeroshard as zs
from zeroshard.engine.ledger import GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS
from zeroshard.engine.runtime import runtime_of
from zeroshard.planner.models import GPT
from zeroshard.planner.presets import CaseStudy
from zeroshard.testing import imagined_mesh

MEMORY, AXES = (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER), ("tp", "pp", "dp")
_ALIGNMENT = 32  # elements: parameters in a flat buffer, and shards, begin at multiples of it


@dataclass(frozen=True)
class Bytes:
    """The bytes of one rank: those it holds, by category of model state, and those it sends in a step, by axis of the mesh."""

    memory: dict[str, int]
    sent: dict[str, int]


def micro_batch_of(study: CaseStudy) -> int:
    """Return the sequences of a micro-batch. Not published: one, or, without a pipeline, the rank's whole batch."""
    layout = study.layout
    return layout.micro_batch or (1 if layout.pp > 1 else layout.global_batch // layout.dp)


def blocks_of(study: CaseStudy) -> list[int]:
    """Return the number of blocks of each stage. BLOOM's embedding and head count as one block each, MT-NLG's as none."""
    layers, stages = study.full.layers, study.layout.pp
    if layers % stages == 0:
        return [layers // stages] * stages
    each = (layers + 2) // stages
    return [each - 1] + [each] * (stages - 2) + [each - 1]


def count(study: CaseStudy, stage: int, micro_batches: int = 2, recompute: bool = True) -> Bytes:
    """Run two steps of a rank of one stage of the pipeline, and read what it holds and what the second has sent."""
    layout, shape = study.layout, study.full
    with torch.device("meta"):
        model = GPT(shape)
    with imagined_mesh({"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}, rank=stage * layout.dp * layout.tp) as mesh:
        run = zs.parallelize(
            model, mesh, optimizer=torch.optim.AdamW, micro_batches=micro_batches, schedule="GPipe", stage=layout.stage,
            precision=layout.precision, loss_parallel=True,
        )  # fmt: skip
        if recompute:
            zs.checkpoint_activations(run.model, blocks="Block")  # named, so that it also finds them on a stage of one block
        tokens = torch.zeros(micro_batches * micro_batch_of(study), shape.seq_len, dtype=torch.long)
        for _ in range(2):
            run.step(tokens, tokens)
        now = runtime_of(run.model).tiers.ledger.now
        return Bytes({name: now[name] for name in MEMORY}, {axis: round(run.traffic.counted.get(axis, 0)) for axis in AXES})


def formula(study: CaseStudy, stage: int, micro_batches: int = 2, recompute: bool = True) -> Bytes:
    """Return the bytes that `count` should find, by the formulas at the head of this file."""
    layout, shape, t, d = study.layout, study.full, study.layout.tp, study.layout.dp
    first, last = stage == 0, stage == layout.pp - 1
    buffers = _buffers(study, blocks_of(study)[stage], first, last)
    shards = [_up(-(-sum(map(_up, numels)) // d)) for numels in buffers]
    n = d * sum(shards)
    tokens = micro_batch_of(study) * shape.seq_len  # b s
    x, ring = 2 * tokens * shape.dim, 2 * (t - 1) / t
    passes = (
        (5 if recompute else 4) * blocks_of(study)[stage] * x
        + first * x
        + last * (x + (12 if layout.precision == "fp16" else 10) * tokens)
    )
    tied = 4 * min(_up(-(-shape.vocab_size // t * shape.dim // d)), shape.vocab_size // t * shape.dim)
    between = micro_batches * x * ((not last) + (not first)) + tied * (first != last)
    return Bytes(
        {PARAMETERS: 2 * n, GRADIENTS: 4 * n, MASTERS: 4 * n // d, OPTIMIZER: 8 * n // d},
        {"tp": round(ring * micro_batches * passes), "pp": between, "dp": (2 + 2) * n * (d - 1) // d},
    )


def _up(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


def _buffers(study: CaseStudy, blocks: int, first: bool, last: bool) -> list[list[int]]:
    """Return the element counts of a rank's parameters, by flat buffer. A block has two: of split and of whole parameters."""
    shape, t, h = study.full, study.layout.tp, study.full.dim
    cut = [3 * h * h // t, 3 * h // t, h * h // t, 4 * h * h // t, 4 * h // t, 4 * h * h // t]  # qkv, out, up, down
    whole = [h] * 6  # weights and biases of two norms; biases of the two layers whose weights are split by rows (out, down)
    embedding = [[shape.vocab_size * h // t]] * (first or last)  # also the head
    rest = (
        [shape.seq_len * h] * (first and shape.positions == "learned") + [h, h] * (first and shape.embedding_norm) + [h, h] * last
    )
    return [cut, whole] * blocks + embedding + [rest] * bool(rest)
