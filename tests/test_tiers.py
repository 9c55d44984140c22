"""Offload moves model states to the host and to disk and back, and changes no bit of what a run computes.

    parameters {device, host, disk} x gradients {...} x optimizer states {...}, at stages 1, 2 and 3

Every run here is compared with the same run without offload, which the other tests hold equal to one process: losses,
norms, gradients, (master) weights and optimizer states are the same bits.

Ranks are threads that share their memory, ranks that share none (test_private_memory.py), and ranks whose device has a
memory of its own (offloading.py).
"""

import copy
import functools
import itertools
import math
import random
import threading
from dataclasses import dataclass

import helpers
import pytest
import torch
from helpers import (
    Branches,
    OddGPT,
    Outcome,
    Task,
    assert_equal_runs,
    differences,
    reference,
    seeded,
    state_differences,
    token_batches,
    train,
)
from offloading import LARGE, TINY, StrictStreams, emptied, strict_devices, tiers
from safetensors.torch import save_file
from test_private_memory import PostOffice, PrivateComm
from torch import nn

import zeroshard as zs
from zeroshard.config import Offload, Tier
from zeroshard.memory.departure import Departure
from zeroshard.memory.ledger import GATHERED, MASTERS, OPTIMIZER
from zeroshard.memory.pool import BufferPool
from zeroshard.memory.tiers import Tiers
from zeroshard.optim import kernels, stepping
from zeroshard.runtime import runtime_of
from zeroshard.testing import run_threads

DEVICES = ("none", "cpu", "nvme")
MODEL = seeded(lambda: OddGPT(dim=24, layers=2))


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A folder for swap files. Nothing may remain in it."""
    with emptied(tmp_path_factory.mktemp("disk")) as path:
        yield path


@pytest.fixture
def small_pieces(monkeypatch):
    """Slabs and chunks so small that the models here have many of both."""
    monkeypatch.setattr(stepping, "_SLAB_MULTIPLE", 1024)
    monkeypatch.setattr(stepping, "_CLASS_CHUNK_NUMEL", 512)
    monkeypatch.setattr(kernels, "CHUNK_NUMEL", 512)
    monkeypatch.setattr(stepping, "CHUNK_NUMEL", 512)


def placements(stages=(1, 2, 3)) -> list[tuple[int, str, str, str]]:
    """Every (stage, parameter, gradient, optimizer) that a stage allows."""
    return [
        (stage, *devices)
        for stage in stages
        for devices in itertools.product(DEVICES, repeat=3)
        if (stage == 3 or devices[0] == "none") and (stage >= 2 or devices[1] == "none")
    ]


def assert_same(got: Outcome, expected: Outcome, where: str) -> None:
    assert_equal_runs(got, expected, where)
    assert got.losses == expected.losses, f"{where} losses"
    assert got.norms == expected.norms, f"{where} norms"
    assert got.coefficients == expected.coefficients, f"{where} clip coefficients"


# -- all pairs of choices ----------------------------------------------------------------------------------------

SCALE = 1024.0
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),  # state from birth
    "lion": lambda params: zs.Lion(params, lr=1e-3, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, centered=True),  # has no kernel
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),  # nor this; its scalars are tensors
}


def two_groups(make):
    """Matrices and vectors in groups of their own, with other options."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        vectors = {"params": [p for p in params if p.dim() < 2], "lr": 3e-3}
        return make([{"params": [p for p in params if p.dim() >= 2]}, vectors])

    return build


def frozen_model() -> nn.Module:
    model = OddGPT(dim=32, layers=1)
    model.embedding.requires_grad_(False)  # and with it the head
    model.blocks[0].norm.requires_grad_(False)
    return model


def routes(steps: int, micro: int, ranks: int, ragged: bool) -> list:
    """data[step][micro][rank] for Branches: some branches take no part in a step, on one rank (ragged) or on all."""
    generator = torch.Generator().manual_seed(3)
    chosen = itertools.cycle([(0, 1, 2), (2, 0), (1,), ()])
    data = []
    for _ in range(steps):
        same = [next(chosen) for _ in range(micro)]
        data.append([
            [(torch.randn(3, 24, generator=generator), next(chosen) if ragged else route) for _ in range(ranks)]
            for route in same
        ])  # fmt: skip
    return data


