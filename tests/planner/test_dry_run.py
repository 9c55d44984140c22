"""A dry run says what the runtime says: the same bytes, collectives and copies, and all memory besides."""

from functools import partial

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.config import Tier
from zeroshard.engine.ledger import GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS
from zeroshard.errors import ConfigError
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.planner.plan import ACTIVATIONS, Plan
from zeroshard.planner.simulator.trace import Resource

SHAPE = GPTConfig(vocab_size=512, seq_len=128, dim=128, layers=4, heads=4)
ROWS, SEQ = 2, 128


def planned(**options) -> Plan:
    return zs.plan(lambda: GPT(SHAPE), batch=(ROWS, SEQ), **options)


def blocks(plan: Plan) -> list[int]:
    return [nbytes for name, nbytes in plan.activations.items() if name.startswith("blocks.")]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_trace_sends_what_the_ledger_has_counted_and_the_formula_says(stage):
    plan = planned(ranks=8, stage=stage)
    traced = plan.trace.total(Resource.INSIDE)
    assert traced == plan.sent["dp"]
    assert traced == pytest.approx(plan.report.theory_nbytes_per_step, rel=5e-3)  # what padding costs
    assert plan.trace.total(Resource.BETWEEN) == 0


def test_flops_are_those_of_the_formula():
    """Forward: 2 a parameter of a matrix and token, and 4 s h a token and layer for attention; with backward three times that."""
    matrices = sum(
        p.numel() for name, p in GPT(SHAPE).named_parameters() if p.dim() == 2 and not name.startswith(("embedding", "position"))
    )
    attention = 4 * SEQ * SHAPE.dim * SHAPE.layers
    expected = 3 * ROWS * SEQ * (2 * matrices + attention)
    assert planned(ranks=2).trace.model_flops == pytest.approx(expected, rel=1e-2)


def test_recomputation_costs_another_forward_and_keeps_only_what_passes_between_blocks():
    plain, light = planned(ranks=2, stage=2), planned(ranks=2, stage=2, checkpointing=True)
    flops = [sum(task.flops for task in plan.trace.tasks) for plan in (plain, light)]
    assert 1.2 < flops[1] / flops[0] < 1.34 and plain.trace.model_flops == light.trace.model_flops
    boundary = ROWS * SEQ * SHAPE.dim * 4
    assert blocks(light)[1:] == pytest.approx([boundary] * (SHAPE.layers - 1), rel=0.1)
    assert min(blocks(plain)[1:]) > 10 * boundary


def test_what_is_kept_of_a_block_is_proportional_to_the_batch():
    one, two = (zs.plan(lambda: GPT(SHAPE), batch=(rows, SEQ), ranks=4, stage=2) for rows in (2, 4))
    assert all(b == pytest.approx(2 * a, rel=1e-2) for a, b in zip(blocks(one)[1:], blocks(two)[1:], strict=True))


def wide(**options) -> Plan:
    """A plan of one matrix of 1024 x 1024, whose activations are some KiB."""
    return zs.plan(
        lambda: nn.Linear(1024, 1024, bias=False),
        batch=lambda: torch.zeros(1, 1024),
        loss=lambda model, x: model(x).sum(),
        **options,
    )


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_gpu_steps_all_tensors_at_once_unless_told_otherwise_and_a_cpu_one_by_one(optimizer):
    def in_step(separate, **options):
        phases = planned(
            ranks=2, stage=1, separate=separate, optimizer=partial(optimizer, lr=0.1, weight_decay=0.1, **options)
        ).phases
        return next(phase.held[Tier.DEVICE].get(ACTIVATIONS, 0) for phase in phases if phase.name == "step")

    at_once, one_by_one = (in_step(True, foreach=foreach) for foreach in (True, False))
    assert in_step(True) == at_once > one_by_one
    assert in_step(False) == in_step(False, foreach=False) < in_step(False, foreach=True)


@pytest.mark.parametrize("precision, itemsize", [("fp32", 4), ("bf16", 2)])
def test_a_gpu_holds_the_slices_that_a_reduction_receives(precision, itemsize):
    """Beside the gradient that autograd has computed. One rank receives none, and ranks on CPUs read each other's memory."""

    def in_backward(ranks, separate):
        phases = wide(ranks=ranks, separate=separate, stage=3, precision=precision, reduce_dtype=precision).phases
        return next(phase.held[Tier.DEVICE].get(ACTIVATIONS, 0) for phase in phases if phase.name == "backward")

    alone, totals = in_backward(1, True), (1 << 20) / 4 * 4 * (precision == "bf16")
    assert in_backward(4, True) - alone == pytest.approx(itemsize << 20, abs=totals + (64 << 10))
    assert in_backward(4, False) == pytest.approx(in_backward(1, False), abs=64 << 10)


