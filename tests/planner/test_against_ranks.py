"""A dry run holds, sends and moves what ranks do: beside ranks as threads, to the byte."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.engine.ledger import STAGING
from zeroshard.planner.dry_run import observe
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.planner.simulator.trace import Resource
from zeroshard.testing import run_threads

SHAPE = GPTConfig(vocab_size=96, seq_len=16, dim=32, layers=2, heads=2)
DEEP = dataclasses.replace(SHAPE, layers=6)  # more units than staging buffers, which are fetched ahead as far as these go
HPZ = {"stage": 3, "zero_hpz_partition_size": 2}


class Own(nn.Module):
    """Parameters and buffers that nothing initialises, a frozen part, a tied one."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, 8), nn.Linear(8, 96, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.ones(16, 8), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.table.to(x.dtype)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x * self.scale)


def muon(parameters):
    """Matrices by turns with Muon and with AdamW, so that owners of a turn make different states."""
    parameters, matrices = list(parameters), itertools.count()
    for parameter in parameters:
        parameter.use_muon = parameter.dim() == 2 and next(matrices) % 2 == 0
    return zs.Muon(parameters)


def adamw(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad])


@pytest.mark.parametrize(
    "make, optimizer, ranks, options",
    [
        (Own, adamw, 2, {"stage": 0, "precision": "bf16"}),
        (Own, adamw, 3, {"stage": 3, "units": "leaf"}),
        (lambda: GPT(SHAPE), adamw, 4, HPZ | {"zero_quantized_weights": True, "precision": "bf16"}),
        (lambda: GPT(SHAPE), adamw, 4, {"stage": 3, "shard_size": 2, "replicate_optimizer": False}),
        (lambda: GPT(SHAPE), muon, 3, {"stage": 1}),
        (lambda: GPT(SHAPE), adamw, 2, {"stage": 2, "offload_optimizer": "nvme"}),
        (lambda: GPT(DEEP), adamw, 2, {"stage": 3, "offload_param": "nvme"}),
    ],
    ids=["sent in another dtype", "leaves", "packed and hpz", "groups", "muon", "states on disk", "parameters on disk"],
)
def test_what_is_held_and_sent_is_what_ranks_hold_and_send(make, optimizer, ranks, options, tmp_path):
    if "nvme" in options.values():
        options = options | {"offload_path": str(tmp_path)}
    given = {"ranks": ranks, "batch": (1, 16), "optimizer": optimizer, "separate": False, **options}
    rank = ranks - 1
    plan = zs.plan(make, rank=rank, **given)
    seen = run_threads(ranks, lambda rank: observe(make, rank=rank, whole=True, **given))[rank]
    staging = [each.report.peak.pop(STAGING) for each in (plan, seen)]
    assert staging[0] <= staging[1] <= 2 * staging[0], "ranks that others keep from the cores take further buffers"
    for name in ("at_rest", "elsewhere", "peak", "measured_nbytes_per_step", "steps", "num_parameters"):
        assert getattr(plan.report, name) == getattr(seen.report, name), name
    assert plan.sent == seen.sent and plan.report.moved.get("disk -> host") == seen.report.moved.get("disk -> host")


def test_states_on_disk_are_read_once_in_a_step():
    plan = zs.plan(
        lambda: GPT(SHAPE), ranks=2, batch=(1, 16), stage=2, offload_optimizer="nvme", offload_path="/nowhere", precision="bf16"
    )
    theory = plan.report.theory_moved_per_step
    assert plan.trace.total(Resource.READ) == pytest.approx(theory["disk -> host"], rel=0.05)


def test_gradients_wait_for_the_buffer_that_was_sent_first():
    """On a device of its own: two are under way, and the third waits for the first, not for the one before it."""
    plan = zs.plan(lambda: GPT(SHAPE), ranks=2, batch=(1, 16), stage=2, precision="bf16", units="leaf")
    tasks = plan.trace.tasks
    sends = [number for number, task in enumerate(tasks) if task.phase == "backward" and Resource.INSIDE in task.nbytes]
    waited = {number for task in tasks if task.phase == "backward" for number in task.after}
    assert set(sends[:-2]) <= waited, "their buffers are filled again"
    for before, number in itertools.pairwise(sends):
        assert not any(before in task.after for task in tasks[before + 1 : number + 1])


FORM = zs.StateFormat("int8", block=64, min_numel=100)
SPLIT = {"precision": "bf16", "master_weights": "split"}
CELLS = [
    (0, {}, FORM, SPLIT),
    (1, {}, FORM, SPLIT),
    (2, {}, zs.StateFormat("int4", block=64, min_numel=100, stochastic_rounding=True), {}),
    (3, {}, FORM, SPLIT),
    (2, {"offload_optimizer": "cpu"}, FORM, SPLIT),
    (3, {"offload_optimizer": "cpu", "offload_param": "cpu"}, FORM, {"precision": "bf16"}),
    (1, {"offload_optimizer": "nvme"}, FORM, SPLIT),
    (2, {"offload_optimizer": "nvme"}, {"exp_avg": FORM, "exp_avg_sq": "bf16"}, SPLIT),
    (3, {"offload_optimizer": "nvme", "offload_gradient": "nvme", "offload_param": "nvme"}, FORM, SPLIT),
    (3, {"offload_param": "nvme"}, None, SPLIT),
]


@pytest.mark.parametrize(("stage", "tiers", "form", "masters"), CELLS)
def test_states_and_masters_that_rest_coded_are_held_as_ranks_hold_them(stage, tiers, form, masters, tmp_path):
    options = {"stage": stage, "optimizer_states": form, **tiers, **masters}
    if "nvme" in tiers.values():
        options["offload_path"] = str(tmp_path)
    given = {"ranks": 2, "batch": (1, 16), "optimizer": adamw, "separate": False, **options}
    plan = zs.plan(lambda: GPT(SHAPE), rank=1, **given)
    seen = run_threads(2, lambda rank: observe(lambda: GPT(SHAPE), rank=rank, whole=True, **given))[1]
    staging = [each.report.peak.pop(STAGING) for each in (plan, seen)]
    assert staging[0] <= staging[1] <= 2 * staging[0]
    for name in ("at_rest", "elsewhere", "peak", "measured_nbytes_per_step", "formula", "states", "theory_moved_per_step"):
        assert getattr(plan.report, name) == getattr(seen.report, name), name
    assert plan.report.moved.get("disk -> host") == seen.report.moved.get("disk -> host")
    formats = {"int8", "int4", "exp_avg int8, exp_avg_sq bf16"}
    told = plan.report.states.split("; ")
    assert (told[-1] == "masters split: bf16 parameter + 16 bits") == ("master_weights" in masters)
    if form is not None:
        kept = "(7 of 16 parameters, 3,744 elements, keep fp32)"  # the embedding, which is the head, and norms
        assert told[0] in [f"optimizer states {each} {kept}" for each in formats]
