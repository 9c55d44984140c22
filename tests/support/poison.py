"""Memory with nothing in it reads as NaN: what takes a value too early, or too late, shows in every number that follows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from zeroshard.engine.flat_buffer import ParameterBuffer


@contextmanager
def poisoned_memory() -> Iterator[list[str]]:
    """Context in which gathered memory is filled with NaN before its release, and torch.empty gives NaN. Yields what was released.

    An allocator that hands the same memory out again would show the old values there, which are the right ones until the next step.
    """
    release, released = ParameterBuffer.release, list[str]()

    def poison(buffer: ParameterBuffer) -> None:
        if buffer._present and buffer.full.is_floating_point():
            buffer.full.data.fill_(math.nan)
            released.append(buffer.label)
        release(buffer)

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then gives NaN
    try:
        with mock.patch.object(ParameterBuffer, "release", poison):
            yield released
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
