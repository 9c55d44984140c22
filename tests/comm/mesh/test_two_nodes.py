"""Two nodes of two ranks, joined by a proxy (test_nodes), which counts what goes from one to the other.

test_slow_link has the times; ZEROSHARD_SLOW=1: each failure in each of the ways.
"""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from helpers import seeding
from nodes import Nodes
from torch import nn

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.comm import pool

RANKS_HERE = 2
STALL_S, NEVER_S = 3.0, 3600.0  # longer than any test may take: what ends sooner was told, and not missed
SLOW = os.environ.get("ZEROSHARD_SLOW") == "1"
WIDTH, LAYERS = 512, 4
M = 4 * LAYERS * (WIDTH + 1) * WIDTH  # bytes of all parameters
PACKED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
# what a node of two ranks sends in a step of stage 3, in M: a gather M, or half of it in two hops, twice; a reduction the same
WAYS = {
    "one hop": ({"hierarchical": False}, 3.0),
    "two hops": ({}, 1.5),
    "HSDP": ({"shard_size": 2}, 1.0),
    "hpZ": ({"zero_hpz_partition_size": 2}, 1.0),
    "hpZ, qwZ, qgZ": ({"zero_hpz_partition_size": 2, **PACKED}, 1.0 * (256 + 4) / 256 / 4),
}


@pytest.fixture(scope="module")
def nodes():
    with Nodes(rate_bits_per_s=10e9) as found:
        yield found


