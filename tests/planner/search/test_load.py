"""Layouts: what ranks hold, send and compute by the formulas is what the runtime holds, sends and computes on imagined ranks."""

import dataclasses
from collections import Counter

import pytest
import torch
from case_studies import formula, micro_batch_of
from torch._subclasses.fake_tensor import FakeTensorMode
from volumes import rows

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.config import Tier
from zeroshard.engine.ledger import GATHERED, GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS, PARTIAL, STAGING
from zeroshard.engine.runtime import runtime_of
from zeroshard.errors import ConfigError
from zeroshard.planner.dry_run import plan
from zeroshard.planner.model_source import ModelSource
from zeroshard.planner.models import CASE_STUDIES, GPT, GPTConfig
from zeroshard.planner.request import Request
from zeroshard.planner.search.layout import Layout
from zeroshard.planner.search.load import load_of, step_seconds
from zeroshard.planner.search.memory import memory_of
from zeroshard.planner.search.profile import LayerProfile, Profile
from zeroshard.planner.search.requested import layout_of, of_layout, profile_of
from zeroshard.planner.simulator.hardware import NETWORK, Hardware
from zeroshard.planner.simulator.trace import Resource

SHAPE = GPTConfig(vocab_size=1000, seq_len=32, dim=96, layers=3, heads=4, bias=True)
STATES = (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER)


def ledger_after_a_step(shape, layout, **options):
    """The runtime's own account of one rank."""
    with FakeTensorMode():
        model = GPT(shape)
        optimizer = torch.optim.AdamW(model.parameters())
        comm = FakeComm(0, layout.dp, node_size=layout.node_size)
        model, optimizer = zs.shard(model, optimizer, comm=comm, **layout.options("/tmp"), **options)
        tokens = torch.zeros(layout.micro_batch, shape.seq_len, dtype=torch.long)
        for _ in range(2):
            optimizer.zero_grad()
            for number in range(layout.micro_batches):
                if layout.hold and number + 1 < layout.micro_batches:
                    with zs.accumulate(model):
                        model(tokens, tokens).backward()
                else:
                    model(tokens, tokens).backward()
            optimizer.step()
    return runtime_of(model).tiers.ledger


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "tied"), [("bf16", True), ("fp32", False)])
def test_model_states_and_buffers_are_the_runtimes_to_the_byte(stage, tied, precision):
    shape = dataclasses.replace(SHAPE, tied=tied)
    layout = Layout(dp=6, stage=stage, precision=precision, node_size=6)
    ledger, held = ledger_after_a_step(shape, layout), memory_of(Profile.of_shape(shape), layout)[Tier.DEVICE]
    assert {name: held.get(name, 0) for name in STATES} == {name: ledger.now[name] for name in STATES}
    assert (held.get(STAGING, 0), held.get(GATHERED, 0)) == (ledger.peak[STAGING], ledger.peak[GATHERED])


def test_what_is_accumulated_on_the_rank_is_counted():
    layout = Layout(dp=4, stage=2, micro_batches=2, hold=True, node_size=4)
    ledger, held = ledger_after_a_step(SHAPE, layout), memory_of(Profile.of_shape(SHAPE), layout)[Tier.DEVICE]
    assert held[PARTIAL] == ledger.peak[PARTIAL] > 0


def sent(layout, profile):
    load = load_of(profile, layout)
    return load.total(Resource.BETWEEN), load.total(Resource.INSIDE)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_load_sends_what_the_runtime_sends(stage):
    layout = Layout(dp=6, stage=stage, node_size=6, micro_batches=2)
    ledger = ledger_after_a_step(SHAPE, layout)
    runtime = sum(each.nbytes for each in ledger.traffic.values()) / 2
    between, inside = sent(layout, Profile.of_shape(SHAPE))
    assert (between, inside) == (0, pytest.approx(runtime, rel=2e-3))  # and some bytes that ranks tell each other


def collectives(tasks):
    """Their number on each axis, and with the ranks that meet: each has a latency of its own. tasks: (task, times)."""
    found = Counter()
    for task, times in tasks:
        if set(task.nbytes) & set(NETWORK):
            found[task.axis, task.peers] += times * task.messages
    return found


