"""Offload moves model states to the host and to disk and back, and changes no bit of what a run computes.

Every run here is compared with the same run without offload, which the other tests hold equal to one process: losses,
norms, gradients, (master) weights and optimizer states are the same bits. Here: ranks and devices that share no memory,
reading and writing what rests elsewhere, and birth; where states may rest is in test_tiers_placements.py, what else may
be chosen in test_tiers_options.py.

Ranks are threads that share their memory, ranks that share none (test_private_memory.py), and ranks whose device has a
memory of its own (offloading.py).
"""

import copy
import itertools
import threading

import pytest
import torch
from helpers import (
    OddGPT,
    Outcome,
    Task,
    adamw,
    assert_equal_runs,
    differences,
    reference,
    seeded,
    token_batches,
    train,
)
from offloading import (
    DATA,
    DEVICES,
    MODEL,
    TASK,
    TINY,
    StrictStreams,
    assert_same,
    assert_same_log,
    plain_loop,
    tiers,
)
from private_ranks import PostOffice, PrivateComm
from safetensors.torch import save_file
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads
from zeroshard.tiers import host_step as offloaded_step
from zeroshard.tiers.gradient_offload import GradientOffload
from zeroshard.tiers.pool import BufferPool
from zeroshard.tiers.storage import FurtherTiers

# -- ranks that do not share memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "tagged"])
@pytest.mark.parametrize("own_device", [False, True])
def test_ranks_that_share_no_memory(own_device, ordered, disk, strict_device):
    """Gathers ahead of use, and (ordered) the same collectives in the same order, though disks differ in speed."""
    places = [(p, DEVICES[(i + j) % 3], DEVICES[j]) for i, p in enumerate(DEVICES) for j in range(3)]  # each two together
    cells = [(3, *place, budget) for place, budget in zip(places[1:], itertools.cycle([0, 20_000, 1 << 30, 0]), strict=False)]
    office = PostOffice()

    def rank_run(rank: int) -> list:
        comm = PrivateComm(office, rank, 2, ordered)
        expected = plain_loop(rank, TASK, stage=3, comm=comm)
        if own_device:
            comm.streams = StrictStreams(rank)
        return [
            (expected, plain_loop(
                rank, TASK, stage=3, comm=comm, prefetch_nbytes=budget, **tiers(disk, *devices, **TINY, fused=False)
            ))
            for stage, *devices, budget in cells
        ]  # fmt: skip

    for outcomes in run_threads(2, rank_run):
        for cell, (expected, got) in zip(cells, outcomes, strict=True):
            assert_same(got, expected, f"{cell}")
    assert not office.letters, "sent, but not received"


def test_a_norm_that_only_the_device_knows(disk, strict_device):
    """Reductions on a GPU bring no sum of squares to the host: it is found on the way, or read once with all others."""

    class Silent(PrivateComm):
        def reduce(self, *args, **kwargs):
            work = super().reduce(*args, **kwargs)
            finish = work.finish
            work.finish = lambda: (finish(), None)[1]
            return work

    office = PostOffice()

    def rank_run(rank: int, task: Task) -> list:
        comm = Silent(office, rank, 2, ordered=True)
        comm.streams = StrictStreams(rank)
        places = (("none", "cpu", "cpu"), ("nvme", "nvme", "nvme"), ("none", "none", "cpu"))
        return [train(rank, task, comm=comm, **tiers(disk, *place, **TINY, fused=False)) for place in places]

    for micro in (1, 2):
        task = Task(MODEL, token_batches(2, micro, 2), clip={1: 0.05})
        for outcomes in run_threads(2, rank_run, task):
            for got in outcomes:
                expected = reference(task, 2, coefficients=got.coefficients)
                assert_equal_runs(got, expected)
                assert got.norms == pytest.approx(expected.norms, rel=1e-5)


# -- the strict device's own test: what it is there to notice --------------------------------------------------------


class Unordered:
    """A copy of which the device is not told."""

    def __init__(self, pending) -> None:
        self.wait, self.done, self.join = pending.wait, pending.done, lambda: None


def _without_upload_joins(monkeypatch) -> None:
    plain = offloaded_step.HostStepper._write_back

    def write_back(self, slab):
        plain(self, slab)
        self._uploads.clear()

    monkeypatch.setattr(offloaded_step.HostStepper, "_write_back", write_back)