MODELS = {
    "tied": seeded(lambda: OddGPT(dim=32, layers=1)),
    "frozen": seeded(frozen_model),
    "ragged": seeded(lambda: Branches(24)),
    "unused": seeded(lambda: Branches(24)),
}
FACTORS = {
    "world": (2, 3, 1),
    "place": ((3, "nvme"), (3, "cpu"), (3, "none"), (2, "none"), (1, "none")),
    "gradient": DEVICES,
    "optimizer": DEVICES,
    "precision": ("fp32", "bf16", "fp16"),
    "micro": ((2, False), (2, True), (1, False)),  # backwards a step, under zs.accumulate
    "clip": (None, "option", "call"),
    "overlap": (True, False),
    "units": ("auto", "leaf", "model"),
    "buffers": ("tiny", "large"),
    "kind": tuple(OPTIMIZERS),
    "groups": (1, 2),
    "schedule": (None, "early", "late"),
    "model": tuple(MODELS),
}


@dataclass(frozen=True)
class Cell:
    """One combination of FACTORS."""

    world: int
    place: tuple[int, str]
    gradient: str
    optimizer: str
    precision: str
    micro: tuple[int, bool]
    clip: str | None
    overlap: bool
    units: str
    buffers: str
    kind: str
    groups: int
    schedule: str | None
    model: str

    @property
    def allowed(self) -> bool:
        stage, parameter = self.place
        return (stage > 1 or self.gradient == "none") and (self.model != "ragged" or parameter != "nvme")

    def task(self) -> Task:
        micro, local = self.micro
        branches = self.model in ("ragged", "unused")
        data = routes(3, micro, self.world, self.model == "ragged") if branches else token_batches(2, micro, self.world)
        make = OPTIMIZERS[self.kind]
        scheduler = (lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)) if self.schedule else None
        return Task(
            MODELS[self.model], data, two_groups(make) if self.groups == 2 else make, by_model=self.groups == 2,
            local_sums=local, clip={1: 0.05} if self.clip == "call" else {}, scheduler=scheduler,
            early=self.schedule == "early", states=True,
        )  # fmt: skip

    def options(self) -> dict:
        options = {"stage": self.place[0], "precision": self.precision, "overlap": self.overlap, "units": self.units}
        options |= {"max_grad_norm": 0.05} if self.clip == "option" else {}
        return options | ({"loss_scale": SCALE} if self.precision == "fp16" else {})

    def offload(self, disk: str) -> dict:
        buffers = TINY if self.buffers == "tiny" else LARGE
        return tiers(disk, self.place[1], self.gradient, self.optimizer, **buffers)


def pairs_of(row: dict) -> set[tuple]:
    return set(itertools.combinations(row.items(), 2))


@functools.cache
def covering_cells() -> list[Cell]:
    """Cells in which every two choices of different factors meet, if they are allowed to; greedy, always the same."""
    draw = random.Random(7)
    missing = {
        pair for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b] for pair in [((a, x), (b, y))]
    }
    missing = {pair for pair in missing if _can_meet(dict(pair))}
    cells = []
    while missing:
        rows = [_row_around(min(missing, key=repr), draw) for _ in range(60)]
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        cells.append(Cell(**best))
    return cells


def _can_meet(some: dict) -> bool:
    stage, parameter = some.get("place", (3, "none"))
    return not (stage == 1 and some.get("gradient", "none") != "none") and not (
        parameter == "nvme" and some.get("model") == "ragged"
    )


def _row_around(pair: tuple, draw: random.Random) -> dict:
    while True:
        row = {name: draw.choice(values) for name, values in FACTORS.items()} | dict(pair)
        if Cell(**row).allowed:
            return row


