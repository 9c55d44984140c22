"""On one CUDA device, world 1 over NCCL: the same numbers as plain PyTorch, memory as the report says.

Skipped where there is no GPU (conftest.py does that for the marker): nothing here has a stand-in on the CPU (the stream order has: test_ordered_comm.py).
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zeroshard as zs
from zeroshard.activations.causal import LAST_QUERIES
from zeroshard.engine.runtime import runtime_of
from zeroshard.planner.models.gpt import GPT, GPTConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
CONFIG = GPTConfig(vocab_size=256, seq_len=64, dim=64, layers=3, heads=4)


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).cuda()


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (2, 64), generator=generator).cuda() for _ in range(4)]


def test_a_process_without_a_group_trains_in_no_more_memory() -> None:
    """One GPU, no process group: buffers that peers would have to open are not made."""
    assert not dist.is_initialized()  # it stands before those that need one
    model = _model()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=2)
    _close(_train(model, optimizer), _plain())
    pool = runtime_of(model).tiers.pools[0]
    assert len(pool._buffers) <= pool.count


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


def _check_loss_falls(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """On one batch, again and again."""
    batch, losses = _batches()[0], []
    for _ in range(20):
        loss = model(batch, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains(group, precision: str) -> None:
    """The loss on one repeated batch falls; masters are fp32."""
    model = _model()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-3), stage=3, precision=precision)
    _check_loss_falls(model, optimizer)
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


def _train(model, optimizer, steps: int = 4, clip: bool = False) -> torch.nn.Module:
    for batch in _batches()[:steps]:
        model(batch, batch).backward()
        if clip:
            zs.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _plain(steps: int = 4, **options) -> dict[str, torch.Tensor]:
    model = _model()
    _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options), steps)
    return model.state_dict()


def _close(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in zs.full_state_dict(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


TIERS = {
    "states on the host": {"offload_optimizer": "cpu"},
    "gradients too": {"offload_optimizer": "cpu", "offload_gradient": "cpu"},
    "everything on the host": {"offload_optimizer": "cpu", "offload_gradient": "cpu", "offload_param": "cpu"},
    "half of the states": {"offload_optimizer": zs.Offload("cpu", ratio=0.5)},
    "states on disk": {"offload_optimizer": "nvme"},
    "everything on disk": {"offload_optimizer": "nvme", "offload_gradient": "nvme", "offload_param": "nvme"},
}


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_tiers_equal_plain_pytorch(group, tiers: dict, tmp_path) -> None:
    """The host steps with its own kernels: equal within rounding. What was read must be what was written."""
    model = _model()
    model, optimizer = zs.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=3, offload_path=str(tmp_path), **tiers
    )
    _close(_train(model, optimizer), _plain())
    zs.close(model)


def test_parameters_on_the_host_can_be_written_right_after_a_forward(group) -> None:
    """Copies to the device that are still queued read what was there before."""
    model = _model()
    model, _ = zs.shard(model, None, stage=3, offload_param="cpu")
    batch = _batches()[0]
    with torch.no_grad():
        before = model(batch, batch).item()
        again = model(batch, batch)
        for param in model.parameters():
            param.zero_()
        assert again.item() == before and model(batch, batch).item() != before


def test_delayed_updates_train(group) -> None:
    model = _model()
    model, optimizer = zs.shard(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), stage=2, offload_optimizer="cpu", delayed_update=2
    )
    _check_loss_falls(model, optimizer)


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_activation_checkpoints_equal_plain_pytorch(group, offload: str, tmp_path) -> None:
    model = _model()
    zs.checkpoint_activations(model, offload=offload, path=str(tmp_path) if offload == "nvme" else None, min_numel=1)
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=3)
    _close(_train(model, optimizer), _plain())


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {}], ids=["fused", "capturable", "foreach"])
@pytest.mark.parametrize("tiers", [{}, {"offload_optimizer": "cpu"}], ids=["device", "host"])
def test_a_checkpoint_continues_as_if_nothing_had_been(group, options: dict, tiers: dict, tmp_path) -> None:
    """Counters of steps go to where the optimizer wants them, whichever device they come from."""

    def build():
        model = _model()
        return zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3, **({} if tiers else options)), stage=3, **tiers)

    model, optimizer = build()
    _train(model, optimizer, 2)
    save = zs.save(tmp_path, model, optimizer, asynchronous=True)
    _train(model, optimizer, 2)  # meanwhile the state is copied from the device
    save.wait()
    resumed, stepper = build()
    zs.load(tmp_path, resumed, stepper)
    _train(resumed, stepper, 2)
    expected = zs.full_state_dict(model)
    for name, value in zs.full_state_dict(resumed).items():
        assert torch.equal(value, expected[name]), name
    zs.load(tmp_path, model, optimizer)  # through the pinned buffers of the save, over the states that there are
    _train(model, optimizer, 2)
    for name, value in zs.full_state_dict(model).items():
        assert torch.equal(value, expected[name]), name


def test_accumulation_and_clipping_equal_plain_pytorch(group) -> None:
    plain, batches = _model(), _batches()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model = _model()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=2)
    for first, second in (batches[:2], batches[2:]):
        for batch in (first, second):
            (plain(batch, batch) / 2).backward()
        with zs.accumulate(model):
            (model(first, first) / 2).backward()
        (model(second, second) / 2).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(float(zs.clip_grad_norm_(model, 0.1)), expected.item(), rtol=1e-4, atol=1e-6)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    _close(model, plain.state_dict())


def _held(model: torch.nn.Module) -> float:
    """Bytes that a report plans at rest."""
    report = zs.report(model)
    return sum(report.at_rest.values()) + report.peak["staging"]


def test_memory_at_rest_is_what_the_report_says(group) -> None:
    """Allocated bytes after a step are within 10% (or 2 MiB of allocator rounding) of the report's total.

    A step of another model before: libraries take workspaces, and other tests' models go.
    """
    _train(_model(), torch.optim.AdamW(_model().parameters()), 1)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = GPT(GPTConfig(vocab_size=256, seq_len=64, dim=256, layers=8, heads=4)).cuda()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    seen = []
    gc.disable()  # what only a collector would free is a leak
    try:
        for _ in range(10):
            _train(model, optimizer, 1)
            torch.cuda.synchronize()
            seen.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert max(seen[2:]) - min(seen[2:]) < 1 << 20, seen
    assert abs(seen[-1] - before - _held(model)) < max(0.1 * _held(model), 2 << 20)
    pool = runtime_of(model).tiers.pools[0]
    assert len(pool._buffers) <= pool.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv", [4, 2])
def test_the_last_queries_see_what_a_mask_would_show_them(kv: int, dtype: torch.dtype) -> None:
    """As an axis sp with more ranks than heads computes causal attention; flash and memory-efficient kernels, grouped queries."""
    torch.manual_seed(0)
    shapes = ((2, 4, 128, 64), (2, kv, 320, 64), (2, kv, 320, 64))
    inputs = [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]
    mask = torch.ones(128, 320, dtype=torch.bool, device="cuda").tril(192)
    outs = [F.scaled_dot_product_attention(*inputs, given, enable_gqa=True) for given in (LAST_QUERIES, mask)]
    close = {"rtol": 0, "atol": 3e-2 if dtype == torch.bfloat16 else 1e-4}
    torch.testing.assert_close(*outs, **close)
    for pair in zip(*(torch.autograd.grad(out.sum(), inputs) for out in outs), strict=True):
        torch.testing.assert_close(*pair, **close)
