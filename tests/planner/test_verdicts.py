"""Verdicts and tables: what does not fit is said with its reason, and tables add up."""

from dataclasses import replace

import pytest
from planned import MIB, hardware, request

from zeroshard.config import Tier
from zeroshard.engine.ledger import OPTIMIZER, PARAMETERS
from zeroshard.planner import tables
from zeroshard.planner.plan import PHASES, Phase
from zeroshard.planner.request import GIB, judge


@pytest.fixture(scope="module")
def stage_0():
    return request().plans()


def test_a_verdict_is_about_the_fullest_phase_with_the_device_s_overhead(stage_0):
    asked = replace(request(), hardware=hardware(GIB, overhead_nbytes=64 * MIB))
    verdict = judge(stage_0, asked.hardware)
    assert verdict.fits and verdict.used == stage_0[0].peak(Tier.DEVICE) + 64 * MIB
    assert str(verdict).startswith("fits: ") and "of 1.0 GiB (device overhead 0.0625 counted), fullest in" in str(verdict)
    tight = replace(asked, hardware=hardware(verdict.used - MIB, overhead_nbytes=64 * MIB))
    verdict = judge(stage_0, tight.hardware)
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
    verdict = judge([plan], asked.hardware)
    assert (verdict.tier, verdict.used, verdict.short) == (Tier.HOST, 120 * MIB, 20 * MIB)
    assert "of a node's host" in str(verdict) and "on each rank" in str(verdict)
    together = replace(asked, hardware=replace(asked.hardware, separate=False))
    assert judge([replace(plan, separate=False)], together.hardware).used == 31 * MIB  # one memory, a rank's


def test_tables_add_up(stage_0):
    plan = stage_0[0]
    table = tables.memory(plan)
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
    assert kept.rows[0][:2] == ("blocks.*", "3") and kept.rows[-1][0] == "all"


@pytest.mark.parametrize(
    ("number", "text"), [(3_834_752, "3.83M"), (70_553_706_496, "70.6B"), (1_008_013_000_000, "1.01T"), (12, "12")]
)
def test_sizes_of_models_are_written_as_usual(number, text):
    assert tables.count(number) == text