def test_states_rest_where_they_were_told_to_and_the_step_moves_them():
    plan = planned(ranks=4, stage=3, precision="bf16", offload_optimizer="nvme", offload_param="cpu", offload_path="/nowhere")
    psi = plan.num_parameters
    step = {phase.name: phase for phase in plan.phases}["step"].held
    assert step[Tier.DISK][OPTIMIZER] == pytest.approx(8 * psi / 4, rel=1e-2)
    assert step[Tier.DISK][MASTERS] == pytest.approx(4 * psi / 4, rel=1e-2)
    assert step[Tier.HOST][PARAMETERS] == pytest.approx(2 * psi / 4, rel=1e-2)
    assert step[Tier.HOST][GRADIENTS] == pytest.approx(4 * psi / 4, rel=1e-2)
    assert PARAMETERS not in step[Tier.DEVICE]
    for resource, nbytes in ((Resource.READ, 12), (Resource.WRITE, 12), (Resource.UP, 4), (Resource.DOWN, 2)):
        assert plan.trace.total(resource) == pytest.approx(nbytes * psi / 4, rel=2e-2), resource
    assert sum(task.numel for task in plan.trace.tasks) == pytest.approx(psi / 4, rel=1e-2)


def test_tasks_wait_for_tasks_before_them_and_every_gather_is_awaited():
    plan = planned(ranks=8, stage=3)
    awaited = {number for task in plan.trace.tasks for number in task.after}
    for number, task in enumerate(plan.trace.tasks):
        assert all(before < number for before in task.after)
        assert number in awaited or not task.name.startswith("gather")
    gathers = [number for number, task in enumerate(plan.trace.tasks) if task.name.startswith("gather blocks.2")]
    users = [number for number, task in enumerate(plan.trace.tasks) if task.unit == "blocks.2" and task.flops]
    assert len(gathers) == 2 and gathers[0] < users[0], "forward and backward, ahead of use"
    assert gathers[0] not in plan.trace.tasks[gathers[0] + 1].after, "computation goes on beside it"


def test_two_hops_use_both_kinds_of_links_one_after_the_other():
    plan = planned(ranks=16, node_size=4, stage=3)
    assert plan.trace.total(Resource.INSIDE) + plan.trace.total(Resource.BETWEEN) == plan.sent["dp"]


def test_a_mesh_has_a_plan_for_each_stage_whose_sends_and_receives_meet():
    axes = {"pp": 2, "dp": 2, "tp": 2}
    plans = [zs.plan(lambda: GPT(SHAPE), axes=axes, rank=rank, batch=(ROWS, SEQ), stage=1, precision="bf16", micro_batches=4)
             for rank in (0, 4)]  # fmt: skip
    sent, received = (
        [{t.channel for t in plan.trace.tasks if t.name.startswith(word)} for plan in plans] for word in ("send", "recv")
    )
    assert sent[0] == received[1] and sent[1] == received[0] and len(sent[0]) == 4
    assert plans[0].sent["tp"] > 0 and plans[0].sent["pp"] > 0
    activations = [max(m.held.get(ACTIVATIONS, 0) for m in plan.moments) for plan in plans]
    assert activations[0] > 0 and plans[0].ranks == 8


def test_a_function_may_make_batches_and_another_the_loss():
    def batch():
        return torch.zeros(3, 10), torch.zeros(3, 2)

    def loss(model, pair):
        return nn.functional.mse_loss(model(pair[0]), pair[1])

    plan = zs.plan(
        lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2)), ranks=2, batch=batch, loss=loss, micro_batches=3
    )
    assert plan.num_parameters == 262 and plan.peak(Tier.DEVICE) > 0


