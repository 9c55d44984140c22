"""One layout has the same seconds and bytes wherever it is asked: plan, search, remedies, simulate, stage="auto"."""

import json
import math
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from planned import hardware
from torch._subclasses.fake_tensor import FakeTensorMode

import zeroshard as zs
from zeroshard.assembly import auto_stage
from zeroshard.cli import main
from zeroshard.comm.fake import FakeComm, Imagination, imagination
from zeroshard.config import Config, Tier
from zeroshard.engine.inner_optimizer import optimizer_groups
from zeroshard.engine.ledger import GATHERED, STAGING
from zeroshard.engine.shard_model import Inventory
from zeroshard.formats.state_plans import state_plans
from zeroshard.planner.dry_run import plan
from zeroshard.planner.model_source import ModelSource
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.planner.plan import ACTIVATIONS, KEPT
from zeroshard.planner.remedies.remedy import remedies
from zeroshard.planner.request import Request, judge
from zeroshard.planner.search.layout import Layout
from zeroshard.planner.search.memory import memory_of
from zeroshard.planner.search.profile import Profile
from zeroshard.planner.search.requested import layout_of
from zeroshard.planner.search.search import search
from zeroshard.policies import partition

SMALL = ["quickstart", "--ranks", "8", "--node-size", "4", "--seq", "64", "--hardware", "a100-40gb", "--precision", "bf16"]
LAYOUTS = {
    "stage 1": ["--stage", "1"],
    "stage 2, checkpoints": ["--stage", "2", "--checkpoint-activations"],
    "stage 3": ["--stage", "3"],
    "stage 3, secondary shards": ["--stage", "3", "--hpz", "4"],
    "groups of 4": ["--stage", "3", "--shard-size", "4"],
    "tensor parallel": ["--stage", "1", "--mesh", "dp=4,tp=2"],
    "pipeline": ["--stage", "1", "--mesh", "dp=4,pp=2", "--checkpoint-activations"],
}


def told(capsys, *arguments):
    assert main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


_SHORT = ("stage 3, secondary shards", "tensor parallel", "pipeline")  # 5 s each: the others with ZEROSHARD_SLOW=1


