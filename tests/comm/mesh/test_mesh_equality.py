"""HSDP, MiCS, hpZ, hosts of several ranks: gradients of every step and weights are the bits of one process that adds in the same
order.

Ranks of a node add first, then the nodes' sums are added: (g0 + g1) + (g2 + g3). That is the order of plain stage 3, and so the
same bits, where there are two ranks, one node, or nodes of one rank. Elsewhere the sums of fp32 differ from it by what fp32
loses: each of N - 1 additions rounds by at most 2^-24 of its sum.
"""

import os

import pytest
import torch
from equivalence_kit import CLIP
from helpers import OddGPT, Task, assert_equal_runs, flat, reference, seeded, token_batches
from mesh_kit import KINDS, NETWORKS, expected, options_of, trained

MODEL = seeded(OddGPT)
GRIDS = [(2, 2), (2, 1), (4, 2), (6, 3), (6, 2)]


def cells_of(kind: str, size: int, world_size: int) -> list[dict]:
    """Every stage on four ranks; on two and six one with whole parameters, and stage 3. ZEROSHARD_SLOW=1: all."""
    stages = (0, 1, 2, 3) if world_size == 4 or os.environ.get("ZEROSHARD_SLOW") == "1" else (size % 2 + 1, 3)
    return [
        {**options_of(kind, size), "stage": stage, "units": "leaf" if stage == 2 else "auto", "overlap": stage != 1}
        for stage in stages
        if stage == 3 or kind != "hpz"
    ]


# ranks that share memory are on one host, and a network in order (NCCL) takes hosts for nodes only where it is asked to
@pytest.mark.parametrize("kind, network", [(k, n) for k in KINDS for n in NETWORKS if k != "hosts" or n == "tagged"])
@pytest.mark.parametrize("world_size, size", GRIDS)
def test_every_stage_has_the_bits_of_one_process(kind, network, world_size, size):
    task = Task(MODEL, token_batches(2, 2, world_size), local_sums=world_size == 4, clip=CLIP)
    cells = cells_of(kind, size, world_size)
    results = trained(world_size, network, task, cells, size)
    for rank, outcomes in enumerate(results):
        for cell, got in zip(cells, outcomes, strict=True):  # norms of other units are sums in another order: each by its own
            one = results[0][cells.index(cell)]
            if rank == 0:
                one = expected(task, world_size, kind, size, "fp32", got.coefficients, 1.0)
            assert_equal_runs(got, one, f"{cell} rank {rank}:")
    plain = reference(task, world_size, "fp32", results[0][0].coefficients)
    if world_size == 2:
        assert_equal_runs(results[0][0], plain)
    assert torch.allclose(flat(results[0][0].weights), flat(plain.weights), rtol=1e-5, atol=1e-4)