def _without_fetch_joins(monkeypatch) -> None:
    plain = FurtherTiers.fetch

    def fetch(self, rest, out, wait):
        pending = plain(self, rest, out, wait)
        return None if pending is None else Unordered(pending)

    monkeypatch.setattr(FurtherTiers, "fetch", fetch)


def _without_waits_for_gradients(monkeypatch) -> None:
    monkeypatch.setattr(GradientOffload, "settle", lambda self: setattr(self, "_under_way", None))


def _without_waits_for_reads(monkeypatch) -> None:
    plain = offloaded_step.HostStepper._start

    def start(self, slab, wait):
        begun = plain(self, slab, wait)
        slab.reads.clear()
        return begun

    monkeypatch.setattr(offloaded_step.HostStepper, "_start", start)


def _without_waits_for_buffers(monkeypatch) -> None:
    plain = BufferPool.give
    monkeypatch.setattr(BufferPool, "give", lambda self, buffer, pending=None: plain(self, buffer))


MISTAKES = {
    "stepped parameters are used before they are on the device": (_without_upload_joins, ("none", "cpu", "cpu")),
    "fetched shards are gathered before they are on the device": (_without_fetch_joins, ("cpu", "none", "none")),
    "gradients are stepped with before they are on the host": (_without_waits_for_gradients, ("none", "cpu", "cpu")),
    "gradients are read from the device, not waited for": (_without_waits_for_reads, ("none", "none", "cpu")),
    "a landing buffer is used again before it has been copied": (_without_waits_for_buffers, ("none", "cpu", "cpu")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_strict_device_notices(name, disk, strict_device, monkeypatch):
    mistake, devices = MISTAKES[name]
    task = Task(seeded(lambda: OddGPT(layers=4)), token_batches(2, 1, 2))

    def rank_run(rank: int, strict: bool) -> Outcome:
        strict_device(rank, strict)
        return plain_loop(rank, task, stage=3, **tiers(disk, *(devices if strict else ()), fused=False))

    (expected, *_) = run_threads(2, rank_run, False)
    assert not any(differences(got.weights, expected.weights) for got in run_threads(2, rank_run, True))
    mistake(monkeypatch)
    try:
        found = [differences(got.weights, expected.weights) for got in run_threads(2, rank_run, True)]
    except AssertionError:  # of StrictStreams
        return
    assert any(found)


# -- reading and writing what rests elsewhere ------------------------------------------------------------------------


def touch_everything(rank: int, **options) -> list:
    """Gradients, parameters and states are read and written wherever a user may, and what comes of it."""
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    named, log = dict(model.named_parameters()), []
    weight, bias, gain = named["blocks.0.into.weight"], named["blocks.1.norm.bias"], named["blocks.1.gain"]
    data = iter(token_batches(16, 1, 2))

    def backward() -> None:
        loss = model(*next(data)[0][rank])
        loss.backward()
        log.append(loss.item())

    def step() -> None:
        optimizer.step()
        log.append(optimizer.last_step.grad_norm)
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate() -> None:  # meanwhile states are read ahead for the coming step
        log.append(model(*next(data)[0][rank]).item())

    @torch.no_grad()
    def write(what, *args) -> None:
        what(*args)

    backward()
    step()
    backward()  # gradients
    write(weight.grad.mul_, 0.5)
    gain.grad = gain.grad * 3
    write(bias.grad[2:5].zero_)
    step()
    evaluate()  # parameters
    write(weight.copy_, torch.full(weight.shape, 0.01))
    write(bias[1:3].add_, 0.5)
    evaluate()
    backward()
    zs.clip_grad_norm_(model, 0.1)
    write(weight.grad.mul_, 2.0)  # what rests elsewhere has not been multiplied by the coefficient yet
    log.append(zs.full_gradients(model))
    step()
    evaluate()
    with zs.gathered(model.blocks[1], write=True):
        write(model.blocks[1].out.weight.mul_, 0.5)
    evaluate()
    backward()
    weight.grad = None
    step()
    exp_avg = optimizer.state[weight]["exp_avg"]  # states
    evaluate()
    write(exp_avg.mul_, 0.5)
    backward()
    step()
    log.append(exp_avg.full_tensor())  # as in torch, not a copy of what it was
    optimizer.load_state_dict(optimizer.state_dict())  # from here on every parameter is a run of its own
    backward()
    step()
    evaluate()
    torch.nn.init.trunc_normal_(weight, std=0.1, a=-0.1, b=0.1, generator=torch.Generator().manual_seed(1))
    backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    log += [zs.full_optimizer_state(model), zs.full_state_dict(model), zs.full_state_dict(model, masters=True)]
    zs.close(model)
    return [*log, model.state_dict()]


TOUCHED = {
    2: [("none", "nvme", "cpu")],
    3: [("nvme", "nvme", "nvme"), ("cpu", "cpu", "cpu"), ("nvme", "none", "none"), ("none", "none", "nvme")],
}


@pytest.mark.parametrize("precision, own_device", [("fp32", False), ("bf16", False), ("fp32", True)])
def test_what_rests_elsewhere_can_be_read_and_written(precision, own_device, disk, strict_device):
    def rank_run(rank: int) -> list:
        results = []
        for stage, cells in (TOUCHED if precision == "fp32" else {3: TOUCHED[3][:1]}).items():
            strict_device(rank, False)
            expected = touch_everything(rank, stage=stage, precision=precision)
            strict_device(rank, own_device)
            for devices in cells:
                # checksums: a write that met a read ahead of the same elements would look like a broken disk
                options = tiers(disk, *devices, **TINY, fused=False, checksum=True)
                got = touch_everything(rank, stage=stage, precision=precision, **options)
                results.append((f"stage {stage} {devices}", got, expected))
        return results

    for results in run_threads(2, rank_run):
        for where, got, expected in results:
            assert_same_log(got, expected, where)


# -- birth -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["init", "meta", "weights"])
def test_models_are_born_on_disk(way, precision, disk, tmp_path, strict_device):
    """zs.init, the meta device and streamed weights give the values that the model would have had in memory."""
    options = {"stage": 3, "precision": precision}
    offloaded = tiers(disk, "nvme", "nvme", "nvme", **TINY, fused=False)
    save_file(
        {name: value.clone() for name, value in MODEL.state_dict().items() if name != "head.weight"}, tmp_path / "m.safetensors"
    )
    lock = threading.Lock()

    def born(extra: dict) -> tuple[nn.Module, dict]:
        if way == "init":
            with zs.init(**options, **extra), lock:  # the generator is the process's, not the thread's
                return seeded(lambda: OddGPT(dim=24, layers=2)), {}
        with lock, torch.device("meta"):  # so is the default device
            return OddGPT(dim=24, layers=2), {"weights": tmp_path}

    def rank_run(rank: int, on_disk: bool, own_device: bool) -> tuple:
        strict_device(rank, own_device)
        extra = offloaded if on_disk else {}
        model, given = born(extra) if on_disk else (copy.deepcopy(MODEL), {})
        model, optimizer = zs.shard(model, adamw(model.parameters()), **options, **extra, **given)
        start, losses = zs.full_state_dict(model, masters=True), []
        for micros in DATA:
            loss = model(*micros[0][rank])
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        zs.close(model)
        return start, losses, model.state_dict()

    if way == "meta":  # random values: one rank, as threads share the generator
        build = lambda: nn.Sequential(nn.Linear(40, 50), nn.LayerNorm(50), nn.Embedding(7, 5))  # noqa: E731
        with torch.device("meta"):
            models = build(), build()
        values = []
        for model, extra in zip(models, ({}, offloaded), strict=True):
            seeded(lambda m=model, e=extra: zs.shard(m, None, **options, **e)[0])
            values.append(zs.full_state_dict(model))
            zs.close(model)
        assert not differences(*values) and values[0]["0.weight"].std() > 0.05
        return
    expected = run_threads(2, rank_run, False, False)
    for own_device in (False, True) if precision == "fp32" else (False,):
        for (start, losses, end), wanted in zip(run_threads(2, rank_run, True, own_device), expected, strict=True):
            assert losses == wanted[1]
            assert not differences(start, wanted[0]) and not differences(end, wanted[2])
