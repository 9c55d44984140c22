"""The forecast: what it counts, what it makes of that, and that training does not notice it."""

from __future__ import annotations

import copy
import dataclasses
import os

import pytest
import torch
from helpers import OddGPT, seeded, token_batches
from torch import nn

import zeroshard as zs
from zeroshard import seam
from zeroshard.config import Tier
from zeroshard.engine.runtime import runtime_of
from zeroshard.planner.measure import forecast as module
from zeroshard.planner.measure import probe
from zeroshard.planner.measure.forecast import DISK, DISK_BESIDE, HOST_STEP, Forecast, _predict, _Work, forecast
from zeroshard.seam import engine_of
from zeroshard.testing import run_threads
from zeroshard.tiers import cpu_kernels, rehearsal, slab_step

BATCHES = token_batches(3, 2, 2)
NVME = {"stage": 3, "offload_optimizer": "nvme", "offload_gradient": "nvme", "offload_param": "nvme"}
FORM = zs.StateFormat("int8", block=64, min_numel=100)
CODED = {"precision": "bf16", "master_weights": "split", "optimizer_states": FORM}
MODES = {
    "no offload": {"stage": 2},
    "cpu": {"stage": 2, "offload_optimizer": "cpu", "precision": "bf16"},
    "late": {"stage": 2, "offload_optimizer": "cpu", "delayed_update": 1},
    "nvme": {"stage": 1, "offload_optimizer": "nvme"},
    "all on nvme": {**NVME, "precision": "bf16"},
    "param": {"stage": 3, "offload_param": "nvme"},
    "fp16": {"stage": 3, "offload_optimizer": "cpu", "precision": "fp16"},
    "coded": {"stage": 2, **CODED},
    "coded, replicated": {"stage": 0, "optimizer_states": FORM},
    "coded at random, cpu": {
        "stage": 2,
        "offload_optimizer": "cpu",
        "optimizer_states": dataclasses.replace(FORM, stochastic_rounding=True),
    },
    "coded, nvme": {"stage": 3, "offload_optimizer": "nvme", **CODED},
}


@pytest.fixture(autouse=True)
def short_probes(monkeypatch):
    for measured in (probe, rehearsal):
        monkeypatch.setattr(measured, "_PROBE_S", 0.02)
    monkeypatch.setattr(rehearsal, "_NUMEL", 1 << 16)
    monkeypatch.setattr(probe, "_BLOCK_NBYTES", 1 << 16)


class Noisy(OddGPT):
    """With dropout, and a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.norm = nn.Sequential(self.norm, nn.Dropout(0.2))

    def forward(self, tokens, targets):
        self.calls += 1
        return super().forward(tokens, targets)


QUIET, NOISY = seeded(OddGPT), seeded(Noisy)  # threads share the generator that dropout draws from


def run(rank, options, asked=(), model=QUIET):
    """Losses and states of a run, with a forecast before the steps in `asked`; these."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zs.shard(model, optimizer, max_grad_norm=1.0, **options)
    losses, forecasts = [], []
    for step, micros in enumerate(BATCHES):
        if step in asked:
            before = torch.get_rng_state()
            forecasts.append(forecast(model, lambda: model(*BATCHES[0][0][rank]), accumulate=step + 1))
            assert torch.equal(torch.get_rng_state(), before)
            assert all(param.grad is None for param in model.parameters())
        for micro in micros:
            loss = model(*micro[rank])
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    result = losses, zs.full_state_dict(model, masters=True), zs.full_optimizer_state(model), forecasts
    zs.close(model, restore=False)
    return result


def assert_same(got, expected):
    assert got[0] == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(got[1][name], value), name
    for name, state in expected[2].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(got[2][name][key]), torch.as_tensor(value)), (name, key)


@pytest.mark.parametrize("mode", MODES)
def test_training_goes_on_as_if_nobody_had_asked(mode, tmp_path):
    options = MODES[mode] | ({"offload_path": str(tmp_path)} if "nvme" in MODES[mode].values() else {})
    expected = run_threads(2, run, options)
    for got, wanted in zip(run_threads(2, run, options, (0, 2)), expected, strict=True):
        assert_same(got, wanted)
        for given in got[3]:
            assert given.step_seconds >= given.seconds["forward and backward"] > 0
            assert given.bound in given.seconds
    assert os.listdir(tmp_path) == []


def test_random_state_and_buffers_come_back():
    options = {"stage": 2, "offload_optimizer": "cpu"}
    runs = []
    for asked in ((), (0, 1)):
        torch.manual_seed(5)
        runs.append(run_threads(1, run, options, asked, NOISY)[0])
    assert_same(*runs)
    assert runs[0][1]["calls"] == 6


