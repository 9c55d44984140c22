"""The delayed update (ZeRO-Offload, arXiv 2101.06840, section 4.3) is exactly one step late, and never a step and a half.

    step                      0    1    2    3    4    5
    delayed_update=2, uses    w0   w1   w2   w2   w3   w4        w_i: the weights after i updates

Up to and including step `delayed_update` each step uses all updates before it; later ones all but the last. `late` is that
in plain torch, on one process; weights, losses, optimizer states are compared bit for bit. `late_host` makes the host so
late that whatever does not wait for it is caught.
"""

import contextlib
import copy
import math
import threading
from collections import defaultdict

import helpers
import pytest
import torch
from helpers import Branches, OddGPT, Outcome, Task, adamw, differences, seeded, state_differences, token_batches
from offloading import tiers
from private_ranks import PostOffice, PrivateComm
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads
from zeroshard.tiers.host_step import DelayedStep, HostStepper

MODEL = seeded(lambda: OddGPT(dim=24, layers=2))
DATA = token_batches(5, 1, 2)
TASK = Task(MODEL, DATA, clip={3: 0.05})


def train(rank: int, task: Task, spoilt: tuple[int, ...] = (), **options) -> Outcome:
    """One rank of a delayed run. spoilt: steps in which rank 0 sends a gradient that is not finite."""
    model = copy.deepcopy(task.model)
    model, optimizer = zs.shard(model, task.make_optimizer(model), **options)
    scheduler = task.scheduler(optimizer) if task.scheduler else None
    out = Outcome()
    for step, micros in enumerate(task.data):
        spoil = None
        if step in spoilt and rank == 0:
            spoil = next(model.parameters()).register_hook(lambda grad: grad * math.nan)
        for number, ranks in enumerate(micros):
            held = task.local_sums and number < len(micros) - 1
            with zs.accumulate(model) if held else contextlib.nullcontext():
                loss = model(*ranks[rank])
                loss.backward()
            out.losses.append(loss.item())
        if step in task.clip:
            zs.clip_grad_norm_(model, task.clip[step])
        optimizer.step()
        out.coefficients.append(optimizer.last_step.clip_coefficient)
        if scheduler is not None and not optimizer.last_step.skipped:
            scheduler.step()
        optimizer.zero_grad()
        spoil.remove() if spoil is not None else None
    out.states = zs.full_optimizer_state(model)
    zs.close(model)
    out.weights = model.state_dict()
    return out


def late(
    task: Task, warm_up: int, coefficients: list[float], precision: str = "fp32", prompt: tuple[str, ...] = (),
    spoilt: tuple[int, ...] = (),
) -> Outcome:  # fmt: skip
    """The same in plain torch. prompt: parameters (name prefixes) that are not delayed, as they rest on the device."""
    masters = copy.deepcopy(task.model)
    model = copy.deepcopy(task.model).to(helpers.DTYPES[precision])
    optimizer = task.make_optimizer(masters)
    scheduler = task.scheduler(optimizer) if task.scheduler else None
    out, updates, previous = Outcome(), 0, copy.deepcopy(masters.state_dict())
    for step, micros in enumerate(task.data):
        present = masters.state_dict()
        used = {
            name: value if updates <= warm_up or name.startswith(prompt or "-") else previous[name]
            for name, value in present.items()
        }
        model.load_state_dict(used)
        total = helpers._step_gradients(model, task, micros, 2, 1.0, out.losses, helpers.Rounding())
        if step in spoilt:
            continue
        previous = copy.deepcopy(present)
        for (_, master), param in zip(masters.named_parameters(), model.parameters(), strict=True):
            master.grad = total[param] * coefficients[step] if param in total else None
        optimizer.step()
        updates += 1
        scheduler.step() if scheduler is not None else None
    out.weights = masters.state_dict()
    out.states = {name: dict(optimizer.state.get(p, {})) for name, p in masters.named_parameters()}
    return out


