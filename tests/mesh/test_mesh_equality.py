"""HSDP, MiCS, hpZ, hosts of several ranks: gradients of every step and weights are the bits of one process that adds in the same order.

Ranks of a node add first, then the nodes' sums are added: (g0 + g1) + (g2 + g3). That is the order of plain stage 3, and so the same
bits, where there are two ranks, one node, or nodes of one rank. Elsewhere the sums of fp32 differ from it by what fp32 loses: each of N - 1
additions rounds by at most 2^-24 of its sum.
"""

import itertools

import pytest
import torch
from equivalence_kit import CLIP, SCALE
from helpers import OddGPT, Task, assert_equal_runs, flat, reference, seeded, token_batches
from mesh_kit import KINDS, NETWORKS, expected, options_of, trained

MODEL = seeded(OddGPT)
GRIDS = [(2, 2), (2, 1), (4, 2), (6, 3), (6, 2)]


def cells_of(kind: str, size: int, precision: str) -> list[dict]:
    low = {"precision": precision, **({"loss_scale": SCALE[precision]} if precision == "fp16" else {})}
    return [
        {**options_of(kind, size), "stage": stage, "units": units, "overlap": overlap, **low}
        for stage, (units, overlap) in itertools.product((0, 1, 2, 3), [("auto", True), ("leaf", False)])
        if stage == 3 or kind != "hpz"
    ]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size, size", GRIDS)
def test_every_stage_has_the_bits_of_one_process(kind, network, world_size, size):
    if kind == "hosts" and network == "shared":
        pytest.skip("threads are on one host")
    task = Task(MODEL, token_batches(2, 2, world_size), local_sums=world_size == 4, clip=CLIP)
    cells = cells_of(kind, size, "fp32")
    results = trained(world_size, network, task, cells, size)
    one = expected(task, world_size, kind, size, "fp32", results[0][0].coefficients, 1.0)
    for rank, outcomes in enumerate(results):
        for cell, got in zip(cells, outcomes, strict=True):
            if got.coefficients != results[0][0].coefficients:  # norms of other units are sums in another order
                one_ = expected(task, world_size, kind, size, "fp32", got.coefficients, 1.0)
                assert_equal_runs(got, one_, f"{cell} rank {rank}:")
                continue
            assert_equal_runs(got, one, f"{cell} rank {rank}:")
    plain = reference(task, world_size, "fp32", results[0][0].coefficients)
    if world_size == 2:
        assert_equal_runs(results[0][0], plain)
    assert torch.allclose(flat(results[0][0].weights), flat(plain.weights), rtol=1e-5, atol=1e-4)
