"""A dry run beside real ranks: the same bytes by category, at rest and at the fullest moments; and the quickstart's own report."""

import json
import re
from pathlib import Path

import pytest
import torch

import zeroshard as zs
from zeroshard.activations.storage import CHECKPOINTS
from zeroshard.cli.options import parse_train
from zeroshard.comm.launch import spawn
from zeroshard.config import Tier
from zeroshard.engine.comm.sums import CHUNK_NUMEL
from zeroshard.engine.ledger import MASTERS, OPTIMIZER
from zeroshard.planner.dry_run import observe
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.planner.plan import ACTIVATIONS, KEPT, Plan
from zeroshard.testing import run_threads

SHAPE = GPTConfig(vocab_size=512, seq_len=64, dim=128, layers=3, heads=4)
QUICKSTART = Path(__file__).parents[2] / "quickstart"
CHUNK_NBYTES = 4 * CHUNK_NUMEL  # of the host's step, which goes over all at once where nothing is computed
CASES = {
    "stage 3, checkpoints, accumulation": {"stage": 3, "micro_batches": 3, "hold": True, "checkpointing": True},
    "stage 2, bf16, states on disk": {"stage": 2, "precision": "bf16", "offload_optimizer": "nvme"},
}


def counted(plan: Plan, phase: str) -> dict[tuple[str, str], int]:
    """Bytes by tier and category, of what ledgers count."""
    (found,) = (each for each in plan.phases if each.name == phase)
    return {
        (tier.value, name): nbytes
        for tier, held in found.held.items()
        for name, nbytes in held.items()
        if nbytes and name not in (ACTIVATIONS, KEPT)
    }


@pytest.mark.parametrize("name", CASES)
def test_real_ranks_hold_what_was_planned(name, tmp_path):
    given = dict(batch=(2, 64), ranks=2, separate=False, whole=True, **CASES[name])  # whole: rank 0's values are given to all
    if "offload_optimizer" in given:
        given["offload_path"] = str(tmp_path)
    plan = zs.plan(lambda: GPT(SHAPE), **given)
    seen = run_threads(2, lambda rank: observe(lambda: GPT(SHAPE), rank=rank, **given))[0]
    for phase in ("forward", "backward", "step", "save"):
        planned, real = counted(plan, phase), counted(seen, phase)
        assert planned == real, phase
    for phase in ("forward", "backward"):
        activations = [{each.name: each for each in found.phases}[phase].held[Tier.DEVICE][ACTIVATIONS] for found in (plan, seen)]
        assert activations[0] == pytest.approx(activations[1], rel=0.05, abs=CHUNK_NBYTES), phase
    expected = {("device", CHECKPOINTS)} if "checkpointing" in given else {("disk", OPTIMIZER), ("disk", MASTERS)}
    assert expected <= counted(plan, "backward").keys()


def test_a_model_that_each_rank_makes_whole_is_there_while_it_is_sharded():
    whole, meta = (zs.plan(lambda: GPT(SHAPE), ranks=8, stage=3, batch=(1, 64), whole=whole) for whole in (True, False))
    assert whole.peak(Tier.DEVICE, ["load"]) >= 4 * whole.num_parameters > meta.peak(Tier.DEVICE, ["load"])
    assert whole.peak(Tier.DEVICE, ["step"]) == meta.peak(Tier.DEVICE, ["step"])


@pytest.mark.parametrize("offload, tier", [(None, Tier.DEVICE), ("cpu", Tier.HOST), ("nvme", Tier.DISK)])
def test_checkpoints_rest_where_they_were_told_to(offload, tier):
    options = {"offload": offload} | ({"path": "/nowhere"} if offload == "nvme" else {})
    plan = zs.plan(lambda: GPT(SHAPE), ranks=2, stage=2, batch=(2, 64), checkpointing=options)
    held = {each.name: each for each in plan.phases}["backward"].held
    assert held[tier][CHECKPOINTS] == 2 * 64 * SHAPE.dim * 4 * SHAPE.layers


def test_the_quickstart_s_report_says_what_was_planned_for_its_model(tmp_path):
    command = re.search(r"-m zeroshard train (.*) \"\$@\"", QUICKSTART.read_text())[1].split()
    options = parse_train(command)
    assert options.steps == 1000 and options.time_limit is not None  # by steps, with the time as the second bound
    short = ["--steps", "2", "--eval-bytes", "64", "--sample-bytes", "0", "--out", str(tmp_path)]
    assert spawn(["train", *command, *short], options.ranks) == 0
    (found,) = tmp_path.rglob("report.json")
    real = json.loads(found.read_text())

    def tokens():
        return torch.zeros(options.global_batch // options.ranks, options.seq, dtype=torch.long)

    plan = zs.plan(
        lambda: GPT(options.model_config()), ranks=options.ranks, config=options.sharding(), batch=tokens, separate=False, whole=True,
        loss=lambda model, batch: model(batch, batch),
    )  # fmt: skip
    planned = plan.report.to_dict()
    for key in ("num_parameters", "units", "at_rest", "formula", "ddp", "elsewhere", "theory_nbytes_per_step"):
        assert planned[key] == real[key], key
    assert plan.sent["dp"] == sum(nbytes for _, nbytes in real["training_step_traffic"].values())
    assert planned["peak"] == pytest.approx(real["peak"])