def assert_late(outcomes: list[Outcome], expected: Outcome, where: str) -> None:
    """losses: `late` has those of rank 0 and 1 of every backward in turn."""
    for rank, got in enumerate(outcomes):
        assert got.losses == expected.losses[rank::2], f"{where}: losses of rank {rank}"
        bad = differences(got.weights, expected.weights) + state_differences(got.states, expected.states)
        assert not bad, f"{where}: {bad[:4]}"


CELLS = [
    # stage, parameter, gradient, optimizer, precision, warm-up, local sums, overlap
    (3, "none", "cpu", "cpu", "fp32", 0, False, True),
    (3, "cpu", "cpu", "cpu", "bf16", 2, True, True),
    (3, "none", "nvme", "nvme", "fp32", 2, False, False),
    (3, "none", "none", "nvme", "bf16", 0, False, True),
    (3, "cpu", "none", "cpu", "fp32", 1, True, False),
    (2, "none", "cpu", "cpu", "fp32", 2, False, True),
    (2, "none", "nvme", "cpu", "bf16", 0, True, True),
    (2, "none", "none", "nvme", "fp32", 4, False, True),
    (1, "none", "none", "cpu", "fp32", 0, False, True),
    (1, "none", "none", "nvme", "bf16", 2, True, False),
]


def cell_task(cell: tuple) -> Task:
    return Task(MODEL, token_batches(5, 2, 2) if cell[6] else DATA, clip={3: 0.05}, local_sums=cell[6])


def cell_options(cell: tuple, disk: str) -> dict:
    stage, parameter, gradient, optimizer, precision, warm_up, _, overlap = cell
    places = tiers(disk, parameter, gradient, optimizer, fused=False, buffer_count=2, buffer_nbytes=1 << 16)
    return {"stage": stage, "precision": precision, "delayed_update": warm_up, "overlap": overlap, **places}


@pytest.mark.parametrize("own_device", [False, True])
def test_steps_use_all_updates_but_the_last(own_device, disk, strict_device):
    cells = [cell for cell in CELLS if cell[4] == "fp32" or not own_device]  # bf16: sums are rounded once more there

    def rank_run(rank: int) -> list[Outcome]:
        strict_device(rank, own_device)
        return [train(rank, cell_task(cell), **cell_options(cell, disk)) for cell in cells]

    outcomes = run_threads(2, rank_run)
    for number, cell in enumerate(cells):
        got = [rank[number] for rank in outcomes]
        assert_late(got, late(cell_task(cell), cell[5], got[0].coefficients, cell[4]), f"{cell}")


def test_ranks_that_share_no_memory(disk):
    """Stages 1 and 2 gather what the thread has made, in an order that is the same on every rank."""
    cells = [cell for cell in CELLS if cell[4] == "fp32" and not cell[6]]
    office = PostOffice()

    def rank_run(rank: int) -> list[Outcome]:
        comm = PrivateComm(office, rank, 2, ordered=True)
        return [train(rank, cell_task(cell), comm=comm, **cell_options(cell, disk)) for cell in cells]

    outcomes = run_threads(2, rank_run)
    for number, cell in enumerate(cells):
        got = [rank[number] for rank in outcomes]
        assert_late(got, late(cell_task(cell), cell[5], got[0].coefficients, cell[4]), f"{cell}")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_skipped_step_neither_publishes_nor_steps(stage, disk):
    """Non-finite gradients of one rank: the update before goes on, the next good step takes it."""
    spoilt = (0, 3)
    options = {"stage": stage, "delayed_update": 1, **tiers(disk, optimizer="cpu")}
    got = run_threads(2, lambda rank: train(rank, TASK, spoilt, **options))
    assert_late(got, late(TASK, 1, got[0].coefficients, spoilt=spoilt), f"stage {stage}")