@pytest.mark.parametrize("part", range(3))
def test_every_two_choices_together_change_no_bit(part, disk, small_pieces):
    cells = covering_cells()
    for world_size in FACTORS["world"]:
        chosen = [cell for cell in cells if cell.world == world_size][part::3]

        def rank_run(rank: int, chosen=chosen) -> list[tuple[Outcome, Outcome]]:
            return [
                (train(rank, c.task(), **c.options()), train(rank, c.task(), **c.options(), **c.offload(disk)))
                for c in chosen
            ]

        for outcomes in run_threads(world_size, rank_run):
            for cell, (plain, offloaded) in zip(chosen, outcomes, strict=True):
                assert_same(offloaded, plain, f"{cell}:")


# -- every placement ---------------------------------------------------------------------------------------------


def plain_loop(rank: int, task: Task, states: bool = True, **options) -> Outcome:
    """As `train`, but nothing is looked at before the end: reading a gradient waits for what is under way."""
    model = copy.deepcopy(task.model)
    model, optimizer = zs.shard(model, task.make_optimizer(model), **options)
    out = Outcome()
    for step, micros in enumerate(task.data):
        for ranks in micros:
            loss = model(*ranks[rank])
            loss.backward()
            out.losses.append(loss.item())
        if step in task.clip:
            zs.clip_grad_norm_(model, task.clip[step])
        optimizer.step()
        out.norms.append(optimizer.last_step.grad_norm)
        out.coefficients.append(optimizer.last_step.clip_coefficient)
        optimizer.zero_grad()
    if states:
        out.states = zs.full_optimizer_state(model)
    zs.close(model)
    out.weights = model.state_dict()
    return out


DATA = token_batches(3, 1, 2)
TASK = Task(MODEL, token_batches(2, 2, 2), OPTIMIZERS["adamw"], clip={1: 0.05})


def test_placements_that_nobody_looks_at_change_no_bit(disk):
    """Half of parameter x gradient x optimizer (each two meet; the whole of it: test_a_device_of_its_own_...), with buffers that hold a part of a shard and larger ones."""
    half = [cell for cell in placements() if sum(map(DEVICES.index, cell[1:])) % 2 == 0]
    cells = [(*cell, TINY if number % 2 else LARGE) for number, cell in enumerate(half)]

    def rank_run(rank: int) -> dict:
        options = {"precision": "bf16"}
        expected = {stage: plain_loop(rank, TASK, stage=stage, **options) for stage in (1, 2, 3)}
        return [
            (expected[stage], plain_loop(
                rank, TASK, devices[2] != "none", stage=stage, **options, **tiers(disk, *devices, **buffers)
            ))
            for stage, *devices, buffers in cells
        ]  # fmt: skip

    for outcomes in run_threads(2, rank_run):
        for cell, (expected, got) in zip(cells, outcomes, strict=True):
            assert_same(got, expected, f"{cell}")


# -- a device with a memory of its own -----------------------------------------------------------------------------


@pytest.fixture
def strict_device(monkeypatch):
    return strict_devices(monkeypatch)


def test_a_device_of_its_own_changes_no_bit(disk, strict_device, small_pieces):
    """Sums travel to the host in the dtype in which gradients are sent, fp32 here. Not fused: the same loop everywhere."""
    cells = [(*cell, number % 3 > 0) for number, cell in enumerate(placements())]
    task = Task(MODEL, TASK.data, clip=TASK.clip, states=True)

    def rank_run(rank: int) -> list:
        strict_device(rank, False)
        expected = {stage: train(rank, task, stage=stage) for stage in (1, 2, 3)}
        strict_device(rank)
        return [
            (expected[stage], run(rank, task, stage=stage, **tiers(disk, *devices, **TINY, fused=False)))
            for stage, *devices, inspect in cells
            for run in [train if inspect else plain_loop]
        ]

    for outcomes in run_threads(2, rank_run):
        for cell, (expected, got) in zip(cells, outcomes, strict=True):
            if not got.gradients:
                got.gradients = expected.gradients
            assert_same(got, expected, f"{cell}")




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
    plain = stepping.HostStepper._write_back

    def write_back(self, slab):
        plain(self, slab)
        self._uploads.clear()

    monkeypatch.setattr(stepping.HostStepper, "_write_back", write_back)