class Chooses(nn.Module):
    """Its shapes depend on numbers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x[x.sum(-1) > 0])


def test_bad_input_gets_a_sentence():
    with pytest.raises(ConfigError, match="expected ranks=N, or axes="):
        zs.plan(lambda: GPT(SHAPE), batch=(1, 8))
    with pytest.raises(ConfigError, match="whole numbers of at least 1"):
        zs.plan(lambda: GPT(SHAPE), batch=(1, 8), axes={"dp": 0})
    with pytest.raises(ConfigError, match="rank: expected one of 0 to 3, got 4"):
        zs.plan(lambda: GPT(SHAPE), batch=(1, 8), ranks=4, rank=4)
    with pytest.raises(ConfigError, match="reads values of tensors"):
        zs.plan(Chooses, batch=lambda: torch.zeros(4, 8), loss=lambda model, x: model(x).sum(), ranks=2)
    with pytest.raises(ConfigError, match="schedule are options of zs.parallelize, for axes pp and tp"):
        zs.plan(lambda: GPT(SHAPE), batch=(1, 8), ranks=4, parallel={"schedule": "1f1b"})
    with pytest.raises(ConfigError, match="needs two or more ranks of tp"):
        zs.plan(lambda: GPT(SHAPE), batch=(1, 8), ranks=4, checkpointing={"partition": True})
    with pytest.raises(ConfigError, match="can not be built on the meta device"):
        zs.plan(lambda: nn.Linear(4, int(torch.ones(2).sum())), batch=(1, 8), ranks=2)


def test_what_is_no_batch_model_or_count_gets_a_sentence():
    def refused(match, model_fn=lambda: GPT(SHAPE), **given):
        with pytest.raises(ConfigError, match=match):
            zs.plan(model_fn, **({"ranks": 2, "batch": (1, 8)} | given))

    for batch in (None, 5, (2,), (2, 8, 3), (0, 8), (2.5, 8)):
        refused("batch: expected", batch=batch)
    for count in (0, -1, 1.5):
        refused("micro_batches: expected", micro_batches=count)
        refused("node_size: expected", node_size=count)
    for name in ("hold", "separate", "whole"):
        refused(f"{name}: expected True or False, got 3", **{name: 3})
    refused("optimizer: expected a function", optimizer=3)
    refused("axes: expected ranks by axis", axes=7, ranks=None)
    refused("expected a function that makes the model", GPT(SHAPE))
    refused("returns a torch.nn.Module", lambda: 3)


def test_a_model_that_was_built_before_stays_as_it_is():
    model = GPT(SHAPE)
    model.head.weight = model.embedding.weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plans = [zs.plan(lambda: model, ranks=2, batch=(1, 8), stage=3) for _ in range(2)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model.embedding.weight) is nn.Parameter and model.head.weight is model.embedding.weight
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert plans[0].phases == plans[1].phases


def test_a_plan_is_the_same_where_nothing_is_trained():
    trained = planned(ranks=2, stage=2)
    for nothing in (torch.no_grad, torch.inference_mode):
        with nothing():
            assert planned(ranks=2, stage=2).phases == trained.phases


def test_a_mesh_is_not_imagined_inside_of_a_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert planned(ranks=2).sent["dp"] > 0
        with pytest.raises(ConfigError, match="plan before torch.distributed.init_process_group"):
            planned(axes={"tp": 2, "dp": 2})
        assert torch.distributed.get_backend() == "gloo"
    finally:
        torch.distributed.destroy_process_group()


def test_reductions_go_from_each_rank_straight_to_each_and_two_hops_spare_the_network():
    """Over several nodes a reduction in one hop crosses once for each rank of a node, a gather's ring once for the node."""
    flat, hops = (planned(ranks=16, node_size=4, stage=2, hierarchical=way) for way in (False, True))
    for plan in (flat, hops):
        kinds = {task.name.split()[0]: task.distinct for task in plan.trace.tasks if Resource.BETWEEN in task.nbytes}
        assert kinds["reduce"] and not kinds["gather"]
    reduced = [
        sum(t.nbytes.get(Resource.BETWEEN, 0) for t in plan.trace.tasks if t.name.startswith("reduce")) for plan in (flat, hops)
    ]
    assert reduced[1] == pytest.approx(reduced[0] / 4, rel=0.01)


def test_what_a_step_begins_for_the_next_one_is_waited_for_there(tmp_path):
    """With states on disk a step ends with reads under way; the next one's optimizer waits for them."""
    plan = planned(ranks=2, stage=2, offload_optimizer="nvme", offload_path=str(tmp_path))
    tasks = plan.trace.tasks
    stepped = max(number for number, task in enumerate(tasks) if task.name == "host step")
    ahead = {number for number, task in enumerate(tasks) if Resource.READ in task.nbytes and number > stepped}
    asked = {len(tasks) + number for task in tasks if task.name == "host step" for number in task.after if number < 0}
    assert ahead and asked == ahead and not ahead & set(plan.trace.end)


def test_the_next_forward_waits_for_what_the_step_has_published():
    """Stage 1: updated parameters are gathered at the end of a step, each waited for where the next forward comes to its unit."""
    plan = planned(ranks=2, stage=1)
    tasks = plan.trace.tasks
    gathered = {number for number, task in enumerate(tasks) if task.name.startswith("gather")}
    waited = {len(tasks) + number for task in tasks if task.phase == "forward" for number in task.after if number < 0}
    ended = {
        before for number in plan.trace.end for before in (number, *tasks[number].after)
    }  # by the message that all have them
    assert gathered and gathered <= waited | ended
