"""Memory for direct I/O: aligned, exact in size, and pinned where there is a device."""

import pytest
import torch

from zeroshard.io import ALIGN, empty_aligned


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