def _without_fetch_joins(monkeypatch) -> None:
    plain = Tiers.fetch

    def fetch(self, rest, out, wait):
        pending = plain(self, rest, out, wait)
        return None if pending is None else Unordered(pending)

    monkeypatch.setattr(Tiers, "fetch", fetch)


def _without_waits_for_gradients(monkeypatch) -> None:
    monkeypatch.setattr(Departure, "settle", lambda self: setattr(self, "_under_way", None))


def _without_waits_for_reads(monkeypatch) -> None:
    plain = stepping.HostStepper._start

    def start(self, slab, wait):
        begun = plain(self, slab, wait)
        slab.reads.clear()
        return begun

    monkeypatch.setattr(stepping.HostStepper, "_start", start)


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


def assert_same_log(got: list, expected: list, where: str) -> None:
    for number, (left, right) in enumerate(zip(got, expected, strict=True)):
        if isinstance(left, dict):
            nested = isinstance(next(iter(left.values())), dict)
            bad = state_differences(left, right) if nested else differences(left, right)
        else:
            bad = [] if torch.equal(torch.as_tensor(left), torch.as_tensor(right)) else [f"{left}, expected {right}"]
        assert not bad, f"{where} entry {number}: {bad[:4]}"


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


# -- the other options -------------------------------------------------------------------------------------------


def test_gradients_leave_a_device_in_the_dtype_in_which_they_are_sent(disk, strict_device, monkeypatch):
    """bf16: the mean over ranks is summed in fp32, rounded once more, and travels with 2 bytes an element."""
    task = Task(MODEL, token_batches(2, 2, 2), clip={1: 0.05})

    def rank_run(rank: int, *devices: str) -> Outcome:
        strict_device(rank)
        return train(rank, task, stage=3, precision="bf16", **tiers(disk, *devices, fused=False))

    mean = helpers._mean
    monkeypatch.setattr(
        helpers, "_mean", lambda *args: {p: g.to(torch.bfloat16).float() for p, g in mean(*args).items()}
    )
    for devices in (("none", "cpu", "cpu"), ("cpu", "nvme", "nvme")):
        for got in run_threads(2, rank_run, *devices):
            expected = reference(task, 2, "bf16", got.coefficients)
            assert_equal_runs(got, expected, f"{devices}")
            assert got.norms == pytest.approx(expected.norms, rel=1e-5)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0])
def test_ratio_is_the_part_of_the_states_that_is_offloaded(ratio, disk):
    """Unit by unit: what is on the host is `ratio` of all states within half of the largest unit's."""

    def rank_run(rank: int) -> tuple:
        task = Task(seeded(lambda: OddGPT(layers=6)), token_batches(2, 1, 2))
        model = copy.deepcopy(task.model)
        options = tiers(disk, optimizer="cpu", ratio=ratio) | {"offload_gradient": "none"}
        model, optimizer = zs.shard(model, task.make_optimizer(model), precision="bf16", **options)
        model(*task.data[0][0][rank]).backward()
        optimizer.step()
        runtime = runtime_of(model)
        here, there = runtime.ledger.now, runtime.ledger.elsewhere[Tier.HOST]
        states = [12 * group.layout.shard_numel for group in runtime.groups]  # master and two moments in fp32
        held = here[OPTIMIZER] + here[MASTERS], there[OPTIMIZER] + there[MASTERS]
        zs.close(model)
        return held, states, plain_loop(rank, task, **options), plain_loop(rank, task)

    for (here, there), states, got, expected in run_threads(2, rank_run):
        assert 0.9 * sum(states) <= here + there <= sum(states)  # on the device the end of a shard has no moments
        assert abs(there - ratio * sum(states)) <= max(states) / 2
        assert_same(got, expected, f"{ratio}")