@pytest.mark.parametrize("name", [name if name in _SHORT else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_search_and_simulation_say_the_same_seconds(name, capsys, tmp_path):
    path, given = tmp_path / "layout.json", [*SMALL, *LAYOUTS[name]]
    found = told(
        capsys,
        "plan",
        *given,
        "--auto",
        "--global-batch",
        "16",
        "--write-config",
        str(path),
        "--offload-path",
        str(tmp_path),
        "--json",
    )
    section = json.loads(path.read_text())["zeroshard"]
    shard, kept = section["shard"], section["checkpoint_activations"]
    known = ("offload_optimizer", "offload_gradient", "offload_param", "shard_size", "max_unit_numel", "zero_hpz_partition_size")
    flags = {key: f"--{key.replace('zero_hpz_partition_size', 'hpz').replace('_', '-')}" for key in known}
    assert set(shard) <= {"stage", "precision", "offload_path", "hierarchical", *known}
    same = [f"{flags[key]}={value}" for key, value in shard.items() if key in known and flags[key] not in given]
    same += ["--no-hierarchical"] * (shard.get("hierarchical") is False)
    same += ["--checkpoint-activations"] * (kept is not None and "--checkpoint-activations" not in given)
    same += ["--offload-activations=cpu"] * (kept is not None and kept["offload"] == "cpu")
    mesh = ",".join(f"{axis}={size}" for axis, size in section["mesh"].items())
    mesh = [] if "--mesh" in given else ["--mesh", mesh]
    batch = ["--micro-batch", str(section["micro_batch"]), "--accumulate", str(section["micro_batches"])]
    simulated = told(capsys, "simulate", *given, *mesh, *same, *batch, "--json")
    assert found["auto"]["step_s"] == simulated["step_s"] == section["prediction"]["step_s"]
    assert found["auto"]["tflops"] == simulated["tflops"]


@pytest.mark.parametrize("axes", [{"pp": 1, "dp": 4, "tp": 1}, {"pp": 2, "dp": 2, "tp": 1}], ids=["data parallel", "pipeline"])
def test_plan_search_remedies_and_simulation_say_the_same_of_one_layout(axes):
    """Of each change that makes a run fit: the search is asked for this layout alone."""
    shape, batch = GPTConfig(vocab_size=512, seq_len=128, dim=128, layers=4, heads=4), 4 if axes["pp"] > 1 else 1
    source = ModelSource("small", partial(GPT, shape), 128, 512, 4, 128, 4, config=shape)
    asked = Request(source, hardware(1 << 30), axes, 4, 128, batch, options={"stage": 0, "precision": "bf16"})
    plans = asked.plans()
    asked = replace(asked, hardware=hardware(judge(plans, asked.hardware).used - (2 << 20)))
    found = [
        each
        for each in remedies(asked, plans, seconds=math.inf)
        if each.verdict is not None and each.request.ranks == asked.ranks
    ]
    assert len(found) >= 2
    for remedy in found:
        again, layout = remedy.request, layout_of(remedy.request)
        fixed = {field.name: getattr(layout, field.name) for field in fields(Layout)}
        best = search(asked, layout.sequences, fixed=fixed, margin=0.0).best
        assert best.layout == layout
        assert best.step_s == remedy.seconds == again.simulated().step_s
        planned = judge(again.plans(), again.hardware)
        assert remedy.verdict.used == planned.used == judge(best.plans, again.hardware).used
        held = sum(planned.held.values())
        assert sum(remedy.verdict.held.values()) == best.nbytes(planned.tier) == held


SHAPE = GPTConfig(vocab_size=2000, seq_len=32, dim=128, layers=4, heads=4, bias=True)
HOST = {"optimizer": Tier.HOST, "gradient": Tier.HOST}
CPU = {"precision": "fp32", "separate": False}
CODED = {"optimizer_states": "int8", "master_weights": "split"}


def held_for_auto(layout, monkeypatch):
    """The device's bytes by which stage="auto" would judge a layout."""
    found = {}

    def judged(config, comm, model, specs, optimizer, sample, parts):
        given = Config.build(None, **layout.options())
        states = state_plans(given, optimizer, specs)
        inventory = Inventory(partition(model, given, specs), states, optimizer_groups(optimizer))
        found.update(auto_stage._held(inventory, given, comm, parts))
        return given

    monkeypatch.setattr("zeroshard.api.choose", judged)
    one_host = not layout.separate and layout.dp <= layout.node_size
    token = imagination.set(Imagination(layout.node_size, layout.separate, one_host))
    try:
        with FakeTensorMode():
            model = GPT(SHAPE)
            zs.shard(
                model,
                torch.optim.AdamW(model.parameters()),
                stage="auto",
                comm=FakeComm(0, layout.dp),
                precision=layout.precision,
            )
    finally:
        imagination.reset(token)
    return found[Tier.DEVICE]


@pytest.mark.parametrize("layout", [
    Layout(dp=4, stage=0), Layout(dp=6, stage=1), Layout(dp=4, stage=2, **HOST), Layout(dp=4), Layout(dp=4, prefetch_nbytes=0),
    Layout(dp=8, node_size=4), Layout(dp=8, node_size=4, hpz=4), Layout(dp=8, node_size=4, shard_size=4), Layout(dp=4, **CPU),
    Layout(dp=8, stage=2, node_size=4, **CPU), Layout(dp=4, **CODED), Layout(dp=6, stage=1, optimizer_states="int4"),
    Layout(dp=4, stage=2, **HOST, **CODED), Layout(dp=4, stage=0, master_weights=False, optimizer_states="bf16"),
], ids=lambda layout: f"{layout}, {layout.dp} of {layout.node_size}, {layout.precision}, ahead {layout.prefetch_nbytes}")  # fmt: skip
def test_a_dry_run_a_formula_and_stage_auto_count_the_same_bytes(layout, monkeypatch):
    found = plan(
        lambda: GPT(SHAPE), ranks=layout.dp, batch=(1, 32), node_size=layout.node_size, separate=layout.separate, **layout.options()
    )  # fmt: skip
    held = {name for phase in found.phases for name in phase.held[Tier.DEVICE]} - {ACTIVATIONS, KEPT}
    peak = {name: max(phase.held[Tier.DEVICE].get(name, 0) for phase in found.phases) for name in held}
    peak |= {name: found.report.peak[name] for name in (GATHERED, STAGING) if found.report.peak[name]}
    formula = memory_of(Profile.of_shape(SHAPE), layout)[Tier.DEVICE]
    formula.pop(ACTIVATIONS)
    assert formula == peak
    assert held_for_auto(layout, monkeypatch) == sum(peak.values())
