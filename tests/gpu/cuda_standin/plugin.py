"""The stand-in for pytest, `-p cuda_standin.plugin`: a test with a fault of order fails, with the lines that led to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cuda_standin

SHOWN = 12  #: faults of a test


@pytest.fixture(autouse=True)
def no_faults_of_order() -> Iterator[None]:
    cuda_standin.errors()
    yield
    found = cuda_standin.errors()
    assert not found, f"{len(found)} faults of order:\n" + "\n".join(dict.fromkeys(found[:SHOWN]))
