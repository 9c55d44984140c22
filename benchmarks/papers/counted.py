"""The bytes that a rank holds and sends, as the runtime counts them on imagined ranks, at any number of parameters.

The model is four matrices of `numel` elements together, on fake tensors, which have sizes but no data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.planner.models import GPT
from zeroshard.planner.models.gpt import GPTConfig
from zeroshard.seam import GATHERED, GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS, PARTIAL, STAGING, engine_of
from zeroshard.testing import imagined_mesh
from zeroshard.utils.torch_compat import FakeTensorMode

STATES = (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER)
# 2 + 2 + 12 bytes a parameter, as in the papers; zs.shard's default keeps reduced gradients in fp32: 2 + 4 + 12
PAPERS: dict[str, Any] = {"precision": "fp16", "gradient_dtype": torch.float16}


@dataclass(frozen=True)
class Counted:
    """The bytes of one rank after a step. states: at rest, by category; elsewhere: those off the device; gathered, buffers: peaks
    of gathered parameters and of gradient buffers; sent_nbytes: sent in all; between: sent to other nodes, by collective;
    lost: errors of compression, kept for the next step."""

    numel: int
    states: dict[str, int]
    elsewhere: int
    secondary: int
    gathered: int
    buffers: int
    sent_nbytes: int
    between: dict[str, int]
    lost: int

    @property
    def states_nbytes(self) -> int:
        return sum(self.states.values())


def count(
    numel: int, ranks: int, *, matrices: int = 4, of_unit: int = 1, node_size: int | None = None, **options: Any
) -> Counted:  # fmt: skip
    """Run one step of rank 0 of `ranks` on fake tensors; return its bytes. of_unit: matrices of a unit. options: for zs.shard."""
    rows = next(n for n in range(math.isqrt(numel // matrices), 0, -1) if numel // matrices % n == 0)
    columns = numel // matrices // rows
    with FakeTensorMode():
        shapes = [(rows, columns) if number % 2 else (columns, rows) for number in range(matrices)]
        layers = [nn.Linear(*shape, bias=False) for shape in shapes]
        model: nn.Module = nn.Sequential(*(nn.Sequential(*layers[n : n + of_unit]) for n in range(0, matrices, of_unit)))
        units = lambda name, module: isinstance(module, nn.Sequential) and name != ""  # noqa: E731
        optimizer = torch.optim.Adam(model.parameters())
        comm = FakeComm(0, ranks, node_size=node_size)
        model, sharded = zs.shard(model, optimizer, comm=comm, units=units, **PAPERS | options)
        assert sharded is not None
        ledger = engine_of(model).ledger
        output = model(torch.zeros(1, columns, dtype=torch.bfloat16 if options.get("precision") == "bf16" else torch.float16))
        forward = sum(each.between for each in ledger.traffic.values())
        output.sum().backward()
        gathers = sum(each.between for kind, each in ledger.traffic.items() if kind.startswith("gather"))
        sharded.step()
        report, everything = zs.report(model), ledger.traffic.values()
        elsewhere = sum(sum(report.elsewhere.get(tier, {}).get(name, 0) for name in STATES) for tier in ("host", "disk"))
        return Counted(
            report.num_parameters, report.at_rest, elsewhere, report.secondary, ledger.peak[GATHERED],
            ledger.peak[STAGING] + ledger.peak[PARTIAL], sum(each.nbytes for each in everything),
            {"forward": forward, "backward": gathers - forward, "reduce": sum(each.between for each in everything) - gathers},
            report.lost,
        )  # fmt: skip


def tensor_parallel_elements(hidden: int, heads: int, batch: int, seq: int, tp: int) -> float:
    """Return the elements that a block's all-reduces send over a ring of `tp` ranks with recomputation, divided by (tp-1)/tp.

    They are the difference of the collectives that run in models of three and of two blocks.
    """

    def sent(layers: int) -> float:
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab_size=64 * tp, seq_len=seq, dim=hidden, layers=layers, heads=heads, bias=True))
        with imagined_mesh({"dp": 1, "tp": tp}) as mesh:
            run = zs.parallelize(model, mesh, optimizer=torch.optim.Adam, precision="fp16", stage=0)
            zs.checkpoint_activations(run.model, blocks="Block")
            tokens = torch.zeros(batch, seq, dtype=torch.long)
            for _ in range(2):  # the second is counted
                run.step(tokens, tokens)
            return run.traffic.counted["tp"]

    return (sent(3) - sent(2)) / 2 * tp / (tp - 1)
