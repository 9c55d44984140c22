"""A dry run beside one CUDA device: the peak of allocated memory, within 5%, of the configurations of benchmarks/predictions.py.

World 1 over NCCL. Skipped where there is no GPU (conftest.py does that for the marker).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import zeroshard as zs
from benchmarks import predictions
from zeroshard.config import Tier

pytestmark = pytest.mark.gpu
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    predictions.warm_device()
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", predictions.CASES, ids=lambda case: case.name)
def test_the_peak_of_allocated_memory_is_that_of_the_plan(case: predictions.Case, tmp_path: Path) -> None:
    if case.model is predictions.llama:
        pytest.importorskip("transformers")
    plan = zs.plan(case.model, ranks=1, separate=True, **case.settings(str(tmp_path)))
    grown, left = predictions.measure_device(case, str(tmp_path), STEPS)
    assert plan.peak(Tier.DEVICE) == pytest.approx(grown, rel=0.05)
    assert left < 0.05 * grown