def test_all_ranks_are_told_the_same_with_what_was_measured(tmp_path):
    options = {**NVME, "offload_path": str(tmp_path)}
    first, second = (result[3][0] for result in run_threads(2, run, options, (0,)))
    assert first == second
    assert set(first.rates) == {DISK, DISK_BESIDE, HOST_STEP}
    for word in ("disk", "GB/s", "G parameters/s", "a step takes", f"bound by {first.bound}"):
        assert word in str(first)
    cpu = run_threads(2, run, {"stage": 2, "offload_optimizer": "cpu"}, (0,))[0][3][0]
    assert set(cpu.rates) == {HOST_STEP}


SEPARATE = {"stage": 2, "offload_optimizer": "cpu", "precision": "bf16", "max_grad_norm": 1.0}
REHEARSED = {
    "bf16 arrives": (SEPARATE, True, 1),
    "bf16 is added in fp32": (SEPARATE, True, 2),
    "its own class": ({**SEPARATE, "offload_optimizer": {"device": "cpu", "fused": False}}, True, 1),
    "the device is the host": ({**SEPARATE, "offload_optimizer": {"device": "cpu", "fused": True}}, False, 1),
    "coded on the device": ({"stage": 2, "max_grad_norm": 1.0, **CODED}, False, 1),
}


@pytest.mark.parametrize("name", REHEARSED)
def test_what_is_measured_is_the_step_that_runs(name, monkeypatch, strict_device):
    """Gradients of the same dtype, scaled where they will be, by the same threads."""
    options, separate, accumulate = REHEARSED[name]
    seen: dict[str, set] = {"rehearsed": set(), "run": set()}

    def watch(place, owner, attribute, gradient_of, factor_of):
        plain = getattr(owner, attribute)

        def call(*args, **kwargs):
            team = kwargs.get("team")
            seen[place].add((
                gradient_of(args).dtype, factor_of(args, kwargs) == 1.0, torch.get_num_threads(), team and team.threads,
            ))  # fmt: skip
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, call)

    for place, owner in (("rehearsed", rehearsal), ("run", slab_step)):
        watch(place, owner, "step_stretch", lambda args: args[2], lambda args, kwargs: kwargs["scale"])
    watch("rehearsed", rehearsal.Rehearsal, "_step_class", lambda args: args[2], lambda args, kwargs: args[0].factor)
    watch("run", slab_step.SlabStepper, "_step_class", lambda args: args[3], lambda args, kwargs: args[1].factor)

    monkeypatch.setattr(seam, "copy_rates", lambda tiers: (1e9, 1e9))  # strict devices copy no bytes

    def rank_run(rank: int) -> str:
        strict_device(rank, separate)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.setattr(cpu_kernels, "visible_cores", lambda: 3)
        model = copy.deepcopy(QUIET)
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
        told = forecast(model, lambda: model(*BATCHES[0][0][0]), accumulate=accumulate)
        for micro in range(accumulate):
            model(*BATCHES[0][micro][0]).backward()
        zs.clip_grad_norm_(model, 1e-3)
        optimizer.step()
        zs.close(model, restore=False)
        return str(told)

    (text,) = run_threads(1, rank_run)
    assert seen["rehearsed"] == seen["run"] and len(seen["run"]) == 1, seen
    assert ("(3 threads a rank, 3 cores)" if separate else "(1 thread a rank, 3 cores)") in text, text


# -- the arithmetic ----------------------------------------------------------------------------------------------------


def counted(rank, options):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))  # 4 units of 4096
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = zs.shard(model, optimizer, **options)
    work = _Work.of(engine_of(model).snapshot(), 2)
    zs.close(model, restore=False)
    return work


