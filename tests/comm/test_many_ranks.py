"""Control messages of many ranks: one small reduction tells that all say the same; a message of all follows where they do not."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from helpers import OddGPT, seeded, token_batches
from torch import nn

import zeroshard as zs
from benchmarks import ranks
from zeroshard.comm import backend_select
from zeroshard.comm.launch import run_processes
from zeroshard.engine.comm import process_group
from zeroshard.planner.dry_run import plan
from zeroshard.planner.simulator.hardware import Hardware
from zeroshard.planner.simulator.simulate import simulate
from zeroshard.planner.simulator.trace import Resource

pytestmark = pytest.mark.processes
WORLD = 3
BATCHES = token_batches(3, 1, WORLD)


def counted(comm) -> dict[str, int]:
    """Count the messages of all ranks, and the reductions that stand for them."""
    counts = {"everyone": 0, "sums": 0}
    plain_everyone, plain_sums = comm._everyone, comm._sums

    def everyone(*args):
        counts["everyone"] += 1
        return plain_everyone(*args)

    def sums(*args):
        counts["sums"] += 1
        return plain_sums(*args)

    comm._everyone, comm._sums = everyone, sums
    return counts


def trained(rank: int, many: int, stage: int, weighted: bool):
    model = seeded(OddGPT)
    params = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = zs.shard(model, torch.optim.AdamW(params, lr=1e-2), stage=stage, comm="dist", max_grad_norm=0.5)
    counts = counted(model._zeroshard.comm)
    for (batches,) in BATCHES:
        loss = model(*batches[rank])
        zs.backward(model, loss, weight=rank + 1.0) if weighted else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = len(BATCHES)
    state = {name: value.numpy() for name, value in zs.full_state_dict(model).items()}
    return state, optimizer.last_step.grad_norm, counts, steps


def runs(rank: int, ranks: int, many: int, cases: list):
    torch.set_num_threads(1)
    process_group.MANY, process_group._TOLD = many, 2
    dist.init_process_group("gloo")
    found = [trained(rank, many, *case) for case in cases]
    dist.destroy_process_group()
    return found


def test_steps_are_those_of_few_ranks_and_send_no_message_of_all():
    cases = [(stage, weighted) for stage in (0, 2, 3) for weighted in (False, True)]
    few, many = run_processes(runs, WORLD, 32, cases), run_processes(runs, WORLD, 1, cases)
    for rank in range(WORLD):
        for (wanted, norm, _, _), (state, same, counts, steps), case in zip(few[rank], many[rank], cases, strict=True):
            assert same == pytest.approx(norm, rel=1e-12) and many[0][cases.index(case)][1] == same, case
            assert all(state[name] == pytest.approx(value, rel=1e-6, abs=1e-9) for name, value in wanted.items()), case
            assert counts["sums"] >= 2 * steps
            # the first end of a backward may say in which order units were ready; full_state_dict gathers
            assert counts["everyone"] <= counts["sums"] - 2 * steps + 1, (case, counts, steps)


def exchanges(rank: int, ranks: int):
    torch.set_num_threads(1)
    process_group.MANY, process_group._TOLD = 1, 2  # of four ranks two rounds of two, of three one
    dist.init_process_group("gloo")
    comm = backend_select.current("dist", torch.device("cpu"), 20.0)
    counts = counted(comm)
    assert comm.exchange(b"same", "a") == [b"same"] * ranks and counts == {"everyone": 0, "sums": 1}
    assert comm.exchange(b"rank %d" % rank, "b") == [b"rank %d" % each for each in range(ranks)]
    assert comm.exchange(b"x" * 5000, "c [step 1]") == [b"x" * 5000] * ranks
    sums, told = comm.compare(b"same", "d", (rank, 0.5, float("inf") if rank == 1 else 1.0))
    assert sums == [sum(range(ranks)), 0.5 * ranks, float("inf")] and told is None
    sums, _ = comm.compare(b"same", "d", (0.1 ** (rank + 1),))
    assert comm.exchange(repr(sums).encode(), "d: sums") == [repr(sums).encode()] * ranks  # to the last bit
    sums, told = comm.compare(bytes([rank]), "e", (rank + 0.25,))
    assert sums == [sum(range(ranks)) + 0.25 * ranks] and told == [bytes([each]) for each in range(ranks)]
    assert counts == {"everyone": 2, "sums": 7}
    with pytest.raises(zs.CollectiveMismatch, match=r"rank 0: zs\.save: begin; rank 1: optimizer step; rank 2: optimizer step"):
        comm.exchange(b"", "zs.save: begin" if rank == 0 else "optimizer step")
    with pytest.raises(zs.CollectiveMismatch, match="rank 0: f; rank 1: g"):
        comm.exchange(b"", "f") if rank == 0 else comm.compare(b"", "g", (1.0,))
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", (WORLD, 4))
def test_what_all_say_is_said_once_and_differences_are_found(world_size):
    run_processes(exchanges, world_size)


def ending(rank: int, ranks: int):
    torch.set_num_threads(1)
    process_group.MANY, process_group._TOLD = 1, 2
    dist.init_process_group("gloo")
    comm = backend_select.current("dist", torch.device("cpu"), 20.0)
    if rank == 3:
        os._exit(9)
    with pytest.raises(zs.PeerFailed, match="rank 3") if rank else pytest.raises(zs.PeerFailed):
        comm.exchange(b"same", "a")


def test_a_rank_that_ends_is_named_in_all_groups():
    """Ranks 0 and 1 tell each other first, 2 and 3 too: both pairs fail."""
    found = run_processes(ending, 4, check=False)
    assert [result.exitcode for result in found] == [0, 0, 0, 9], found


def test_few_tell_each_other_where_the_number_of_ranks_has_such_factors():
    for world_size in (2, 36, 64, 1000, 4096, 4099):
        sizes = process_group.round_sizes(world_size)
        assert math.prod(sizes) == world_size and (max(sizes) <= process_group._TOLD or world_size == 4099), sizes
    assert process_group.collectives_of(100, 4096) == [(28 * 128, 28)]


def differing(rank: int, ranks: int):
    torch.set_num_threads(1)
    process_group.MANY = 1
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, comm="dist")
    with zs.join(model):
        for _ in range(2 + rank):  # other numbers of batches
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    with torch.no_grad():
        model[0].bias.fill_(rank)
    with pytest.raises(zs.ModelMismatch, match=r"0\.bias \(ranks 1, 2 hold other values"):
        optimizer.step()
    dist.destroy_process_group()


def test_ranks_that_differ_are_told_as_of_few():
    run_processes(differing, WORLD)


def test_a_step_of_many_ranks_costs_what_one_of_few_does():
    """benchmarks.ranks: nothing of a step grows with the number of ranks; the start grows with it, and not with its square."""
    rows = {row[0]: [int(count.replace(",", "")) for count in row[1:-1]] for row in ranks.table((64, 256))}
    for phase in ("forward", "backward", "step", "close"):
        for what in ("messages", "bytes received", "calls"):
            one, other = rows[f"{phase}: {what}"]
            # four times as many ranks: another three that each tells its numbers
            assert one == other or (what == "bytes received" and 0 < other - one <= 2 * 3 * 128), (phase, what)
    one, other = rows["start: calls"]
    assert other < 4.2 * one
    for phase in ("save", "save again", "load"):
        for what in ("bytes received", "calls"):
            one, other = rows[f"{phase}: {what}"]
            assert other < 4.2 * one, (phase, what)
        one, other = rows[f"{phase}: messages"]
        assert one == other


@pytest.mark.parametrize("stage", (0, 2, 3))
@pytest.mark.parametrize("world_size", (8, 64))
def test_a_simulated_step_has_the_messages_that_are_counted(world_size, stage):
    hardware = Hardware.named("a100-80gb")
    planned = plan(
        ranks.layers, ranks=world_size, batch=lambda: torch.ones(1, 8), loss=lambda model, rows: model(rows).sum(),
        stage=stage, hardware=hardware, node_size=world_size,  # one node, as benchmarks.ranks has
    )  # fmt: skip
    counts = ranks.phases(ranks.Fed(world_size), stage)
    messages, nbytes, seconds = simulate(planned.trace, hardware).control
    assert (messages, nbytes) == tuple(sum(counts[phase][at] for phase in ("forward", "backward", "step")) for at in (0, 1))
    hops = 14 if world_size == 64 else world_size - 1  # to the others of two groups of 8, or around one ring
    link = hardware.links[Resource.BETWEEN if world_size > hardware.devices_per_node else Resource.INSIDE]
    assert messages and seconds == pytest.approx(messages * hops * link.latency_s + nbytes / link.bandwidth)


@pytest.mark.parametrize(("world_size", "many"), ((2, 32), (3, 1)))
def test_a_fed_rank_has_the_messages_of_a_real_one(world_size, many, tmp_path, monkeypatch):
    """Messages and bytes are equal, calls fewer, as it sends no tensors. At the start real ranks tell their process and memory."""
    monkeypatch.setattr(process_group, "MANY", many)
    found, fed = run_processes(ranks.real, world_size, str(tmp_path), many)[0], ranks.fed(world_size)
    for phase, (messages, nbytes, calls) in found.items():
        assert phase == "start" or (messages, nbytes) == fed[phase][:2], phase
        assert phase == "start" or fed[phase][2] <= calls, phase
