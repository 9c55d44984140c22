"""Several ranks train as one process does, while released and new memory holds NaN: all GPUs over NCCL, two processes over gloo.

On the stand-in for a GPU: cuda_standin/ranks.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from several_ranks import equal_one_process


@pytest.mark.gpu
@pytest.mark.limit(600)
def test_all_gpus_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2 or "cuda_standin" in sys.modules:
        pytest.skip("needs two GPUs")  # one: test_gpu.py; none: below
    assert equal_one_process(torch.cuda.device_count(), tmp_path)


@pytest.mark.night  # a minute; test_equivalence.py has the same without NaN
@pytest.mark.processes
def test_two_processes_over_gloo(tmp_path: Path) -> None:
    assert equal_one_process(2, tmp_path, device="cpu")
