"""A dry run beside one CUDA device: the peak of allocated memory, within 5%, of the configurations of benchmarks/predictions.py.

World 1 over NCCL. Skipped where there is no GPU (conftest.py does that for the marker).
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from benchmarks import predictions
from zeroshard.config import Tier

pytestmark = pytest.mark.gpu
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    matrix = torch.ones(256, 256, device="cuda", requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):  # what libraries take once, e.g. cuBLAS's workspaces, forward and backward
        (matrix.to(dtype) @ matrix.to(dtype)).sum().backward()
    torch.cuda.synchronize()
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", predictions.CASES, ids=lambda case: case.name)
def test_the_peak_of_allocated_memory_is_that_of_the_plan(case: predictions.Case, tmp_path: Path) -> None:
    if case.model is predictions.llama:
        pytest.importorskip("transformers")
    plan = zs.plan(case.model, ranks=1, separate=True, **case.settings(str(tmp_path)))
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        predictions.train(case, str(tmp_path), STEPS)
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    assert plan.peak(Tier.DEVICE) == pytest.approx(grown, rel=0.05)
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 0.05 * grown
