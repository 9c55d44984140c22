"""On one CUDA device, world 1 over NCCL: the same numbers as plain PyTorch, memory as the report says.

Skipped where there is no GPU (conftest.py does that for the marker): nothing here has a stand-in on the CPU (the stream order has: test_ordered_comm.py).
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.gpu
CONFIG = GPTConfig(vocab_size=256, seq_len=64, dim=64, layers=3, heads=4)


@pytest.fixture(scope="module")
def group():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).cuda()


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (2, 64), generator=generator).cuda() for _ in range(4)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_fp32_equals_plain_pytorch(group, stage: int, overlap: bool) -> None:
    """World 1 changes no order of additions, so parameters differ by the optimizer's kernels at most."""
    plain = _model()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model = _model()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=stage, overlap=overlap)
    for batch in _batches():
        plain(batch, batch).backward()
        reference.step()
        reference.zero_grad()
        model(batch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in zs.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains(group, precision: str) -> None:
    """The loss on one repeated batch falls; masters are fp32."""
    model = _model()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-3), stage=3, precision=precision)
    batch = _batches()[0]
    losses = []
    for _ in range(20):
        loss = model(batch, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(v.dtype == torch.float32 for v in zs.full_state_dict(model, masters=True).values())


def test_overlap_off_and_on_are_equal_bit_for_bit(group) -> None:
    """C15: 50 steps with prefetch and side streams equal 50 steps with a wait after every transfer."""
    results = []
    for overlap in (True, False):
        model = _model()
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=3, overlap=overlap)
        for step in range(50):
            batch = _batches()[step % 4]
            model(batch, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(zs.full_state_dict(model))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_memory_at_rest_is_what_the_report_says(group) -> None:
    """Allocated bytes after a step are within 10% (or 2 MiB of allocator rounding) of the report's total."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = _model()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    model(_batches()[0], _batches()[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    held = torch.cuda.memory_allocated() - before
    report = zs.report(model)
    planned = sum(report.at_rest.values()) + sum(report.peak[name] for name in ("staging",))
    assert abs(held - planned) < max(0.1 * planned, 2 << 20)
