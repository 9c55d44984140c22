"""What ranks with devices of their own do, tried without one: collectives in one order, sums beside, memory that is let go."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import OddGPT, adamw, differences, seeded, token_batches
from recording_streams import RecordingStreams
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.diagnostics.status_server import JudgingDesk
from zeroshard.engine import reduction
from zeroshard.engine.comm.process_group import DistComm, _Collected, backend_for, talking_device
from zeroshard.engine.runtime import runtime_of
from zeroshard.engine.unit import Phase
from zeroshard.state.state_loading import SavedState, scalars_for

CPU = torch.device("cpu")


@pytest.fixture
def group():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ordered(waits_on_host: bool = True) -> DistComm:
    comm = DistComm(None, CPU, 30.0, ordered=True, streams=RecordingStreams(), desk=JudgingDesk())
    comm.waits_on_host = waits_on_host
    return comm


def trained(model, optimizer, steps=3, after=lambda: None):
    for batch in token_batches(steps, 1, 1)[:steps]:
        model(*batch[0][0]).backward()
        after()
        optimizer.step()
        optimizer.zero_grad()
    return model


def built(**options):
    model = seeded(OddGPT)
    return zs.shard(model, adamw(model.parameters()), **options)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_reduction_lets_go_of_what_it_received(in_order, group):
    """Also while the cyclic collector sleeps: what is received is as large as the whole gradient."""
    model, optimizer = built(stage=2, comm=ordered() if in_order else DistComm(None, CPU, 30.0, desk=JudgingDesk()))
    seen = []

    def look() -> None:
        sums = [each for each in gc.get_objects() if type(each) is _Collected]
        seen.append([each for each in sums if each.compute is not None or each.works])

    gc.collect()
    gc.disable()
    try:
        trained(model, optimizer, 3, look)
    finally:
        gc.enable()
    assert seen == [[], [], []]


@pytest.mark.parametrize("stage", [1, 3])
def test_reductions_do_not_wait_for_the_end_of_the_first_backward(stage, group):
    """Then no more buffers come to life than are to go round, and later steps reduce in the order of the first."""
    model, optimizer = built(stage=stage, comm=ordered(waits_on_host=False))
    runtime = runtime_of(model)
    assert len(runtime.units) > runtime.tiers.pools[0].count
    trained(model, optimizer)
    assert len(runtime.tiers.pools[0]._buffers) == runtime.tiers.pools[0].count
    plain = seeded(OddGPT)
    for name, value in trained(plain, adamw(plain.parameters())).state_dict().items():
        torch.testing.assert_close(zs.full_state_dict(model)[name], value, rtol=1e-5, atol=1e-6)


def test_one_process_makes_no_buffers_that_it_does_not_need():
    model, _ = built(stage=2)
    pool = runtime_of(model).tiers.pools[0]
    assert len(pool._buffers) == pool.count < len(runtime_of(model).units)


def test_without_overlap_the_streams_wait_and_not_the_host(group, monkeypatch):
    def asleep(seconds):
        raise AssertionError("the host waits for a device")

    monkeypatch.setattr(reduction.time, "sleep", asleep)
    model, optimizer = built(stage=2, comm=ordered(waits_on_host=False), overlap=False)
    trained(model, optimizer)


class Ladder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, depth: int) -> Tensor:
        for block in self.blocks[:depth]:
            x = x + block(x).mean()
        return x.mean()


@pytest.mark.parametrize("closing", [False, True])
def test_what_is_gathered_ahead_can_be_looked_at(closing, group):
    """A forward that ends early leaves the next unit under way."""
    plain, x = seeded(Ladder), torch.arange(5.0)
    model, _ = zs.shard(seeded(Ladder), None, stage=3, comm=ordered())
    with torch.no_grad():
        for depth in (4, 2):
            assert torch.equal(model(x, depth), plain(x, depth))
        assert any(unit.phase is Phase.GATHERING for unit in runtime_of(model).units)
        found = zs.close(model).state_dict() if closing else zs.full_state_dict(model)
        assert not differences(found, plain.state_dict())
        assert torch.equal(model(x, 4), plain(x, 4))


def test_a_group_that_can_not_send_what_lies_on_the_device_is_refused(group):
    assert backend_for(CPU) == "gloo"
    with pytest.raises(zs.ConfigError, match=r"on cuda:0, but the process group has cpu:gloo.*init_process_group\('nccl'\)"):
        backend_for(torch.device("cuda:0"))


@pytest.mark.parametrize(
    "options, on_device", [({"fused": True}, True), ({"capturable": True}, True), ({"fused": None}, False), ({}, False)]
)
def test_counters_go_where_the_step_wants_them(options, on_device):
    """torch.optim's own load_state_dict does the same; a fused kernel takes a counter on the host for one on its device."""
    saved = SavedState(scalars={"step": torch.tensor(3.0), "mu_product": torch.tensor(0.5), "name": "x"})
    run = SimpleNamespace(tensor=torch.empty(4, device="meta"), mark=lambda value: value)
    found = scalars_for(run, options, saved)
    assert found["step"].device.type == ("meta" if on_device else "cpu") and found["mu_product"].is_meta and found["name"] == "x"
    on_host = scalars_for(SimpleNamespace(tensor=None, mark=lambda value: value), options, saved)
    assert on_host["step"] == 3 and on_host["step"] is not saved.scalars["step"] and not on_host["mu_product"].is_meta


@pytest.mark.parametrize(
    "tiers", [{}, dict.fromkeys(("offload_optimizer", "offload_gradient", "offload_param"), "nvme")], ids=["memory", "disk"]
)
@pytest.mark.parametrize("over_gloo", [True, False], ids=["dist", "shared"])
def test_a_default_device_is_for_the_users_tensors(tiers, over_gloo, group, tmp_path):
    """torch.set_default_device("cuda") must not reach this library's host memory. Here "meta", where nothing can be read."""
    options = tiers | {
        "stage": 3,
        "offload_path": str(tmp_path),
        "comm": DistComm(None, CPU, 30.0, desk=JudgingDesk()) if over_gloo else "shared",
    }

    def make():
        model = seeded(OddGPT)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)  # other AdamWs put their own step there

    made = [make() for _ in range(3)]
    batches = token_batches(2, 1, 1)
    for batch in batches:
        made[0][0](*batch[0][0]).backward()
        made[0][1].step()
        made[0][1].zero_grad()
    with torch.device("meta"):
        sharded, optimizer = zs.shard(*made[1], **options)
        for step, batch in enumerate(batches):
            sharded(*batch[0][0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                zs.save(tmp_path / "saved", sharded, optimizer)
        resumed, other = zs.shard(*made[2], **options)
        zs.load(tmp_path / "saved", resumed, other)
        resumed(*batches[1][0][0]).backward()
        other.step()
        for model in (sharded, resumed):
            for name, value in zs.full_state_dict(model).items():
                torch.testing.assert_close(value, made[0][0].state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)
        assert list(zs.ShardedSampler(5, seed=1))
    zs.close(sharded)
    zs.close(resumed)


@pytest.mark.parametrize(
    ("backends", "expected"), [("cuda:nccl", "cuda:1"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo", "cpu")]
)  # fmt: skip
def test_what_is_born_on_the_host_is_talked_of_where_the_group_can(monkeypatch, backends, expected):
    """zs.init() under NCCL alone: the parameters are on the host until they are moved, the messages are not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    assert talking_device(torch.device("cpu")) == torch.device(expected)
    assert talking_device(torch.device("meta")) == torch.device("meta")
