"""Verdicts and remedies: what does not fit is said with its reason, and the changes that are named make it fit by their own dry run."""

from dataclasses import replace

import pytest

from zeroshard.config import Tier
from zeroshard.memory.ledger import GATHERED, OPTIMIZER, PARAMETERS
from zeroshard.planner import remedies as module
from zeroshard.planner import tables
from zeroshard.planner.model_source import source_of
from zeroshard.planner.plan import ACTIVATIONS, PHASES, Phase
from zeroshard.planner.remedies import CHANGES, flags, remedies
from zeroshard.planner.request import GIB, Request, judge
from zeroshard.simulator.hardware import Hardware

MIB = 1 << 20


def hardware(nbytes, **fields):
    """An H100 with another memory, and nothing that its libraries take."""
    whole = Hardware.named("h100-80gb")
    return replace(whole, device=replace(whole.device, memory_nbytes=nbytes), **{"overhead_nbytes": 0, **fields})


def request(nbytes=1 << 30, **fields):
    axes = {"pp": 1, "dp": 4, "tp": 1} | fields.pop("axes", {})
    given = {"options": {"stage": 0, "precision": "bf16"}, "rows": 2, "seq": 64, **fields}
    return Request(source_of("quickstart"), hardware(nbytes), axes, **given)


@pytest.fixture(scope="module")
def stage_0():
    return request().plans()


def test_a_verdict_is_about_the_fullest_phase_with_the_device_s_overhead(stage_0):
    asked = replace(request(), hardware=hardware(GIB, overhead_nbytes=64 * MIB))
    verdict = judge(stage_0, asked)
    assert verdict.fits and verdict.used == stage_0[0].peak(Tier.DEVICE) + 64 * MIB
    assert str(verdict).startswith("fits: ") and "of 1.0 GiB (device overhead 0.0625 counted), fullest in" in str(verdict)
    tight = replace(asked, hardware=hardware(verdict.used - MIB, overhead_nbytes=64 * MIB))
    verdict = judge(stage_0, tight)
    assert not verdict.fits and verdict.short == MIB
    largest = max(verdict.held, key=verdict.held.get)
    assert f"{verdict.phase} holds {largest} " in str(verdict) and "short by 0.000977 GiB" in str(verdict)


def test_states_are_counted_once_while_they_are_made(stage_0):
    first, later = ({phase.name: phase.held[Tier.DEVICE] for phase in stage_0[0].phases}[name] for name in ("first step", "step"))
    assert sum(first.values()) < sum(later.values()) + later[OPTIMIZER] // 2


def test_the_host_of_a_node_counts_all_its_ranks(stage_0):
    held = Phase("forward", {Tier.DEVICE: {PARAMETERS: MIB}, Tier.HOST: {OPTIMIZER: 30 * MIB}})
    plan = replace(stage_0[0], phases=(held,))
    asked = replace(request(), hardware=hardware(GIB, host_memory_nbytes=100 * MIB))
    verdict = judge([plan], asked)
    assert (verdict.tier, verdict.used, verdict.short) == (Tier.HOST, 120 * MIB, 20 * MIB)
    assert "of a node's host" in str(verdict) and "on each rank" in str(verdict)
    together = replace(asked, hardware=replace(asked.hardware, separate=False))
    assert judge([replace(plan, separate=False)], together).used == 31 * MIB  # one memory, a rank's


def test_the_cheapest_changes_come_first_and_fit_by_their_own_dry_run(stage_0):
    asked = request(judge(stage_0, request()).used - 20 * MIB)  # states of 3.8M parameters, in fp32: 44 MiB
    found = remedies(asked, stage_0)
    assert [each.flags for each in found] == ["--stage 1", "--stage 2", "--stage 3"]
    for each in found:
        assert each.verdict.fits and judge(each.request.plans(), each.request).used == each.verdict.used
        assert each.frees >= 20 * MIB and "s a step, not" in each.cost
    assert "sends" not in found[0].cost and "sends" not in found[1].cost
    ratio = sum(found[2].verdict.plan.sent.values()) / sum(stage_0[0].sent.values())
    assert "sends" in found[2].cost or ratio <= 1.02  # gradients of stage 0 travel in fp32


FINE = {"stage": 3, "precision": "bf16", "max_unit_numel": 1 << 14}  # nothing left to split


