"""Pipelines of 2 ranks x 2 data-parallel ranks: bits of one process, in one world of 4 processes for all cells."""

import os
import time

import pipeline_kit as kit
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.launch import run_processes
from zeroshard.parallel.pipeline import Pipeline, stages_of
from zeroshard.parallel.stages import cut_stages
from zeroshard.zero.runtime import runtime_of

WORLD = 4
CELLS = [  # (ZeRO stage, schedule, stages a rank, tied)
    *((stage, "1F1B", 1, tied) for stage in range(4) for tied in (False, True)),
    (1, "GPipe", 1, True),
    (3, "GPipe", 1, False),
    (2, "LoopedBFS", 2, False),
    *((stage, "Interleaved1F1B", 2, True) for stage in range(4)),
    *((stage, "InterleavedZeroBubble", 2, stage == 1) for stage in range(4)),
    *((stage, "ZBVZeroBubble", 2, True) for stage in range(4)),
    (2, "DualPipeV", 2, False),
]


def _train(mesh, stage, schedule, per_rank, tied):
    pp, dp = mesh["pp"], mesh["dp"]
    own = stages_of(pp.get_local_rank(), 2, per_rank, schedule)
    modules = cut_stages(kit.model(tied), 2 * per_rank, own)
    sharded = [zs.shard(module, kit.adamw(module.parameters()), comm=dp, stage=stage) for module in modules]
    modules, optimizers = zip(*sharded, strict=True)
    pipeline = Pipeline(modules, pp, micro_batches=kit.MICRO, loss=kit.loss, schedule=schedule)
    losses = []
    for step in range(kit.STEPS):
        tokens, targets = kit.batch(step, dp.get_local_rank())
        each = []
        losses.append(pipeline.step(tokens, target=targets, losses=each).item())
        assert len(each) == kit.MICRO
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    before = [pipeline.step(tokens, target=targets).item(), *(group.grads.reduced for m in modules for group in runtime_of(m).groups)]
    assert pipeline.evaluate(tokens, target=targets).item() == before[0] and all(before[1:])
    values = {name: value for module in modules for name, value in zs.full_state_dict(module).items()}
    for module in modules:
        zs.close(module)
    return losses, values


def _all(rank, ranks, cells):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    found = {}
    for cell in cells:
        begin = time.time()
        found[cell] = _train(mesh, *cell)
        if os.environ.get("TIMES") and rank == 0:
            print(cell, round(time.time() - begin, 2), flush=True)
    return mesh["dp"].get_local_rank(), found


@pytest.mark.processes
def test_bits_of_one_process():
    expected = {tied: kit.one_process(tied, 2) for tied in (False, True)}
    looped = kit.one_process(False, 2, backwards=True)
    results = run_processes(_all, WORLD, CELLS, timeout_s=150)
    wrong = []
    for cell in CELLS:
        losses, values = looped if cell[1] == "LoopedBFS" else expected[cell[3]]
        seen = set()
        for dp, found in results:
            got = found.get(cell)
            if not isinstance(got, tuple):
                wrong.append((cell, got))
                continue
            if got[0] != [row[dp] for row in losses]:
                wrong.append((cell, "losses", got[0], [row[dp] for row in losses]))
            for name, value in got[1].items():
                seen.add(name)
                if not torch.equal(value, values[name]):
                    wrong.append((cell, name, (value - values[name]).abs().max().item()))
        if seen != set(values):
            wrong.append((cell, "names", seen ^ set(values)))
    assert not wrong, "\n".join(map(str, wrong[:12]))