def test_a_part_of_the_states_is_delayed(disk):
    """ratio: units whose states stay on the device are stepped at once, the others late."""

    def rank_run(rank: int) -> tuple:
        model = copy.deepcopy(MODEL)
        options = {"stage": 3, "delayed_update": 0, **tiers(disk, optimizer="cpu", ratio=0.5)}
        zs.shard(model, adamw(model.parameters()), **options)
        groups = [group for group in runtime_of(model).groups if group.offload.device == "none"]
        prompt = tuple(spec.name for group in groups for spec in group.specs)
        zs.close(model)
        return prompt, train(rank, TASK, **options)

    results = run_threads(2, rank_run)
    prompt = results[0][0]
    assert 0 < len(prompt) < len(list(MODEL.parameters()))
    got = [outcome for _, outcome in results]
    assert_late(got, late(TASK, 0, got[0].coefficients, prompt=prompt), "ratio")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_schedulers_and_parameters_without_gradients(stage, disk):
    """The learning rate of a late update is that of its step; what has no gradient in a step keeps its own count."""
    generator = torch.Generator().manual_seed(3)
    routes = [(0, 1, 2), (2, 0), (1,), (), (0,), (1, 2)]
    data = [[[(torch.randn(3, 6, generator=generator), route) for _ in range(2)]] for route in routes]
    task = Task(seeded(Branches), data, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    options = {"stage": stage, "delayed_update": 0, "units": "model", **tiers(disk, optimizer="nvme", fused=False)}
    got = run_threads(2, lambda rank: train(rank, task, **options))
    expected = late(task, 0, got[0].coefficients)
    assert_late(got, expected, f"stage {stage}")
    assert len({float(state["step"]) for state in expected.states.values() if state}) > 1


def test_the_loss_stays_near_that_of_the_plain_run(disk):
    """Section 6.3 of the paper: after a warm-up the curve with one step of delay is that without."""
    task = Task(MODEL, token_batches(1, 1, 2) * 40, lambda params: torch.optim.AdamW(params, lr=1e-3))
    plain = run_threads(2, lambda rank: train(rank, task))[0].losses
    delayed = run_threads(2, lambda rank: train(rank, task, delayed_update=10, **tiers(disk, optimizer="cpu")))[0].losses
    assert delayed[:11] == plain[:11] and delayed[12] != plain[12]
    assert plain[-1] < 0.2 * plain[10]
    assert delayed[-1] < plain[-3] * 1.1  # late by a step, and not by much more


# -- while the thread steps ------------------------------------------------------------------------------------------


@pytest.fixture
def late_host(monkeypatch):
    """The thread does not begin before somebody waits for it: whoever does not, sees what was there before."""
    step, wait = HostStepper.step, DelayedStep.wait
    gates: dict[HostStepper, threading.Event] = defaultdict(threading.Event)

    def late_step(self, jobs):
        if threading.current_thread().name == "zeroshard-delayed-step":
            assert gates[self].wait(10), "nobody waits for the thread"
        step(self, jobs)

    def opening_wait(self):
        gates[self.host].set()
        wait(self)
        gates[self.host].clear()

    monkeypatch.setattr(HostStepper, "step", late_step)
    monkeypatch.setattr(DelayedStep, "wait", opening_wait)


def begin(rank: int, steps: int, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A run whose thread is stepping: `steps` steps are done or under way."""
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, adamw(model.parameters()), delayed_update=0, **options)
    for number in range(steps):
        go_on(rank, number, model, optimizer)
    return model, optimizer


def go_on(rank: int, number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(*DATA[number][0][rank]).backward()
    optimizer.step()
    assert all(param.grad is None for param in model.parameters()), "gradients belong to the thread"
    optimizer.zero_grad()
    assert runtime_of(model).optimizers.core.delayed.running


def expected_after(updates: int) -> Outcome:
    return late(Task(MODEL, DATA[:updates]), 0, [1.0] * updates)


PLACES = {"cpu": ("none", "cpu", "cpu"), "nvme": ("none", "cpu", "nvme")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stage", [2, 3])
def test_whoever_reads_masters_and_states_waits_for_the_thread(stage, place, disk, late_host):
    updates = 2

    def rank_run(rank: int) -> tuple:
        model, optimizer = begin(rank, updates, stage=stage, **tiers(disk, *PLACES[place]))
        used = zs.full_state_dict(model)  # what the next forward computes with: it is not waited for
        assert runtime_of(model).optimizers.core.delayed.running
        masters = zs.full_state_dict(model, masters=True)
        go_on(rank, updates, model, optimizer)
        states = zs.full_optimizer_state(model)
        go_on(rank, updates + 1, model, optimizer)
        state = next(iter(optimizer.state.values()))["exp_avg"].full_tensor()
        go_on(rank, updates + 2, model, optimizer)
        zs.close(model)
        return used, masters, states, state, model.state_dict()

    for used, masters, states, state, closed in run_threads(2, rank_run):
        assert not differences(used, expected_after(updates - 1).weights)
        assert not differences(masters, expected_after(updates).weights)
        assert not state_differences(states, expected_after(updates + 1).states)
        assert any(torch.equal(state, entry["exp_avg"]) for entry in expected_after(updates + 2).states.values())
        assert not differences(closed, expected_after(updates + 3).weights)


@pytest.mark.parametrize("way", ["in place", "gathered", "state", "load"])
def test_whoever_writes_waits_for_the_thread_and_stands(way, disk, late_host):
    """A value written after a step is not overwritten by that step's update when it is published."""

    def rank_run(rank: int) -> tuple[Tensor, Tensor]:
        model, optimizer = begin(rank, 2, stage=3, **tiers(disk, *PLACES["nvme"]))
        weight = model.blocks[0].into.weight
        with torch.no_grad():
            if way == "in place":
                weight.fill_(0.25)
            elif way == "gathered":
                with zs.gathered(model.blocks[0], write=True):
                    model.blocks[0].into.weight.fill_(0.25)
            elif way == "state":
                optimizer.state[weight]["exp_avg"].fill_(0.25)
            else:
                state = {
                    "exp_avg": torch.full(weight.shape, 0.25),
                    "exp_avg_sq": torch.ones(weight.shape),
                    "step": torch.tensor(7.0),
                }
                index = [name for name, _ in model.named_parameters()].index("blocks.0.into.weight")
                optimizer.load_state_dict({"state": {index: state}, "param_groups": optimizer.state_dict()["param_groups"]})
        if way in ("in place", "gathered"):  # a step that does not touch it takes it over all the same
            model.blocks[1](torch.ones(1, 2, 24)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(weight.full_tensor(), torch.full(weight.shape, 0.25))
            value = zs.full_state_dict(model, masters=True)["blocks.0.into.weight"]
        else:
            value = zs.full_optimizer_state(model)["blocks.0.into.weight"]["exp_avg"]
        zs.close(model)
        return value, model.blocks[0].into.weight

    for value, closed in run_threads(2, rank_run):
        assert torch.equal(value, torch.full(value.shape, 0.25))
        assert way in ("state", "load") or torch.equal(closed, value)


def test_an_error_in_the_thread_is_raised_by_the_next_step_and_by_all_that_follow(disk, monkeypatch):
    """Masters are half stepped then: nobody goes on with them."""

    class Broken(Exception):
        pass

    plain = HostStepper._compute

    def compute(self, slab):
        if self.comm_rank == 1 and self.slabs == 4:
            raise Broken
        self.slabs += 1
        plain(self, slab)

    monkeypatch.setattr(HostStepper, "_compute", compute)

    def rank_run(rank: int) -> tuple[int, str]:
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, delayed_update=0, **tiers(disk, optimizer="cpu"))
        host = runtime_of(model).optimizers.core.host
        host.comm_rank, host.slabs = rank, 0
        for number in range(4):
            try:
                model(*DATA[number][0][rank]).backward()
                optimizer.step()
            except (Broken, zs.PeerFailed) as error:
                if rank == 1:
                    for look in (lambda: zs.full_state_dict(model, masters=True), lambda: optimizer.state):
                        with pytest.raises(Broken):
                            look()
                    runtime_of(model).comm.abort("Broken")  # as an uncaught exception does
                return number, type(error).__name__
            optimizer.zero_grad()

    assert run_threads(2, rank_run) == [(2, "PeerFailed"), (2, "Broken")]