OPTIONS = {
    "plain, one hop": {"hops": "one"}, "two hops": {}, "hpZ": {"hpz": 8}, "groups (HSDP, MiCS)": {"shard_size": 8},
    "qwZ": {"quantized_weights": "int8"}, "qgZ int8": {"quantized_gradients": "int8"}, "qgZ int4": {"quantized_gradients": "int4"},
    "hpZ, qwZ, qgZ int4": {"hpz": 8, "quantized_weights": "int8", "quantized_gradients": "int4"},
    "groups, qwZ, qgZ int8": {"shard_size": 8, "quantized_weights": "int8", "quantized_gradients": "int8"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "dp", "node_size", "size"), [
    ("two hops", 24, 5, 1), ("hpZ", 16, 4, 8), ("groups (HSDP, MiCS)", 16, 4, 8), ("groups, qwZ, qgZ int8", 16, 4, 4),
    ("hpZ, qwZ, qgZ int4", 16, 4, 4),
], ids=["nodes unequal", "hpZ of two nodes", "groups of two nodes", "groups, packed", "hpZ, packed"])  # fmt: skip
def test_a_load_sends_over_each_link_what_the_runtime_sends(name, dp, node_size, size):
    """But for padding, and vectors of a packed unit, which travel unpacked: formulas count them as packed."""
    shape = dataclasses.replace(SHAPE, layers=1)
    options = {key: size if key in ("hpz", "shard_size") else value for key, value in OPTIONS[name].items()}
    layout = Layout(dp=dp, node_size=node_size, micro_batches=2, **options)
    traffic = ledger_after_a_step(shape, layout).traffic.values()
    wanted = [sum(each.between for each in traffic) / 2, sum(each.nbytes - each.between for each in traffic) / 2]
    assert sent(layout, Profile.of_shape(shape)) == pytest.approx(wanted, rel=1.5e-2)


@pytest.mark.parametrize("name", OPTIONS)
def test_volumes_are_those_of_docs_communication(name):
    """Which tests/support/volumes.py counts on imagined ranks, in units of the parameters' bytes."""
    row = next(row for row in rows(8) if row.name == name)
    matrices = Profile("matrices", tuple(LayerProfile(f"{i}", whole=(1 << 20,), packs=True, flops=1.0) for i in range(4)), seq=1)
    layout = Layout(dp=64, node_size=8, **{"hops": "two", **OPTIONS[name]})
    between, inside = sent(layout, matrices)
    unit = 2 * matrices.numel
    assert inside / unit == pytest.approx(row.volumes[1](8, 8), rel=0.01)
    assert between / unit == pytest.approx(row.volumes[0](8, 8), rel=0.01)


