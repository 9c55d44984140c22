"""Sweeps and pictures: speed-up over ideal, where communication cancels the gain, and what is written."""

import json
import struct

import pytest
from unit_hardware import UNIT, compute, move, trace

from zeroshard.errors import ConfigError
from zeroshard.planner.simulator.hardware import Hardware
from zeroshard.planner.simulator.simulate import simulate
from zeroshard.planner.simulator.sweep import sweep
from zeroshard.planner.simulator.timeline import draw_timeline, write_chrome_trace

OVERLAPPED = trace(move("gather 1", 2), compute("forward 1", 4, [0]), move("gather 2", 3), compute("forward 2", 1, [1, 2]))


def reduced(ranks, micro_batch):
    """A second of computation for each sequence, then an exchange that takes a second for every 100 ranks."""
    work = compute("forward", float(micro_batch))
    return trace(
        work, move("reduce", ranks / 100, [0]), model_flops=1e12 * micro_batch, tokens=10 * micro_batch, axes={"dp": ranks}
    )


def fixed_batch(ranks, micro_batch):
    """A second of computation shared by all, and a reduction that each rank makes longer: at last more ranks take longer."""
    return trace(compute("forward", 1 / ranks), move("reduce", ranks / 100, [0]), model_flops=1e12 / ranks, axes={"dp": ranks})


def test_rows_tell_speedup_over_ideal():
    found = sweep(reduced, UNIT, [1, 100], utilisations=[1.0])
    first, last = found.rows
    assert (first.step_s, last.step_s) == (1.01, 2)
    assert last.tflops == 0.5
    assert last.tokens_per_s == 10 * 100 / 2
    assert last.ideal == 100
    assert last.speedup == pytest.approx(100 * 1.01 / 2)
    assert last.efficiency == pytest.approx(0.505)


def test_the_gain_is_cancelled_where_efficiency_falls_below_one_half():
    found = sweep(reduced, UNIT, [1, 10, 100, 1000], utilisations=[0.5, 1.0])
    half, full = found.limits
    assert half.ranks == 100  # a step of 1.02 s with 1 rank takes 3
    assert full.ranks == 1000
    assert "bound by links inside nodes" in full.why
    larger = sweep(reduced, UNIT, [1, 10, 100, 1000], micro_batches=[8], utilisations=[1.0])
    assert larger.limits[0].ranks == 1000  # 8 s of work and 10 of exchange
    assert sweep(reduced, UNIT, [1, 1000], micro_batches=[20], utilisations=[1.0]).limits[0].ranks is None


def test_the_gain_is_cancelled_where_all_ranks_do_no_more():
    (limit,) = sweep(fixed_batch, UNIT, [8, 10, 12], utilisations=[1.0]).limits  # 0.205, 0.2 and 0.203 s
    assert limit.ranks == 12
    assert "do no more than 10" in limit.why


def test_latency_costs_thousands_of_ranks_more():
    def made(ranks, micro_batch):
        return trace(move("reduce", 1, peers=ranks), model_flops=1e12, axes={"dp": ranks})

    found = sweep(made, UNIT, [2, 4096], utilisations=[1.0], latencies_s=[0.0, 0.5])
    assert [row.step_s for row in found.rows] == [1, 1, 1.5, 7]


def test_traces_are_made_once_for_each_pair():
    calls = []
    found = sweep(lambda *pair: calls.append(pair) or reduced(*pair), UNIT, [1, 2], [1, 2])
    assert calls == [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert len(found.rows) == 12


def test_a_table_and_a_picture(tmp_path):
    found = sweep(reduced, UNIT, [1, 10, 1000], utilisations=[1.0])
    header, rows = found.grid()
    assert [row[0] for row in rows] == ["1", "10", "1,000"] and {len(row) for row in rows} == {len(header)}
    assert "1,000 ranks do 9% of the ideal" in str(found.limits[0])
    found.draw(tmp_path / "scaling.png")
    assert size_of(tmp_path / "scaling.png")[0] > 1000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": []}, "ranks: expected whole numbers"),
        ({"ranks": [0]}, "ranks: expected whole numbers"),
        ({"ranks": [1], "micro_batches": [1.5]}, "micro_batches: expected whole numbers"),
        ({"ranks": [1], "utilisations": []}, "utilisations: expected at least one"),
        ({"ranks": [1], "utilisations": [2.0]}, "utilisation: expected a share"),
    ],
)
def test_bad_lists_are_named(given, said):
    with pytest.raises(ConfigError, match=said):
        sweep(reduced, UNIT, **given)


def size_of(path):
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_a_chrome_trace_has_a_lane_for_each_resource_of_each_stage(tmp_path):
    write_chrome_trace(simulate([OVERLAPPED, OVERLAPPED], UNIT), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert lanes == {(stage, name) for stage in (0, 1) for name in ("computation", "links inside nodes")}
    last = next(e for e in events if e["name"] == "forward 2")
    assert (last["ts"], last["dur"]) == (6e6, 1e6)


def test_a_picture_of_the_timeline_has_all_stages(tmp_path):
    draw_timeline(simulate(OVERLAPPED, UNIT), tmp_path / "one.png")
    draw_timeline(simulate([OVERLAPPED, OVERLAPPED], Hardware.named("cpu")), tmp_path / "two.png", "title")
    assert size_of(tmp_path / "one.png")[0] == size_of(tmp_path / "two.png")[0] > 1000
