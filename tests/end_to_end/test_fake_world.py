"""The real runtime on 8 and on 1,024 imagined ranks, on fake tensors: exact collectives, exact bytes, peak memory.

Nothing here is measured by a clock: FakeComm counts what one rank starts, fake tensors have sizes and no memory, so a
model of 10^12 parameters takes seconds. Psi: parameters; N: ranks; G: flat buffers (one a unit, here).

Per step with one backward, each rank starts (ZeRO, arXiv 1910.02054, section 7)

    stage 0       G reductions, G gathers of gradients         2 Psi (N - 1) / N elements sent
    stages 1, 2   G reductions, G gathers of parameters        2 Psi (N - 1) / N
    stage 3       G reductions, 2 G gathers of parameters      3 Psi (N - 1) / N
"""

import gc

import pytest
import torch
from imagined import LARGE, SMALL, Checkpointed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.engine.ledger import GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS, PARTIAL, STAGING
from zeroshard.engine.runtime import Runtime, runtime_of
from zeroshard.planner.models.gpt import GPT, GPTConfig

TRILLION = GPTConfig(vocab_size=50304, seq_len=2048, dim=36864, layers=64, heads=144)  # wide: time goes with layers
SHAPES = {8: SMALL, 1024: LARGE}
ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
ALL_WORLDS = pytest.mark.parametrize("world_size", [8, 1024])


class Reentrant(Checkpointed):
    reentrant = True


def build(shape: GPTConfig, world_size: int, blocks: type | None = None, **options):
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zs.shard(model, optimizer, comm=FakeComm(0, world_size), **options)
    if blocks is not None:
        model.blocks.__class__ = blocks
    tokens = torch.zeros(1, shape.seq_len, dtype=torch.long)
    return model, optimizer, tokens


def counted(runtime: Runtime) -> dict[str, tuple[int, int]]:
    """Kind of collective -> (calls, bytes) since the last call, so that steps can be told apart."""
    now = {kind: (t.count, t.nbytes) for kind, t in runtime.tiers.ledger.traffic.items()}
    runtime.tiers.ledger.traffic.clear()
    return now


def step(model, optimizer, tokens) -> dict[str, tuple[int, int]]:
    counted(runtime_of(model))
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return counted(runtime_of(model))


def padded_numel(runtime: Runtime) -> int:
    return sum(group.layout.numel for group in runtime.groups)


@ALL_STAGES
@ALL_WORLDS
def test_every_step_has_exactly_the_collectives_and_bytes_of_its_stage(stage, world_size):
    with FakeTensorMode():
        model, optimizer, tokens = build(SHAPES[world_size], world_size, stage=stage)
        runtime = runtime_of(model)
        groups, gathers = len(runtime.groups), 2 if stage == 3 else 1
        once = padded_numel(runtime) * 4 // world_size * (world_size - 1)  # fp32
        for _ in range(3):  # the recording step, and steps that follow the record
            assert step(model, optimizer, tokens) == {"reduce": (groups, once), "gather": (gathers * groups, gathers * once)}
        theory = zs.report(model).theory_nbytes_per_step
        assert (1 + gathers) * once == pytest.approx(theory, rel=1e-3)  # what padding costs
        assert not runtime.schedule.notes


@ALL_WORLDS
def test_padding_is_below_a_thousandth_at_block_units(world_size):
    """At most 31 elements after each parameter and 32 a shard: see test_flat_layout.py for the bound."""
    with FakeTensorMode():
        model, _, _ = build(SHAPES[world_size], world_size, stage=3)
        runtime = runtime_of(model)
        true_numel = sum(p.numel() for p in model.parameters())
        assert true_numel == sum(group.layout.true_numel for group in runtime.groups)
        assert padded_numel(runtime) - true_numel < 1e-3 * true_numel


@ALL_STAGES
@pytest.mark.parametrize("blocks", [Checkpointed, Reentrant])
def test_recomputed_activations_need_no_further_gather(stage, blocks):
    """Recomputation runs inside the gather that backward needs anyway: forward + backward, both kinds."""
    with FakeTensorMode():
        model, optimizer, tokens = build(SMALL, 8, blocks, stage=stage)
        runtime = runtime_of(model)
        groups = len(runtime.groups)
        for _ in range(3):
            counts = {kind: count for kind, (count, _) in step(model, optimizer, tokens).items()}
            assert counts == {"reduce": groups, "gather": 2 * groups if stage == 3 else groups}
        assert not runtime.schedule.notes and runtime.tiers.ledger.now[GATHERED] == 0
        assert not runtime.schedule.tracks[False].current  # a training step leaves nothing in the other record


@ALL_STAGES
def test_accumulation_without_communication_reduces_once(stage):
    micro = 3
    with FakeTensorMode():
        model, optimizer, tokens = build(SMALL, 8, stage=stage)
        runtime = runtime_of(model)
        groups = len(runtime.groups)
        for _ in range(2):
            counted(runtime)
            for number in range(micro - 1):
                with zs.accumulate(model):
                    model(tokens, tokens).backward()
                assert "reduce" not in runtime.tiers.ledger.traffic, number
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts = {kind: count for kind, (count, _) in counted(runtime).items()}
            assert counts == {"reduce": groups, "gather": 2 * micro * groups if stage == 3 else groups}
        # local sums: one whole gradient in the gradient dtype, where the stage does not keep one already
        held = padded_numel(runtime) * 4 if stage >= 2 else 0
        assert runtime.tiers.ledger.peak[PARTIAL] == held and runtime.tiers.ledger.now[PARTIAL] == 0