def test_the_bytes_of_a_step_are_counted(tmp_path):
    numel = 4 * 4096 // 2
    path = {"offload_path": str(tmp_path)}
    work = run_threads(2, counted, {"stage": 3, "precision": "bf16", "offload_optimizer": "nvme", **path})[0]
    assert (work.stepped_numel, work.reads, work.writes) == (numel, 12 * numel, 12 * numel)  # gradients on the host
    assert (work.waited, work.passing, work.room) == (0, 0, 12 * numel + 12 * 2048)  # all read ahead, one written behind
    work = run_threads(2, counted, {**NVME, "precision": "bf16", **path})[0]
    assert (work.reads, work.writes) == ((12 + 4) * numel, (12 + 2) * numel)
    assert (work.passing, work.room) == (2 * (2 * 2 + 4) * numel, 0)  # two micro-batches: parameters twice, gradients
    work = run_threads(2, counted, {"stage": 3, "offload_param": "nvme", **path})[0]
    assert (work.reads, work.writes, work.waited) == (0, 0, 4 * numel)  # stepped on the device, then stored
    assert run_threads(2, counted, {"stage": 2, "offload_optimizer": "cpu"})[0] == _Work(stepped_numel=numel)
    coded = {"precision": "bf16", "optimizer_states": "int8", "master_weights": "split"}
    assert run_threads(2, counted, {"stage": 2, **coded})[0] == _Work(stepped_numel=numel)
    work = run_threads(2, counted, {"stage": 3, "offload_optimizer": "nvme", **coded, **path})[0]
    kept = 2 * 260 / 256 + 2  # bytes of an element: two states in blocks of 256 with a scale, the lower half of a master
    assert (work.reads, work.writes, work.room) == (kept * numel, kept * numel, kept * (numel + 2048))
    work = run_threads(2, counted, {**NVME, **coded, **path})[0]
    assert (work.reads, work.writes) == ((kept + 4 + 2) * numel, (kept + 2) * numel)  # gradients; parameters are upper halves


def predicted(work, rates, compute_s, **options):
    def body(rank):
        model, _ = zs.shard(nn.Linear(2, 2), None, stage=3)
        runtime = runtime_of(model)
        if options:
            runtime.config = zs.Config(stage=3, offload_optimizer="cpu", **options)
        return _predict(engine_of(model).snapshot(), work, rates, compute_s)

    return run_threads(1, body)[0]


def test_what_a_step_takes_by_hand(monkeypatch):
    rates = {HOST_STEP: 100.0, DISK: 10.0, DISK_BESIDE: 8.0}
    seconds, step_s = predicted(_Work(stepped_numel=300), {HOST_STEP: 100.0}, 2.0)
    assert step_s == 5.0 and seconds["host step"] == 3.0
    # 3 s of stepping hide 24 bytes; nothing is hidden by forward and backward
    assert predicted(_Work(stepped_numel=300, reads=12, writes=12), rates, 2.0)[1] == 5.0
    assert predicted(_Work(stepped_numel=300, reads=42, writes=32), rates, 2.0)[1] == 2.0 + 3.0 + 50 / 10
    # forward and backward hide what buffers hold, as far as the disk is idle
    assert predicted(_Work(stepped_numel=300, reads=42, writes=32, room=10), rates, 2.0)[1] == 2.0 + 3.0 + 40 / 10
    assert predicted(_Work(stepped_numel=300, reads=42, writes=32, room=50), rates, 2.0)[1] == 2.0 + 3.0 + 34 / 10
    assert predicted(_Work(stepped_numel=300, reads=42, writes=32, room=50, passing=8), rates, 2.0)[1] == 2.0 + 3.0 + 42 / 10
    # what is stepped on the device waits
    seconds, step_s = predicted(_Work(stepped_numel=300, waited=20), rates, 2.0)
    assert step_s == 2.0 + 3.0 + 2.0 and seconds["disk"] == 2.0
    # a device of its own: copies pass beside the step
    link = (Tier.HOST, Tier.DEVICE)
    assert predicted(_Work(stepped_numel=300, copied={link: 40}), {**rates, "host -> device": 10.0}, 2.0)[1] == 6.0
    # late: beside each other where there are cores for both
    for spare, expected in ((True, 3.0), (False, 5.0)):
        monkeypatch.setattr(module, "_cores_to_spare", lambda snapshot, spare=spare: spare)
        assert predicted(_Work(stepped_numel=300), rates, 2.0, delayed_update=0)[1] == expected
        assert predicted(_Work(stepped_numel=300, reads=80), rates, 2.0, delayed_update=0)[1] == max(
            expected, expected + (80 - expected * 8) / 10
        )


def test_it_is_shown_in_one_line():
    rates, seconds = {HOST_STEP: 2.5e8, "disk": 1.5e9}, {"disk": 2.0, "host step": 0.5}
    text = str(Forecast(rates, seconds, 3.25, "disk", "2 threads a rank, 4 cores"))
    assert text == (
        "measured on each rank: host step 0.25 G parameters/s (2 threads a rank, 4 cores), disk 1.50 GB/s; a step takes 3.25 s "
        "(disk 2.00 s, host step 0.50 s), bound by disk"
    )