def test_activations_that_do_not_fit_are_made_fewer_or_computed_again():
    asked = request(options=FINE, rows=8, seq=128)
    plans = asked.plans()
    verdict = judge(plans, asked)
    found = remedies(replace(asked, hardware=hardware(verdict.used - verdict.held[ACTIVATIONS] // 5)), plans)
    assert [each.flags for each in found] == ["--batch 4 --accumulate 2", "--batch 1 --accumulate 8", "--checkpoint-activations"]
    assert ["% more" in each.cost for each in found] == [False, False, True]


def test_units_that_are_gathered_in_parts_free_what_large_ones_take():
    asked = request(options={"stage": 3, "precision": "bf16", "prefetch_nbytes": 0}, rows=1, seq=16)
    plans = asked.plans()
    verdict = judge(plans, asked)
    found = remedies(replace(asked, hardware=hardware(verdict.used - verdict.held[GATHERED] // 64)), plans)
    assert found[0].flags == "--max-unit-numel 66560"  # 4 dim (dim + 2)
    assert "sends" not in found[0].cost and found[0].verdict.held.get(GATHERED, 0) < verdict.held[GATHERED]


@pytest.mark.slow  # 5 s; each change by itself: above
def test_where_no_change_suffices_alone_several_do_and_none_is_idle():
    asked = request(options=FINE | {"stage": 0}, rows=2, seq=256)
    plans = asked.plans()
    least = replace(asked, options=FINE, rows=1, micro_batches=2)
    asked = replace(asked, hardware=hardware(int(judge(least.plans(), least).used * 1.02)))
    found = remedies(asked, plans)[0]
    assert found.verdict.fits and "--stage" in found.flags and "--batch" in found.flags
    for name, value in (("options", asked.options), ("rows", asked.rows)):
        without = replace(found.request, **{name: value} | ({"micro_batches": asked.micro_batches} if name == "rows" else {}))
        assert not judge(without.plans(), without).fits, name


def test_what_can_not_free_enough_is_not_even_tried(stage_0, monkeypatch):
    tried = []
    monkeypatch.setattr(module._Search, "tried", lambda self, changed: tried.append(flags(self.request, changed)) or [])
    asked = request(judge(stage_0, request()).used - 14 * MIB)
    assert remedies(asked, stage_0) == []
    assert tried[:3] == ["--stage 1", "--stage 2", "--stage 3"]
    assert not {"--batch 1 --accumulate 2", "--checkpoint-activations"} & set(tried)  # activations alone are a few MiB


def test_no_time_is_no_dry_run(stage_0, monkeypatch):
    monkeypatch.setattr(Request, "plans", lambda self: pytest.fail("a dry run"))
    assert remedies(request(MIB), stage_0, seconds=-1) == []


def test_every_change_has_its_option_or_is_none():
    asked = request(axes={"tp": 2, "dp": 2}, options={"stage": 1, "precision": "bf16"}, rows=4)
    said = [flags(asked, changed) for change in CHANGES if (changed := change.apply(asked)) is not None]
    assert all(said) and len(set(said)) == len(said) - 2  # more ranks: for each memory
    for words in ("--stage 2", "--batch 2 --accumulate 2", "--partition-activations", "--offload-activations cpu", "--offload-optimizer cpu",
                  "--offload-optimizer nvme", "--ranks 8 --mesh dp=4,tp=2"):  # fmt: skip
        assert any(words in each for each in said), words
    full = request(options=FINE | {"offload_optimizer": "cpu", "offload_param": "cpu"}, rows=1, checkpointing={"offload": "cpu"})
    left = {flags(full, changed) for change in CHANGES if change.tier is Tier.DEVICE and (changed := change.apply(full)) is not None}
    assert left == {"--ranks 8", "--ranks 16", "--ranks 64"}


def test_tables_add_up(stage_0):
    plan = stage_0[0]
    table = tables.memory(plan, request())
    assert table.header == ("", *PHASES)
    columns = {row[0]: [float(cell.replace(",", "") or 0) for cell in row[1:]] for row in table.rows}
    parts = [cells for name, cells in columns.items() if name.startswith("device: ") and name.split(": ")[1] in
             {category for phase in plan.phases for category in phase.held[Tier.DEVICE]}]  # fmt: skip
    for total, *amounts in zip(columns["device: total"], *parts, strict=True):
        assert total == pytest.approx(sum(amounts), abs=0.01 * len(amounts))
    sent = tables.communication(plan)
    moved = sum(float(row[3]) for row in sent.rows if row[1] != "all")
    assert moved == pytest.approx(sum(plan.sent.values()) / 1e9, abs=0.001)
    kept = tables.activations(plan)
    assert ("blocks.*", "3") == kept.rows[0][:2] and kept.rows[-1][0] == "all"


@pytest.mark.parametrize(("number", "text"), [(3_834_752, "3.83M"), (70_553_706_496, "70.6B"), (1_008_013_000_000, "1.01T"), (12, "12")])
def test_sizes_of_models_are_written_as_usual(number, text):
    assert tables.count(number) == text