@pytest.mark.parametrize("study", sorted(CASE_STUDIES))
def test_meshes_hold_and_send_what_the_case_studies_do(study):
    """tests/support/case_studies.py, which equals the runtime to the byte at full size."""
    case = CASE_STUDIES[study]
    layout = Layout(
        dp=case.layout.dp, pp=case.layout.pp, tp=case.layout.tp, stage=case.layout.stage, precision=case.layout.precision,
        micro_batch=micro_batch_of(case), micro_batches=2, checkpointing="blocks", hops="one", node_size=1,
    )  # fmt: skip
    profile = Profile.of_shape(case.full)
    for stage in sorted({0, layout.pp // 2, layout.pp - 1}):
        theory, held = formula(case, stage), memory_of(profile, layout, stage)[Tier.DEVICE]
        assert {name: held[name] for name in STATES} == theory.memory
        found = Counter()
        for task, times in load_of(profile, layout, stage).parts:
            found[task.axis] += times * sum(nbytes for resource, nbytes in task.nbytes.items() if resource in NETWORK)
        assert {axis: found[axis] for axis in theory.sent} == {
            axis: pytest.approx(nbytes, rel=1e-6) for axis, nbytes in theory.sent.items()
        }


@pytest.mark.parametrize("layout", [
    Layout(dp=8, stage=1, micro_batch=4),
    Layout(dp=8, stage=3, micro_batch=4, checkpointing="blocks"),
    Layout(dp=8, stage=2, micro_batch=4, optimizer=Tier.HOST, gradient=Tier.HOST, precision="fp32"),
    Layout(dp=8, stage=3, micro_batch=4, optimizer=Tier.DISK, gradient=Tier.DISK, parameter=Tier.DISK),
    Layout(dp=2, pp=2, tp=2, stage=1, micro_batch=2, micro_batches=4, checkpointing="blocks"),
    Layout(dp=4, sp=2, micro_batch=4), Layout(dp=2, sp=4, stage=2, micro_batch=4, micro_batches=2, checkpointing="blocks"),
    Layout(dp=1, sp=4, node_size=2, micro_batch=4, checkpointing="blocks", mlp_tokens=8),
    Layout(dp=4, ep=2, micro_batch=4), Layout(dp=4, ep=4, node_size=8, micro_batch=4, checkpointing="blocks"),
    Layout(dp=2, ep=4, stage=1, micro_batch=4, micro_batches=2),
    Layout(dp=8, ep=2, micro_batch=4, optimizer=Tier.HOST, gradient=Tier.HOST),
], ids=str)  # fmt: skip
def test_a_dry_run_comes_to_the_same(layout, tmp_path):
    """Peaks with activations, bytes of each link and flops of a step; formulas take each category at its own fullest moment."""
    shape = dataclasses.replace(SHAPE, vocab_size=2048, seq_len=128, dim=256, layers=4, experts=8 * (layout.ep > 1))
    parallel = {"loss_parallel": True} if layout.tp > 1 else {"experts": ["*.mlp.experts"]} if layout.ep > 1 else {}
    tiles = {"mlp_tokens": layout.mlp_tokens} if layout.mlp_tokens else {}
    found = plan(
        lambda: GPT(shape), batch=(layout.micro_batch, shape.seq_len), micro_batches=layout.micro_batches, node_size=layout.node_size,
        checkpointing=layout.checkpointing == "blocks", axes=layout.mesh, parallel=parallel, tiles=tiles, **layout.options(str(tmp_path)),
    )  # fmt: skip
    profile = Profile.of_shape(shape)
    held, load = memory_of(profile, layout), load_of(profile, layout)
    for tier in Tier:
        peak = found.peak(tier, ("forward", "backward", "step"))
        assert sum(held[tier].values()) == pytest.approx(peak, rel=0.1), tier
    for resource in set(Resource) - {Resource.DEVICE, Resource.HOST, Resource.CONTROL}:  # formulas leave the last one out
        assert load.total(resource) == pytest.approx(found.trace.total(resource), rel=0.01), resource
    held = {name: held[Tier.DEVICE].get(name, 0) for name in STATES if layout.optimizer is Tier.DEVICE}
    assert held == {name: max(phase.held[Tier.DEVICE].get(name, 0) for phase in found.phases) for name in held}
    assert load.flops == pytest.approx(found.trace.flops, rel=0.04)
    assert collectives(load.parts) == collectives((task, 1) for task in found.trace.tasks)


@pytest.mark.parametrize("layout", [
    Layout(dp=16, stage=3, micro_batch=2), Layout(dp=16, stage=2, micro_batch=2, micro_batches=3), Layout(dp=16, stage=3, hpz=8, micro_batch=2),
    Layout(dp=16, stage=3, micro_batch=2, optimizer=Tier.HOST, gradient=Tier.HOST, parameter=Tier.HOST, checkpointing="blocks"),
    Layout(dp=4, sp=4, stage=3, micro_batch=4), Layout(dp=4, tp=4, stage=1, micro_batch=4), Layout(dp=4, pp=2, tp=2, stage=1, micro_batch=2, micro_batches=6, checkpointing="blocks"),
], ids=str)  # fmt: skip
def test_a_step_takes_about_as_long_as_a_dry_run_says(layout):
    """Formulas know no order: what a step waits for at its beginning and end, and behind other messages, is not in them."""
    shape = dataclasses.replace(SHAPE, vocab_size=4096, seq_len=512, dim=1024, layers=6, heads=16)
    source = ModelSource("medium", lambda: GPT(shape), 512, 4096, 6, 1024, 16, config=shape)
    hardware = Hardware.named("a100-80gb")
    asked = of_layout(Request(source, hardware, {"pp": 1, "dp": 16, "tp": 1}, 1, 512), layout)
    found = step_seconds(Profile.of_shape(shape), layout, hardware)[0]
    assert found == pytest.approx(asked.simulated().step_s, rel=0.25)


def test_a_profile_of_a_dry_run_is_that_of_the_formulas():
    options = {"ranks": 4, "stage": 3, "precision": "bf16", "batch": (2, 32), "node_size": 4}
    dry, again = plan(lambda: GPT(SHAPE), **options), plan(lambda: GPT(SHAPE), **options, checkpointing=True)
    found, known = Profile.of_plan(dry, 32, again), Profile.of_shape(SHAPE)
    assert [unit.name for unit in found.blocks] == [unit.name for unit in known.blocks]
    assert found.numel == pytest.approx(known.numel, rel=0.01) and found.flops == pytest.approx(known.flops, rel=0.01)
    for checkpointing in ("none", "blocks"):
        layout = Layout(dp=4, stage=3, micro_batch=2, checkpointing=checkpointing)
        ours, theirs = (sum(memory_of(each, layout)[Tier.DEVICE].values()) for each in (found, known))
        assert ours == pytest.approx(theirs, rel=0.1)
    for stage in (0, 3):  # how gradients travel is nothing to the model
        for more in (
            {"node_size": 2},
            {"node_size": 2, "hierarchical": True},
            {"node_size": 2, "zero_quantized_gradients": "int8", "micro_batches": 3},
        ):
            other = Profile.of_plan(plan(lambda: GPT(SHAPE), **(options | more | {"stage": stage})), 32)
            assert [(unit.name, unit.numel, unit.flops) for unit in other.layers] == [
                (unit.name, unit.numel, unit.flops) for unit in found.layers
            ]
    with pytest.raises(ConfigError, match="expected a plan over two or more ranks of dp alone"):
        Profile.of_plan(dataclasses.replace(dry, axes={"dp": 2, "tp": 2}), 32)


@pytest.mark.parametrize(
    "options", [{}, {"prefetch_bucket_size": 0}, {"prefetch_bucket_size": 220_000}, {"overlap": False}], ids=str
)
def test_what_is_gathered_ahead_is_the_runtimes(options):
    """A limit as a number of elements, or nothing beside computation: bytes that are gathered at once."""
    given, hardware = {"stage": 3, "precision": "bf16"} | options, Hardware.named("a100-80gb")
    request = Request(
        ModelSource("small", lambda: GPT(SHAPE), 32, 1000), hardware, {"pp": 1, "dp": 6, "tp": 1}, 1, 32, options=given
    )
    layout, found, profile = layout_of(request), request.plan(), Profile.of_shape(SHAPE)
    assert memory_of(profile, layout)[Tier.DEVICE][GATHERED] == found.report.peak[GATHERED]
    assert layout_of(of_layout(request, layout)) == layout and layout.hops == "two"


@pytest.mark.parametrize("options", [
    {"zero_quantized_gradients": "low_rank"}, {"zero_quantized_gradients": {"codec": "top_k", "ratio": 0.2}},
    {"sums": "backend"}, {"sums": "backend", "stage": 0}, {"sums": "backend", "stage": 3, "shard_size": 2},
    {"zero_quantized_gradients": {"codec": "int4", "block": 32}}, {"stage": 3, "zero_quantized_weights": {"codec": "fp8", "block": 32}},
], ids=str)  # fmt: skip
def test_formulas_take_the_bytes_of_the_request_s_own_codec(options):
    """Also of those that no search proposes, with their blocks and ratios, and of sums by the backend, which are of fp32 values."""
    shape = dataclasses.replace(SHAPE, vocab_size=1024, seq_len=64, dim=256, layers=2)
    source, given = ModelSource("small", lambda: GPT(shape), 64, 1024, config=shape), {"stage": 2, "precision": "bf16"} | options
    request = Request(source, Hardware.named("a100-80gb"), {"pp": 1, "dp": 8, "tp": 1}, 4, 64, node_size=4, options=given)
    layout, found, profile = layout_of(request), request.plan(), Profile.of_shape(shape)
    held, load, codec = memory_of(profile, layout), load_of(profile, layout), options.get("zero_quantized_gradients")
    assert sum(held[Tier.DEVICE].values()) == pytest.approx(found.peak(Tier.DEVICE, ("forward", "backward", "step")), rel=0.1)
    for resource in NETWORK:  # of low_rank, formulas know no shapes
        assert load.total(resource) == pytest.approx(found.trace.total(resource), rel=0.05 if codec == "low_rank" else 0.01)
    assert layout_of(of_layout(request, layout)) == layout


def test_a_codec_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="zero_quantized_weights: expected True, one of int8, int4, fp8, .*, got 'int6'"):
        load_of(Profile.of_shape(SHAPE), Layout(dp=8, quantized_weights="int6"))


def test_one_plan_tells_of_the_model_whatever_its_stage_and_way_to_reduce(monkeypatch):
    source, hardware = ModelSource("small", lambda: GPT(SHAPE), 32, 1000), Hardware.named("a100-80gb")
    options = [{"stage": 3}, {"stage": 0}, {"stage": 3, "shard_size": 2}, {"stage": 2, "zero_quantized_gradients": "int8"}]
    splitting = [{"stage": 3, "max_unit_numel": 1 << 14}, {"stage": 3, "zero_quantized_weights": "int8"}]
    asked = [
        Request(source, hardware, {"pp": 1, "dp": 4, "tp": 1}, 2, 32, node_size=2, options=each) for each in options + splitting
    ]
    plans = [each.plan() for each in asked]

    def no_plan(self, stage=0):
        raise ConfigError("a further dry run")

    monkeypatch.setattr(Request, "plan", no_plan)
    units = [profile_of(request, [made]).layers for request, made in zip(asked[:4], plans, strict=False)]
    assert units == [units[0]] * 4
    for request, made in zip(asked[4:], plans[4:], strict=True):
        with pytest.raises(ConfigError, match="a further dry run"):
            profile_of(request, [made])


def test_gradients_on_the_host_leave_no_whole_sums_on_the_device_with_tensor_parallelism():
    """ZeRO-Offload with model parallelism and micro-batches (arXiv 2101.06840, table 3): each micro-batch reduces, and the host adds up."""
    shape = dataclasses.replace(SHAPE, vocab_size=1024)
    given = {"axes": {"dp": 2, "tp": 2}, "batch": (1, 32), "micro_batches": 3, "stage": 2, "precision": "fp16"}
    here, away = plan(lambda: GPT(shape), **given), plan(lambda: GPT(shape), offload_optimizer="cpu", **given)
    held = [max(phase.held.get(Tier.DEVICE, {}).get(PARTIAL, 0) for phase in each.phases) for each in (here, away)]
    assert held[0] > 0 and held[1] == 0
    layouts = [Layout(dp=2, tp=2, stage=2, micro_batches=3, precision="fp16", gradient=tier) for tier in (Tier.DEVICE, Tier.HOST)]
    assert [PARTIAL in memory_of(Profile.of_shape(shape), each)[Tier.DEVICE] for each in layouts] == [True, False]


@pytest.mark.parametrize("layout", [OPTIONS["hpZ, qwZ, qgZ int4"], OPTIONS["qwZ"], OPTIONS["qgZ int8"]], ids=str)
def test_packing_takes_time_on_the_device(layout):
    """Kernels that pack and unpack read and write what travels (ZeRO++, arXiv 2306.10209, section 4): by dry run and by formula."""
    shape = dataclasses.replace(SHAPE, dim=256)
    moved = {}
    for name, options in (("plain", {}), ("packed", layout)):
        planned = plan(
            lambda: GPT(shape), ranks=16, node_size=8, batch=(1, 32), **Layout(dp=16, node_size=8, **options).options()
        )
        load = load_of(Profile.of_shape(shape), Layout(dp=16, node_size=8, **options))
        moved[name] = [planned.trace.total(Resource.DEVICE, phases=("forward", "backward")), load.total(Resource.DEVICE)]
    by_dry_run, by_formula = (packed - plain for packed, plain in zip(moved["packed"], moved["plain"], strict=True))
    assert by_dry_run > 0 and by_formula == pytest.approx(by_dry_run, rel=0.35)
