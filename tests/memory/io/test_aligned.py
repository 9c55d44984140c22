"""Memory for direct I/O: aligned, exact in size, and pinned where there is a device."""

import pytest
import torch

from zeroshard.tiers.io import ALIGN, empty_aligned
from zeroshard.utils.aligned import way_mark


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 65535, 65536, 1_000_003, 5 << 20])
def test_memory_for_direct_io_is_aligned_and_exact_in_size(nbytes):
    memory = empty_aligned(nbytes)
    assert memory.shape == (nbytes,) and memory.dtype == torch.uint8 and memory.is_contiguous()
    assert memory.data_ptr() % ALIGN == 0
    memory.fill_(7)
    assert memory.untyped_storage().nbytes() <= nbytes + ALIGN  # B23: not rounded to a power of two


@pytest.mark.gpu
def test_b23_pinned_memory_is_exact_in_size_and_usable_for_copies():
    memory = empty_aligned(3_000_001, pin=True)
    assert memory.is_pinned() and memory.data_ptr() % ALIGN == 0
    assert memory.untyped_storage().nbytes() <= 1.02 * 3_000_001
    memory.random_(0, 256)
    device = torch.empty_like(memory, device="cuda").copy_(memory, non_blocking=True)
    assert torch.equal(device.cpu(), memory)


def test_large_tensors_that_are_walked_through_in_step_do_not_share_a_way():
    kept = [empty_aligned(64 << 20) for _ in range(20)]  # of address space: mapped one behind the other, never touched
    marks = [way_mark(memory.data_ptr()) for memory in kept]
    assert all(len(set(marks[begin : begin + 8])) == 8 for begin in range(len(marks) - 7))
    assert all(memory.data_ptr() % ALIGN == 0 and memory.nbytes == 64 << 20 for memory in kept)
    assert [memory.untyped_storage().nbytes() for memory in kept] == [64 << 20] * 20


@pytest.mark.parametrize(("low", "high"), [(12, 27), (15, 20), (19, 24)])
def test_ways_are_told_apart_as_the_processor_does(low, high):
    """Measured: two bits of a pair together change nothing, and one of them alone does; nor do those from 28 on, below 12."""
    address = 0x7F6029000000
    assert way_mark(address ^ (1 << low) ^ (1 << high)) == way_mark(address) != way_mark(address ^ (1 << low))
    assert way_mark(address + 4095 + (3 << 28)) == way_mark(address)