@ALL_STAGES
def test_evaluation_gathers_each_unit_once_and_reduces_nothing(stage):
    with FakeTensorMode():
        model, optimizer, tokens = build(SMALL, 8, stage=stage)
        runtime = runtime_of(model)
        step(model, optimizer, tokens)
        with torch.no_grad():
            model(tokens)
        assert counted(runtime) == ({} if stage < 3 else {"gather": (len(runtime.groups), padded_numel(runtime) * 4 // 8 * 7)})
        assert runtime.tiers.ledger.now[GATHERED] == 0


# its gathers: above
@pytest.mark.parametrize("blocks", [nn.ModuleList, Checkpointed, pytest.param(Reentrant, marks=pytest.mark.slow)])
@pytest.mark.parametrize("budget_units", [0, 1, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_gathered_memory_is_the_units_in_use_and_the_prefetch_budget(blocks, budget_units, overlap):
    """In use at one time: the root (its forward surrounds all others) and one other unit, at most the largest (a block).

    Ahead of use lies what the budget allows, but always the next unit: max(budget, largest). A block is given up
    before the one after the next is fetched, in forward when it ends, in backward when its last gradient is there.
    Without overlap nothing lies ahead. Staging: one buffer being filled and one being reduced.
    """
    with FakeTensorMode():
        block = GPT(SMALL).blocks[0]
        block_nbytes = sum(p.numel() for p in block.parameters()) * 4
        budget = budget_units * (block_nbytes + 4096)
        model, optimizer, tokens = build(SMALL, 8, blocks, stage=3, overlap=overlap, prefetch_nbytes=budget)
        runtime = runtime_of(model)
        largest = max(unit.gathered_nbytes for unit in runtime.units)
        root = next(unit.gathered_nbytes for unit in runtime.units if unit.name == "(root)")
        ahead = max(budget, largest) if overlap else 0
        for _ in range(3):
            step(model, optimizer, tokens)
        assert runtime.tiers.ledger.peak[GATHERED] <= root + largest + ahead
        assert runtime.tiers.ledger.peak[GATHERED] < padded_numel(runtime) * 4  # far from the whole model
        assert runtime.tiers.ledger.peak[STAGING] <= 2 * largest
        assert runtime.tiers.ledger.now[GATHERED] == 0


@ALL_STAGES
@ALL_WORLDS
def test_memory_at_rest_is_the_closed_formula(stage, world_size):
    """P + G + 2 P (AdamW's moments), each whole or 1/N, in fp32; the excess is padding."""
    with FakeTensorMode():
        model, optimizer, tokens = build(SHAPES[world_size], world_size, stage=stage)
        step(model, optimizer, tokens)
        report = zs.report(model)
        for state, nbytes in report.formula.items():
            # the shards of a small unit are rounded up to 32 elements: norms and positions cost 4 KiB each
            assert nbytes <= report.at_rest[state] + world_size and report.at_rest[state] <= nbytes * 1.001 + 4096, state
        whole = sum(p.numel() for p in model.parameters()) * 4
        share = {0: (1, 1, 1), 1: (1, 1, world_size), 2: (1, world_size, world_size), 3: (world_size,) * 3}[stage]
        sizes = {PARAMETERS: whole, GRADIENTS: whole, OPTIMIZER: 2 * whole}
        assert report.formula == {s: -(-n // d) for (s, n), d in zip(sizes.items(), share, strict=True)}


@ALL_STAGES
def test_the_ledger_counts_every_byte_that_lives(stage):
    """All storages alive after a step, found by the garbage collector, against the ledger."""
    with FakeTensorMode() as mode:
        model, optimizer, tokens = build(SMALL, 8, stage=stage)
        step(model, optimizer, tokens)
        gc.collect()
        storages = {}
        for item in gc.get_objects():
            if issubclass(type(item), FakeTensor) and item.fake_mode is mode:
                storage = item.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        ledger = runtime_of(model).tiers.ledger
        counted_nbytes = sum(ledger.now.values())
        slack = 64 * len(runtime_of(model).groups) + tokens.nbytes + 4096  # step counters, the batch
        assert counted_nbytes <= sum(storages.values()) <= counted_nbytes + slack


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])  # 8 s each; stage 0 in small above
def test_a_trillion_parameters_on_1024_ranks(stage):
    """ZeRO's own example (section 1): 10^12 parameters, bf16 with fp32 masters: 16 TB plain, 16 GB a rank at stage 3."""
    world_size = 1024
    with FakeTensorMode():
        model, optimizer, tokens = build(TRILLION, world_size, Checkpointed, stage=stage, precision="bf16", prefetch_nbytes=0)
        runtime = runtime_of(model)
        psi = sum(group.layout.true_numel for group in runtime.groups)
        assert psi > 10**12
        groups = len(runtime.groups)
        counts = {kind: count for kind, (count, _) in step(model, optimizer, tokens).items()}
        assert counts == {"reduce": groups, "gather": 2 * groups if stage == 3 else groups}
        held = sum(zs.report(model).at_rest.values())
        # bytes a parameter: 2 (bf16) + 4 (fp32 gradient) + 4 (master) + 8 (moments)
        assert held == pytest.approx(18 * psi / (world_size if stage == 3 else 1), rel=1e-3)
        if stage == 3:
            root = next(unit.gathered_nbytes for unit in runtime.units if unit.name == "(root)")
            largest = max(unit.gathered_nbytes for unit in runtime.units)
            assert runtime.tiers.ledger.peak[GATHERED] <= root + 2 * largest
            assert runtime.tiers.ledger.peak[STAGING] <= 2 * largest