def start(nodes: Nodes, rank: int) -> None:
    nodes.enter(rank // RANKS_HERE)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=nodes.init_method)


class Net(nn.Module):
    """Layers, some of which a rank may leave out; before one of them it may do something else."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        with seeding(0):
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.skipped: set[int] = set()
        self.before = {}

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            self.before.get(number, lambda: None)()
            if number not in self.skipped:
                x = x + torch.tanh(layer(x))
        return x.square().mean()


def inputs(step: int, rank: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, rank: int, steps: int, width: int = WIDTH) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(inputs(step, rank, width))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(net: nn.Module, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    return zs.shard(net, optimizer, units=("Linear",), **{"stage": 3, "stall_timeout_s": 20.0} | options)


# -- numbers and bytes -----------------------------------------------------------------------------------------------


def crossing(rank: int, ranks: int, nodes: Nodes):
    """By way: losses, bytes of this node over the link in a step, the formula of this rank, and notes."""
    start(nodes, rank)
    found = {}
    for name, (options, _) in WAYS.items():
        model, optimizer = sharded(Net(), **options)
        losses = train(model, optimizer, rank, 1)
        dist.barrier()
        before = nodes.sent_nbytes()
        losses += train(model, optimizer, rank, 3)
        dist.barrier()
        report = zs.report(model)
        found[name] = losses, (nodes.sent_nbytes() - before) / 3, report.theory_between_nbytes_per_step
        zs.close(model)
    return found


@pytest.mark.processes
def test_each_byte_crosses_once_for_a_node_and_losses_are_those_of_one_hop(nodes):
    ranks = run_processes(crossing, 4, nodes)
    for name, (options, parts) in WAYS.items():
        plain = "zero_quantized_weights" not in options
        for rank, found in enumerate(ranks):
            losses, sent, _ = found[name]
            assert losses == pytest.approx(found["one hop"][0], rel=1e-6 if plain else 5e-3), (name, rank)
            theory = sum(ranks[2 * (rank // 2) + place][name][2] for place in range(2))
            assert theory == pytest.approx(parts * M, rel=0.03), name
            assert sent == pytest.approx(theory, rel=0.05), (name, rank, sent / M)


# -- waits that could be circles -------------------------------------------------------------------------------------


def ragged(rank: int, disk: str) -> None:
    """A rank leaves layers out: the others meet it where it comes again."""
    for options in ({}, {"shard_size": 2}, {"zero_hpz_partition_size": 2}, {"zero_hpz_partition_size": 2, **PACKED}):
        model, optimizer = sharded(Net(), **options)
        train(model, optimizer, rank, 1)  # the record of a step tells what others gather
        model.skipped = {1: {1}, 3: {0, 2}}.get(rank, set())
        train(model, optimizer, rank, 2)
        model.skipped = {0: {3}, 2: {1, 2}}.get(rank, set())
        train(model, optimizer, rank, 2)
        zs.close(model)


def many_gathers(rank: int, disk: str) -> None:
    """All units are small, and all are gathered ahead."""
    for options in ({}, {"shard_size": 2}, {"zero_hpz_partition_size": 2}, {"zero_quantized_gradients": "low_rank"}):
        model, optimizer = sharded(Net(30, 16), prefetch_nbytes=1 << 24, **options)
        train(model, optimizer, rank, 3, 16)
        zs.close(model)


def uneven_data(rank: int, disk: str) -> None:
    for options in ({}, {"shard_size": 2}, {"zero_hpz_partition_size": 2}):
        model, optimizer = sharded(Net(), **options)
        with zs.join(model):
            train(model, optimizer, rank, 1 + rank)
        zs.close(model)


def evaluation_and_several_models(rank: int, disk: str) -> None:
    first, one = sharded(Net())
    second, two = sharded(Net(), zero_hpz_partition_size=2)
    third, three = sharded(Net(), shard_size=2)
    for step in range(2):
        for model in (second, first, third):
            with torch.no_grad():
                model(inputs(7, rank))
        (first(inputs(step, rank)) + second(inputs(step, rank)) + third(inputs(step, rank))).backward()
        for optimizer in (three, one, two):
            optimizer.step()
            optimizer.zero_grad()
    states = [zs.full_state_dict(model) for model in (first, second, third)]
    for name, value in states[0].items():
        for other in states[1:]:
            assert torch.allclose(value, other[name], rtol=1e-5, atol=1e-6), name
    for model in (first, second, third):
        zs.close(model)


def offloaded(rank: int, disk: str) -> None:
    """Shards come from the disk, then go in two hops: the same numbers as from memory."""
    tier = zs.Offload("nvme", path=disk)
    for options in ({}, {"zero_hpz_partition_size": 2}, {"shard_size": 2}):
        model, optimizer = sharded(Net(), **options)
        expected = train(model, optimizer, rank, 3)
        zs.close(model)
        model, optimizer = sharded(Net(), offload_param=tier, offload_optimizer=tier, offload_gradient=tier, **options)
        assert train(model, optimizer, rank, 3) == expected
        zs.close(model)


CASES = (ragged, many_gathers, uneven_data, evaluation_and_several_models, offloaded)


def go_on(rank: int, ranks: int, nodes: Nodes, disk: str):
    """Seconds of each case."""
    start(nodes, rank)
    pool._LONGEST_S = 0.3  # who waits for a rank that left layers out takes further memory sooner
    took = {}
    for case in CASES:
        begin = time.monotonic()
        case(rank, disk)
        took[case.__name__] = time.monotonic() - begin
    return took


# each of its programs once hung; the failures beside it, and test_mesh_features on threads, run in ./test
@pytest.mark.slow  # 20 s
@pytest.mark.processes
def test_nobody_waits_in_a_circle(nodes, disk):
    for took in run_processes(go_on, 4, nodes, str(disk)):
        assert list(took) == [case.__name__ for case in CASES]


def unequal(rank: int, ranks: int, nodes: Nodes):
    start(nodes, rank)
    model, optimizer = sharded(Net())
    return train(model, optimizer, rank, 2), zs.report(model).deviations


@pytest.mark.processes
def test_nodes_of_two_ranks_and_one_go_in_one_hop_and_say_so(nodes):
    for losses, notes in run_processes(unequal, 3, nodes):
        assert len(losses) == 2 and any("unequally many ranks" in note for note in notes), notes


# -- failures --------------------------------------------------------------------------------------------------------


def lose_the_image():
    raise KeyError("no such image")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dawdle_in_the_tokenizer():
    time.sleep(2.5 * STALL_S)


def fail(rank: int, ranks: int, nodes: Nodes, culprit: int, what, options: dict):
    """(class, rank, text) of what this library raised here; other exceptions end the rank."""
    start(nodes, rank)
    stall_s = STALL_S if what is dawdle_in_the_tokenizer else NEVER_S
    model, optimizer = sharded(Net(), **options | {"stall_timeout_s": stall_s})
    train(model, optimizer, rank, 2)
    if rank == culprit:
        model.before = {2: what}  # the first hop of the gather of layer 2, of which it is a part, is under way
    try:
        train(model, optimizer, rank, 2)
    except zs.ZeroshardError as error:
        return type(error).__name__, getattr(error, "rank", None), str(error)


HOPS = {"two hops": {}, "groups": {"shard_size": 2}, "packed": {"zero_hpz_partition_size": 2, **PACKED}}


@pytest.mark.processes
@pytest.mark.parametrize("way", HOPS if SLOW else ["two hops"])
def test_an_exception_on_another_node_is_told_once_as_that_of_its_rank(nodes, way):
    results = run_processes(fail, 4, nodes, 3, lose_the_image, HOPS[way], grace_s=100.0, check=False)
    assert "KeyError: 'no such image'" in results[3].error
    for rank in range(3):
        assert results[rank].value is not None, (rank, results[rank].error)
        kind, culprit, text = results[rank].value
        assert (kind, culprit) == ("PeerFailed", 3), text
        assert "KeyError: 'no such image'" in text and text.count("Traceback (") == 1, text


@pytest.mark.processes
@pytest.mark.parametrize("way", HOPS if SLOW else ["groups"])
def test_a_rank_that_is_killed_is_named_on_both_nodes(nodes, way):
    results = run_processes(fail, 4, nodes, 2, die, HOPS[way], grace_s=100.0, check=False)
    for rank in (0, 1, 3):
        assert results[rank].value is not None, (rank, results[rank].error)
        kind, culprit, text = results[rank].value
        assert (kind, culprit) == ("PeerFailed", 2) and "killed" in text, text


@pytest.mark.processes
@pytest.mark.parametrize("way", HOPS if SLOW else ["packed"])
def test_a_rank_that_stands_still_is_found_from_both_nodes(nodes, way):
    results = run_processes(fail, 4, nodes, 1, dawdle_in_the_tokenizer, HOPS[way], grace_s=100.0, check=False)
    for result in results:
        assert result.value is not None, (result.rank, result.error)
        kind, _, text = result.value
        assert kind == "StallError" and "rank 1 computes or sleeps in" in text and "dawdle_in_the_tokenizer" in text, text
