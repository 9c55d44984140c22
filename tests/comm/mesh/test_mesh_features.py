"""What composes with a second axis: four ranks in two nodes of two. The bits of one process that adds in the same order."""

import copy
import itertools
import math
import tempfile
import time

import pytest
import torch
from equivalence_kit import CLIP, SCALE
from helpers import Branches, OddGPT, Task, adamw, assert_equal_runs, differences, flat, seeded, token_batches
from mesh_kit import expected, on_ranks, options_of, trained

import zeroshard as zs
from zeroshard import Offload
from zeroshard.engine.ledger import SECONDARY
from zeroshard.engine.runtime import runtime_of
from zeroshard.packing.hierarchical import HierarchicalComm

WORLD, SIZE = 4, 2
MODEL = seeded(OddGPT)
KINDS = ("groups", "states", "hpz")
BOTH = ("shared", "tagged")


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def shard(kind, options, stage=3, model=MODEL, make=adamw, **more):
    model = copy.deepcopy(model)
    return zs.shard(model, make(model.parameters()), stage=stage, **options_of(kind, SIZE), **options, **more)


def train(model, optimizer, rank, data):
    for micros in data:
        for ranks in micros:
            model(*ranks[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("network", ["shared", "tagged", "ordered"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_has_the_bits_of_one_process(precision, network):
    task = Task(MODEL, token_batches(2, 2, WORLD), clip=CLIP)
    low = {"precision": precision, **({"loss_scale": SCALE["fp16"]} if precision == "fp16" else {})}
    rows = [*itertools.product(("groups", "states"), (0, 1, 2, 3)), ("hpz", 3)]
    cells = [(kind, {**options_of(kind, SIZE), "stage": stage, **low}) for kind, stage in rows]
    results = trained(WORLD, network, task, [cell for _, cell in cells])
    for number, (kind, cell) in enumerate(cells):
        first = results[0][number]
        one = expected(task, WORLD, kind, SIZE, precision, first.coefficients, SCALE[precision])
        for outcomes in results:
            assert_equal_runs(outcomes[number], one, str(cell))


@pytest.mark.parametrize("network", BOTH)
@pytest.mark.parametrize("tiers", ["optimizer", "host", "disk", "delayed"])
def test_tiers(tiers, network, tmp_path):
    disk = Offload("nvme", path=str(tmp_path), any_filesystem=True, buffer_nbytes=1 << 16, buffer_count=2)
    more = {
        "optimizer": {"offload_optimizer": "cpu"},
        "host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
        "disk": {"offload_optimizer": disk, "offload_param": disk, "offload_gradient": disk},
        "delayed": {"offload_optimizer": "cpu", "delayed_update": 1},
    }[tiers]
    task = Task(MODEL, token_batches(3, 2, WORLD), clip={} if tiers == "delayed" else CLIP, states=True)
    cells = [{**options_of(kind, SIZE), "stage": 3, **more} for kind in KINDS]
    results = trained(WORLD, network, task, cells)
    first = results[0][1]
    if tiers != "delayed":
        assert_equal_runs(first, expected(task, WORLD, "states", SIZE, "fp32", first.coefficients, 1.0))
    for outcomes in results:
        for cell, got in zip(cells, outcomes, strict=True):
            assert_equal_runs(got, first, str(cell))


@pytest.mark.parametrize("network", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_use_different_units(kind, network):
    """At stage 1 in any order, so that reductions begin in other orders than they can end; at stage 3 in the recorded one."""
    everything = ((0, 1, 2),) * 4
    forward = [everything, ((0, 2), (1,), (0,), (0, 1)), ((), (1, 2), (1,), (2,)), ((1,), (), (), ())]
    crossed = [everything, ((0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)), ((2, 0), (1,), (0,), (1, 0)), ((), (2, 1), (1,), (2,))]
    for stage, routes in ((1, crossed), (3, forward)) if kind != "hpz" else ((3, forward),):
        generator = torch.Generator().manual_seed(5)
        data = [[[(torch.randn(3, 6, generator=generator), route) for route in ranks]] for ranks in routes]
        task = Task(seeded(Branches), data, adamw, states=True)
        one = expected(task, WORLD, kind, SIZE, "fp32", [1.0] * 4, 1.0)
        for outcomes in trained(WORLD, network, task, [{**options_of(kind, SIZE), "stage": stage, "units": "leaf"}]):
            assert_equal_runs(outcomes[0], one, f"stage {stage}")


def _partly_frozen():
    model = seeded(OddGPT)
    model.blocks[0].into.weight.requires_grad_(False)
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    return model


@pytest.mark.parametrize("network", BOTH)
def test_frozen_and_tied_parameters_and_checkpointed_blocks(network):
    model = _partly_frozen()
    task = Task(model, token_batches(2, 1, WORLD))
    cells = [{**options_of(kind, SIZE), "stage": 3} for kind in KINDS]
    one = expected(task, WORLD, "states", SIZE, "fp32", [1.0, 1.0], 1.0)
    other = Task(zs.checkpoint_activations(copy.deepcopy(model), offload="cpu", min_numel=1), task.data)
    for given in (task, other):
        for outcomes in trained(WORLD, network, given, cells):
            for cell, got in zip(cells, outcomes, strict=True):
                assert not differences(got.weights, one.weights), str(cell)


@pytest.mark.parametrize("network", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_states_gradients_values_and_writes(kind, network):
    """Looked at and written between steps; what was written outdates secondary shards, and evaluations see it."""
    data = token_batches(2, 1, WORLD)
    batch = data[0][0][0]

    def on_rank(rank, options):
        model, optimizer = shard(kind, options)
        model(*data[0][0][rank]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        state = zs.state_of(model.blocks[0].into.weight, "exp_avg").full()
        first = model(*batch).item()  # in a graph: a training forward, whose backward never comes
        with torch.no_grad():
            evaluated = model(*batch).item()
            for param in model.parameters():
                param.mul_(0.5)
            after = model(*batch).item()
        whole = zs.full_state_dict(model)
        with zs.gathered(model.blocks[0].into, modifier_rank=3):
            if rank == 3:
                with torch.no_grad():
                    model.blocks[0].into.weight.fill_(0.25)
        with torch.no_grad():
            changed = model(*batch).item()
        with zs.gathered(model.blocks[1].out, write=True), torch.no_grad():
            model.blocks[1].out.weight.fill_(0.125)
        weights = zs.full_state_dict(model)
        with torch.no_grad():
            last = model(*batch).item()
        zs.close(model)
        with torch.no_grad():
            closed = model(*batch).item()
        return state, norm, first, evaluated, after, whole, changed, weights, last, closed

    results = on_ranks(WORLD, network, on_rank)
    state, norm, first, evaluated, after, whole, changed, weights, last, closed = results[0]
    other = copy.deepcopy(MODEL)
    other.load_state_dict(whole)
    assert first == evaluated != after == other(*batch).item() and after != changed != last == closed
    assert torch.equal(weights["blocks.0.into.weight"], torch.full_like(weights["blocks.0.into.weight"], 0.25))
    assert torch.equal(weights["blocks.1.out.weight"], torch.full_like(weights["blocks.1.out.weight"], 0.125))
    for others in results[1:]:
        assert torch.equal(state, others[0]) and others[1:5] == results[0][1:5]
        assert not differences(weights, others[7])
    task = Task(MODEL, data[:1], clip={0: 0.5})
    one = expected(task, WORLD, kind, SIZE, "fp32", None, 1.0)
    assert norm == pytest.approx(one.norms[0], rel=1e-5)
    assert torch.allclose(whole["norm.weight"] * 2, one.weights["norm.weight"], atol=1e-6)


@pytest.mark.parametrize("network", BOTH)
def test_secondary_shards_serve_backward_and_end_with_a_step(network):
    data = token_batches(3, 2, WORLD)

    def on_rank(rank, options):
        model, optimizer = shard("hpz", options, units="auto")
        runtime = runtime_of(model)
        held = []
        for micros in data:
            before = {kind: traffic.between for kind, traffic in runtime.tiers.ledger.traffic.items()}
            for ranks in micros:
                model(*ranks[rank]).backward()
            held.append(runtime.tiers.ledger.traffic["gather"].between - before.get("gather", 0))
            optimizer.step()
            optimizer.zero_grad()
        numbers = [group.values.number for group in runtime.groups]
        left = [number for number in numbers if runtime.topology.shards.holds(number)]
        secondary = runtime.tiers.ledger.now[SECONDARY]
        values = sum(group.values.nbytes for group in runtime.groups)
        zs.close(model)
        return held, left, secondary, values, {name: nbytes for name, nbytes in runtime.tiers.ledger.now.items() if nbytes}

    for held, left, secondary, values, rest in on_ranks(WORLD, network, on_rank, node_size=SIZE):
        assert not left and secondary == 2 * values, (secondary, values)
        assert rest == {}
        if network == "tagged":  # once a step, whatever the number of micro-batches
            assert held[0] == held[1] == held[2] == values


@pytest.mark.parametrize("network", BOTH)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_all_ranks_skip_what_is_not_finite_and_name_the_rank(kind, network, precision):
    data = token_batches(2, 1, WORLD)

    def on_rank(rank, options):
        low = {"initial_loss_scale": 256.0} if precision == "fp16" else {}
        model, optimizer = shard(kind, options, precision=precision, **low)
        records = []
        for step, micros in enumerate(data):
            loss = model(*micros[0][rank])
            (loss * (math.nan if step == 0 and rank == 3 else 1.0)).backward()
            optimizer.step()
            records.append(optimizer.last_step)
            optimizer.zero_grad()
        return records, zs.full_state_dict(model, masters=True)

    results = on_ranks(WORLD, network, on_rank)
    for records, weights in results:
        assert [record.skipped for record in records] == [True, False]
        assert not differences(weights, results[0][1])
        names = records[0].nonfinite if hasattr(records[0], "nonfinite") else str(records[0])
        assert "(rank 3)" in str(names), names


@pytest.mark.parametrize("network", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_uneven_data(kind, network):
    lengths = (3, 1, 2, 4)
    data = token_batches(4, 1, WORLD)

    def on_rank(rank, options, stage):
        model, optimizer = shard(kind, options, stage=stage, make=sgd)
        with zs.join(model):
            for micros in data[: lengths[rank]]:
                model(*micros[0][rank]).backward()
                optimizer.step()
                optimizer.zero_grad()
        return zs.full_state_dict(model)

    for stage in (1, 3) if kind != "hpz" else (3,):
        model = copy.deepcopy(MODEL)
        optimizer = sgd(model.parameters())
        for step, micros in enumerate(data):
            present = [rank for rank in range(WORLD) if step < lengths[rank]]
            for rank in present:
                (model(*micros[0][rank]) / len(present)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results = on_ranks(WORLD, network, lambda rank, options, stage=stage: on_rank(rank, options, stage))
        for weights in results:
            assert not differences(weights, results[0])
            assert torch.allclose(flat(weights), flat(model.state_dict()), atol=1e-6)


@pytest.mark.parametrize("network", BOTH)
def test_averages_matrices_moved_states_and_second_derivatives(network):
    data = token_batches(2, 1, WORLD)

    def muon(model):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        return zs.Muon([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}], lr=0.02)

    def on_rank(rank, options):
        found = []
        for kind in KINDS:
            model = copy.deepcopy(MODEL)
            model, optimizer = zs.shard(model, muon(model), stage=3, **options_of(kind, SIZE), **options)
            average = zs.ema(model, 0.9)
            train(model, optimizer, rank, data[:1])
            zs.offload_states(model)
            zs.reload_states(model)
            train(model, optimizer, rank, data[1:])
            with average.swapped(model), torch.no_grad():
                lent = model(*data[0][0][0]).item()
            loss = model(*data[0][0][rank])
            loss.backward(create_graph=True)
            grads = zs.full_gradients(model)
            found.append((zs.full_state_dict(model), average.full_state_dict(), lent, grads))
            optimizer.zero_grad()
            zs.close(model)
        return found

    results = on_ranks(WORLD, network, on_rank)
    first = results[0][0]
    for found in results:
        for weights, averages, lent, grads in found:
            assert not differences(weights, first[0]) and not differences(averages, first[1])
            assert lent == first[2] and not differences(grads, first[3])


@pytest.mark.parametrize(
    "network, options, hops",
    [("tagged", {}, 2), ("tagged", {"hierarchical": False}, 1), ("ordered", {}, 2), ("ordered", {"hierarchical": False}, 1),
     ("ordered", {"zero_quantized_gradients": "int8"}, 2)],
)  # fmt: skip
def test_hosts_are_nodes_unless_told_otherwise(network, options, hops):
    """Over NCCL as well: its gathers go around hosts in rings, but reductions go from each rank straight to each."""

    def on_rank(rank, comm):
        model, _ = zs.shard(torch.nn.Linear(64, 64), stage=3, **options, **comm)
        return isinstance(runtime_of(model).topology.shards, HierarchicalComm)

    assert on_ranks(4, network, on_rank, node_size=2) == [hops == 2] * 4


def test_a_load_forgets_what_packing_has_lost():
    """Steps after a load are those of a model that has just been built, whatever was trained before."""

    def on_rank(rank, comm):
        def built():
            model = torch.nn.Linear(64, 64, bias=False)
            with torch.no_grad():
                model.weight.copy_(torch.linspace(-1, 1, 4096).view(64, 64))
            return zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, **comm, **packed)

        def step(model, optimizer, scale):
            model(scale * torch.linspace(-1, 1, 64 * 4).view(4, 64).roll(rank, 0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return zs.full_state_dict(model)["weight"]

        model, optimizer = built()
        saved = zs.save(folder, model, optimizer).path
        for scale in (1.0, 3.0):
            step(model, optimizer, scale)
        zs.load(saved, model, optimizer)
        return torch.equal(step(model, optimizer, 1.0), step(*built(), 1.0))

    for codec in ("int4", "top_k"):
        packed = {"zero_quantized_gradients": zs.Compression(codec, min_numel=1, ratio=0.1, error_feedback=True)}
        with tempfile.TemporaryDirectory() as folder:
            assert all(on_ranks(2, "tagged", on_rank)), codec


@pytest.mark.parametrize("kind", ["groups", "hpz"])
def test_a_rank_that_has_all_it_needs_may_leave_before_the_others_second_hop(kind):
    """The last gather of a program: nodes (0, 1) and (2, 3); rank 1 is slow to begin its second hop, which rank 0 needs alone."""
    seen = {}

    def on_rank(rank, options):
        model, _ = shard(kind, options)
        group = next(group for group in runtime_of(model).groups if group.values.sharded)
        runtime_of(model).comm.exchange(b"", "together")
        work = group.values.gather()
        if rank == 1:
            time.sleep(1.0)  # ranks 2 and 3 end meanwhile
        work.wait()
        seen[rank] = group.values.full.clone()

    on_ranks(WORLD, "shared", on_rank)
    assert all(torch.equal(seen[rank], seen[0]) for rank in range(WORLD))
