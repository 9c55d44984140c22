"""optimizer_states and master_weights="split" in plans and reports: to the byte what ranks hold."""

import pytest
from test_against_ranks import SHAPE, adamw

import zeroshard as zs
from zeroshard.memory.ledger import STAGING
from zeroshard.planner.dry_run import observe
from zeroshard.planner.models import GPT
from zeroshard.testing import run_threads

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
def test_a_plan_holds_and_moves_what_ranks_do(stage, tiers, form, masters, tmp_path):
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