@pytest.mark.parametrize("parameter", ["none", "nvme"])
def test_max_live_parameters_saves_exactly_the_gathers_that_fit(parameter, disk):
    """A block whose forward ended k blocks before the end of the model is needed again after k other blocks' forward and
    backward and the root's: it stays if they all, itself and the root, are not more than the limit. R elements in the
    root, B in each of L blocks, limit M: the root stays if R <= M, and blocks k = 1, 2, ... as long as R + k B <= M.
    """
    task = Task(seeded(lambda: OddGPT(layers=4)), token_batches(4, 1, 2))

    def rank_run(rank: int) -> None:
        expected = plain_loop(rank, task, False, map_shared=False)
        root, block = 192, 512  # elements with padding; checked below
        for limit in (root - 1, root + block - 1, root + 3 * block, 10**9):
            options = {"map_shared": False, "overlap": False, "max_live_parameters": limit, **tiers(disk, parameter)}
            model = copy.deepcopy(task.model)
            model, optimizer = zs.shard(model, task.make_optimizer(model), **options)
            runtime = runtime_of(model)
            assert sorted(unit.gathered_numel for unit in runtime.units) == sorted([root, *4 * [block]])
            gathers, losses = [], []
            for step in task.data:
                before = runtime.ledger.traffic["gather"].count
                loss = model(*step[0][rank])
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                gathers.append(runtime.ledger.traffic["gather"].count - before)
            kept = 0 if limit < root else 1 + min((limit - root) // block, 4)
            assert gathers == [10, *3 * [10 - kept]], (limit, gathers)  # the first step is recorded
            peak = runtime.ledger.peak[GATHERED]
            assert peak <= 4 * (max(root, min(limit, root + 4 * block)) + block), (limit, peak)
            assert runtime.ledger.now[GATHERED] == 0
            zs.close(model)
            assert losses == expected.losses and not differences(model.state_dict(), expected.weights)

    run_threads(2, rank_run)


@pytest.mark.parametrize("private", [True, False])
def test_what_was_gathered_ahead_is_not_used_after_a_write(private, disk):
    """A forward without backward leaves units gathered for the backward that does not come."""
    office = PostOffice()

    def rank_run(rank: int, **options) -> list[float]:
        comm = PrivateComm(office, rank, 2, ordered=False) if private else None
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm, **options)
        for step in DATA[:2]:
            model(*step[0][rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses = []
        for _ in range(2):
            losses.append(model(*DATA[2][0][rank]).item())
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
        losses.append(model(*DATA[2][0][rank]).item())
        zs.close(model)
        return losses

    expected = run_threads(2, lambda rank: rank_run(rank, stage=0))
    for parameter, live in itertools.product(("none", "nvme"), (0, 10**9)):
        options = {"map_shared": False, "max_live_parameters": live, **tiers(disk, parameter)}
        assert run_threads(2, lambda rank, o=options: rank_run(rank, **o)) == expected, (parameter, live)


@pytest.mark.parametrize("disks", [True, False])
def test_dtypes_of_their_own_are_gathered_with_their_unit(disks, disk):
    task = Task(MODEL, TASK.data, clip=TASK.clip)
    options = {"stage": 3, "precision": "bf16", "dtypes": {"LayerNorm": torch.float32}}
    offloaded = tiers(disk, *(["nvme"] * 3 if disks else ["cpu"] * 3), **TINY)

    def rank_run(rank: int) -> tuple[Outcome, Outcome]:
        return train(rank, task, **options), train(rank, task, **options, **offloaded)

    for expected, got in run_threads(2, rank_run):
        assert_same(got, expected, "mixed dtypes")


def test_doubles_rest_and_come_back_as_doubles(disk, strict_device):
    """They have no fp32 masters; what a step needs within its reach is a copy in fp64."""
    task = Task(seeded(lambda: OddGPT(dim=24, layers=2)).double(), DATA)

    def rank_run(rank: int) -> list:
        results = []
        for devices, own_device in ((("nvme", "nvme", "nvme"), False), (("nvme", "none", "none"), False), (("none", "cpu", "cpu"), True)):
            strict_device(rank, False)
            expected = plain_loop(rank, task, stage=3)
            strict_device(rank, own_device)
            results.append((f"{devices}", expected, plain_loop(rank, task, stage=3, **tiers(disk, *devices, **TINY))))
        return results

    for results in run_threads(2, rank_run):
        for where, expected, got in results:
            assert got.weights["embedding.weight"].dtype == torch.float64
            assert_same(got, expected, where)


@pytest.mark.parametrize("stage", [2, 3])
def test_weighted_backwards(stage, disk):
    """zs.backward: what is still to be divided by the weights travels and rests as it is."""

    def rank_run(rank: int, *devices: str) -> list:
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, TASK.make_optimizer(model), stage=stage, max_grad_norm=0.5, **tiers(disk, *devices, **TINY))
        log = []
        for number, micros in enumerate(TASK.data):
            for micro, ranks in enumerate(micros):
                zs.backward(model, model(*ranks[rank]), weight=1.0 + rank + 2 * micro + number)
            optimizer.step()
            log += [optimizer.last_step.grad_norm, zs.full_gradients(model)]
            optimizer.zero_grad()
        zs.close(model)
        return [*log, model.state_dict()]

    expected = run_threads(2, rank_run)
    for devices in (("none", "nvme", "cpu"), ("none", "cpu", "nvme")):
        for got, wanted in zip(run_threads(2, rank_run, *devices), expected, strict=True):
            assert_same_log(got, wanted, f"{devices}")


def test_states_may_rest_on_different_disks(tmp_path):
    """Each state names its own folder, or takes offload_path; a mapping of fields will do."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    places = {
        "offload_param": {"device": "nvme", "any_filesystem": True},
        "offload_gradient": {"device": "nvme", "path": str(tmp_path / "other"), "any_filesystem": True, "checksum": True},
        "offload_optimizer": Offload("disk", path=str(tmp_path / "other"), any_filesystem=True),
        "offload_path": str(tmp_path / "one"),
    }

    def rank_run(rank: int) -> tuple:
        model = copy.deepcopy(MODEL)
        zs.shard(model, TASK.make_optimizer(model), stage=3, **places)
        folders = sorted(folder.swap.path.parent.name for folder in runtime_of(model).tiers._folders.values())
        zs.close(model, restore=False)
        with pytest.raises(zs.ModelClosed):
            model(*DATA[0][0][rank])
        return folders, plain_loop(rank, TASK, stage=3), plain_loop(rank, TASK, stage=3, **places)

    for folders, expected, got in run_threads(2, rank_run):
        assert folders == ["one", "other"]
        assert_same(got, expected, "two disks")
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("options, words", [
    ({"offload_param": "nvm"}, "offload device: expected 'none', 'cpu' or 'nvme', got 'nvm'. Did you mean 'nvme'"),
    ({"offload_optimizer": "nvme"}, "offload to 'nvme' needs"),
    ({"offload_optimizer": {"devise": "cpu"}}, "offload_optimizer: unknown field 'devise'. Did you mean 'device'"),
    ({"offload_optimizer": 3}, "offload_optimizer: expected 'none', 'cpu', 'nvme', an Offload or a mapping, got int"),
    ({"offload_param": "cpu", "stage": 2}, "offload_param='cpu' needs stage 3: at stage 2 this state is replicated"),
    ({"offload_gradient": "cpu", "stage": 1}, "offload_gradient='cpu' needs stage 2 or 3: at stage 1 this state is partial"),
    ({"offload_optimizer": "cpu", "stage": 0}, "offload_optimizer='cpu' needs stage 1, 2 or 3"),
    ({"offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "offload ratio: expected a number from 0 to 1, got 1.5"),
    ({"offload_optimizer": {"device": "cpu", "buffer_count": 1}}, "offload buffers: expected a buffer_count of at least 2"),
    ({"delayed_update": 3}, "delayed_update needs offload_optimizer='cpu' or 'nvme'"),
    ({"delayed_update": -1, "offload_optimizer": "cpu"}, "delayed_update: expected a number of at least 0, got -1"),
    ({"max_live_parameters": "1e9"}, "max_live_parameters: expected a number of at least 0"),
])  # fmt: skip
def test_options_are_checked_when_they_are_given(options, words):
    with pytest.raises(zs.ConfigError) as caught:
        zs.Config.build(None, **options)
    assert words in str(caught.value)


def test_two_models_swap_in_one_folder(disk):
    everything = tiers(disk, "nvme", "nvme", "nvme", **TINY)

    def rank_run(rank: int) -> list:
        expected = plain_loop(rank, TASK, stage=3)
        models = [copy.deepcopy(MODEL) for _ in range(2)]
        pairs = [zs.shard(model, TASK.make_optimizer(model), stage=3, **everything) for model in models]
        losses = []
        for step, micros in enumerate(TASK.data):
            for ranks in micros:
                for model, _ in pairs:
                    loss = model(*ranks[rank])
                    loss.backward()
                    losses.append(loss.item())
            for model, optimizer in pairs:
                if step in TASK.clip:
                    zs.clip_grad_norm_(model, TASK.clip[step])
                optimizer.step()
                optimizer.zero_grad()
        for model, _ in reversed(pairs):
            zs.close(model)
        return [expected, losses, *models]

    for expected, losses, *models in run_threads(2, rank_run):
        assert losses[::2] == losses[1::2] == expected.losses
        for model in models:
            assert not differences(model.state_dict(), expected.weights)
            assert type(model.embedding.weight) is nn.Parameter


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_non_finite_gradient_skips_the_step_on_all_ranks(precision, disk):
    """B20 with states elsewhere: nothing is stepped, the record names parameter and rank, the run goes on."""
    options = {"stage": 3, "precision": precision, "initial_loss_scale": 256.0}

    def rank_run(rank: int, **offloaded) -> tuple:
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, TASK.make_optimizer(model), **options, **offloaded)
        records = []
        for step, micros in enumerate(DATA):
            for ranks in micros:
                loss = model(*ranks[rank])
                handle = None
                if step == 1 and rank == 1:
                    handle = model.blocks[1].out.weight.register_hook(lambda grad: grad * math.inf)
                loss.backward()
                handle.remove() if handle is not None else None
            optimizer.step()
            records.append(optimizer.last_step)
            optimizer.zero_grad()
        states = zs.full_optimizer_state(model)
        zs.close(model)
        return records, states, model.state_dict()

    (expected, *_) = run_threads(2, rank_run)
    assert [record.skipped for record in expected[0]] == [False, True, False]
    for devices in (("nvme", "nvme", "nvme"), ("none", "cpu", "cpu"), ("none", "nvme", "nvme")):
        for records, states, weights in run_threads(2, lambda rank, d=devices: rank_run(rank, **tiers(disk, *d))):
            assert [(r.skipped, r.loss_scale) for r in records] == [(r.skipped, r.loss_scale) for r in expected[0]]
            assert any("blocks.1.out.weight" in name for name in records[1].nonfinite)
            assert not differences(weights, expected[2]) and not state_differences(states, expected[1])


def test_an_exception_in_forward_or_backward_costs_one_step(disk, strict_device):
    """All ranks raise in the same place, drop the step and go on; a gradient already on its way is forgotten."""

    class Stop(Exception):
        pass

    def rank_run(rank: int, own_device: bool, fails: str, **options) -> Outcome:
        strict_device(rank, own_device)
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, TASK.make_optimizer(model), stage=3, **options)
        out = Outcome()

        def stop(*_) -> None:
            raise Stop

        for step, micros in enumerate(TASK.data):
            if step:
                place = model.blocks[0 if fails == "backward" else 1].norm
                hook = place.register_full_backward_hook(stop) if fails == "backward" else place.register_forward_hook(stop)
                with pytest.raises(Stop):
                    model(*micros[0][rank]).backward()
                hook.remove()
            for ranks in micros:
                loss = model(*ranks[rank])
                loss.backward()
                out.losses.append(loss.item())
            optimizer.step()
            out.norms.append(optimizer.last_step.grad_norm)
            optimizer.zero_grad()
        zs.close(model)
        out.weights = model.state_dict()
        return out

    for fails, own_device in itertools.product(("forward", "backward"), (False, True)):
        expected = run_threads(2, rank_run, False, fails)
        for devices in (("nvme", "nvme", "nvme"), ("cpu", "cpu", "none")):
            options = tiers(disk, *devices, fused=False)
            got = run_threads(2, lambda rank, o=options: rank_run(rank, own_device, fails, **o))
            for left, right in zip(got, expected, strict=True):
                assert_same(left, right, f"{fails} {own_device} {devices}")


class Odd(nn.Module):
    """Parameters of 1, 3, 7 and 1000 elements (C07)."""

    def __init__(self) -> None:
        super().__init__()
        for numel in (1, 3, 7, 1000):
            self.register_parameter(f"p{numel}", nn.Parameter(torch.linspace(-1, 1, numel)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((param * (x + index) - 1).square().sum() for index, param in enumerate(self.parameters()))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_c07_clip_norm_under_offload_with_uneven_shards(stage, device, disk):
    """The norm is that of one process, a Python float that is global, and after clipping it is at most the limit."""
    data = [[[(torch.tensor(0.1 * rank),) for rank in range(3)]]] * 2
    task = Task(seeded(Odd), data, clip={0: 5.0, 1: 5.0})
    places = (device if stage == 3 else "none", device if stage > 1 else "none", device)

    def rank_run(rank: int) -> Outcome:
        model = copy.deepcopy(task.model)
        model, optimizer = zs.shard(model, task.make_optimizer(model), stage=stage, **tiers(disk, *places))
        model(*data[0][0][rank]).backward()
        norm = zs.clip_grad_norm_(model, 5.0)
        assert isinstance(float(norm), float) and norm.shape == ()
        clipped = torch.cat([grad.flatten() for grad in zs.full_gradients(model).values()])
        zs.close(model)
        return float(norm), float(clipped.norm()), train(rank, task, stage=stage, **tiers(disk, *places))

    for norm, clipped, got in run_threads(3, rank_run):
        expected = reference(task, 3, coefficients=got.coefficients)
        assert norm == pytest.approx(got.norms[0], rel=1e-7) == pytest.approx(expected.norms[0], rel=1e-6) and norm > 5.0
        assert clipped <= 5.0 * (1 + 1e-6)
        assert_equal_runs(got, expected, f"stage {stage} {device}")


# -- birth -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["init", "meta", "weights"])
def test_models_are_born_on_disk(way, precision, disk, tmp_path, strict_device):
    """zs.init, the meta device and streamed weights give the values that the model would have had in memory."""
    options = {"stage": 3, "precision": precision}
    offloaded = tiers(disk, "nvme", "nvme", "nvme", **TINY, fused=False)
    save_file({name: value.clone() for name, value in MODEL.state_dict().items() if name != "head.weight"}, tmp_path / "m.safetensors")
    lock = threading.Lock()

    def born(extra: dict) -> tuple[nn.Module, dict]:
        with lock:  # generator, registration hooks and the default device are the process's, not the thread's
            if way == "init":
                with zs.init(**options, **extra):
                    return seeded(lambda: OddGPT(dim=24, layers=2)), {}
            with torch.device("meta"):
                return OddGPT(dim=24, layers=2), {"weights": tmp_path}

    def rank_run(rank: int, on_disk: bool, own_device: bool) -> tuple:
        strict_device(rank, own_device)
        extra = offloaded if on_disk else {}
        model, given = born(extra) if on_disk else (copy.deepcopy(MODEL), {})
        model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), **options, **extra, **given)
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
