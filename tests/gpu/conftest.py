"""What tests on a GPU share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from poison import poisoned_memory

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products, read when cuBLAS starts


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Gathered memory that is released, and memory of torch.empty, holds NaN."""
    with poisoned_memory():
        yield
