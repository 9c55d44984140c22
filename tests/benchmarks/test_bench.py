"""The benchmark's arithmetic on made-up samples, and one tiny race with real processes."""

from __future__ import annotations

import json
import os
import time

import pytest
from bench_kit import TINY, outcome

from benchmarks import cases, pictures, plan, race, report, sequence_lengths
from benchmarks.command import main
from benchmarks.micro import Unmeasured, apart, take_turns
from benchmarks.plan import Contender, ModelShape, Rounds, Workload
from benchmarks.race import Outcome
from benchmarks.tables import BYTES, SPEED, Bound, Measured, Row
from benchmarks.worker import Turn
from zeroshard.cli.arguments import UsageError
from zeroshard.cli.sheets import show


def test_selection_knows_names_kinds_and_precisions():
    assert [c.name for c in plan.select(("zs3", "ddp"), ("fp32",))] == ["zs3", "ddp"]
    assert [c.name for c in plan.select(("zs3",), ("fp32", "bf16"))] == ["zs3", "zs3-bf16"]
    assert [c.name for c in plan.select(("fsdp2-bf16",), ("fp32", "bf16"))] == ["fsdp2-bf16"]
    assert [c.name for c in plan.select(("ds",), ("fp32",))] == ["ds3", "ds2", "ds1"]
    assert [c.name for c in plan.select((), ("fp32", "bf16"), quick=True)] == list(plan.QUICK)
    with pytest.raises(ValueError, match="expected contenders among .*got 'fsdp3'"):
        plan.select(("fsdp3",), ("fp32",))


def test_step_time_runs_from_last_end_to_last_end():
    # Rank 1 is late in step 0 and early in step 1: the turn takes 4 s, and its steps must add up to that.
    turns = [Turn(10.0, (11.0, 14.0), (0.0, 0.0), 0), Turn(10.5, (13.0, 13.5), (0.0, 0.0), 0)]
    assert race.step_times(turns, 2) == [3.0, 1.0]
    one_end = [Turn(10.0, (14.0,), (0.0, 0.0), 0)]
    assert race.step_times(one_end, 2) == [2.0, 2.0]


def goals_of(section: str, *outcomes: Outcome) -> dict[str, tuple[float | None, str]]:
    """Values and verdicts."""
    goals = race.table(section, "title", Workload(), list(outcomes)).goals
    return {goal.text: (goal.value, goal.verdict) for goal in goals}


def test_ratio_is_taken_per_round():
    # The machine is three times slower in the second round, and in the third one contender alone stumbles.
    ours = outcome("zs3", [[0.5, 0.5], [1.5, 1.5], [9.0, 9.0]])
    theirs = outcome("ddp", [[1.0, 1.0], [3.0, 3.0], [1.0, 1.0]])
    goals = goals_of("cpu", ours, theirs)
    assert goals["stage 3 / DDP, step time"] == (0.5, "met")
    assert goals["stage 3 / FSDP2, step time"] == (None, "not measured")
    assert race.table("cpu", "title", Workload(), [ours, theirs]).sheet().rows[0][:3] == ["zeroshard 3", "1500", "0.50"]


def test_goals_say_met_and_missed():
    goals = goals_of(
        "cpu",
        outcome("zs3", [[0.5]], at_rest={"measured": {"all": 102}, "formula": {"all": 100}}),
        outcome("ddp", [[1.0]]),
        outcome("fsdp2", [[0.6]], peak_rss=50 << 20),
    )
    assert goals["stage 3 / FSDP2, step time"][1] == goals["stage 3 / FSDP2, peak resident memory"][1] == "missed"
    assert goals["model states at rest, difference from the formula"] == (0.02, "missed")


def test_bounds_compare_times_speeds_bytes_and_what_lies_above_another_row():
    rows = [Row("ours", [2.0, 4.0], 30.0), Row("slow", [9.0, 9.0]), Row("fast", [4.0, 8.0], 20.0), Row("plain", [1.0, 2.0])]
    peers = ("slow", "fast", "absent")  # the fastest counts
    bounds = [Bound(what, "ours", peers, 0.5, what) for what in ("time", SPEED, BYTES)]
    bounds += [Bound("above", "ours", peers, 0.5, less="plain"), Bound("none", "ours", ("absent",), 0.5)]
    goals = {goal.text: (goal.value, goal.verdict) for goal in Measured("title", rows, bounds).goals}
    assert goals["time"] == (0.5, "met") and goals[SPEED] == (2.0, "met") and goals[BYTES] == (3.0, "met")
    assert goals["above"] == (pytest.approx(1 / 3), "met") and goals["none"] == (None, "not measured")


@pytest.mark.processes
@pytest.mark.night  # 6 s; tiny races of the other cases: below, goals and what is judged: above
def test_the_cases_of_host_work_run_and_are_judged(tmp_path):
    passes, steps = apart(cases.host, 2, log_file=tmp_path / "log")
    assert {row.name for row in passes.rows} == {"plain", "fsdp2", "zeroshard"} and not passes.skipped and not steps.skipped
    assert [row.name for row in steps.rows] == ["plain", "fsdp2", "zeroshard", "fsdp2 foreach", "fsdp2 one by one"]
    assert all(goal.value is not None for goal in passes.goals + steps.goals)
    assert passes.row("zeroshard").facts["ms a unit, without plain"] > 0


def test_a_busy_machine_is_noticed():
    # 2 ranks used 1 s of processor time each in a step of 2 s: each had half a core.
    assert race.core_share([outcome("ddp", [[2.0]], cpu_s=[2.0])], ranks=2) == 0.5


def test_losses_that_differ_are_found():
    same, other = outcome("ddp", [[1.0]]), outcome("zs3", [[1.0]], losses=[2.0, 1.1])
    assert not race.table("cpu", "title", Workload(), [same, outcome("fsdp2", [[1.0]])]).broken
    for wrong in (other, outcome("zs3", [[1.0]], losses=[float("nan"), 1.0])):
        measured = race.table("cpu", "title", Workload(), [same, wrong])
        assert measured.broken and any("losses of zeroshard 3 differ from DDP's" in text for text, _ in measured.notes)
    assert not race.table("cpu", "title", Workload(), [same]).broken
    for final, broken in ((1.002, False), (1.1, True)):  # int8 states change losses, by a little
        states = Outcome(Contender("zs", 3, offload="int8"), cpu_s=[1.0], losses=[2.0, final], rounds_step_s=[[1.0]])
        assert race.table("cpu", "title", Workload(), [same, states]).broken is broken


def test_results_are_written_and_missing_numbers_stay_missing(tmp_path, capsys):
    outcomes = [outcome("ddp", [[1.0, 1.2]]), Outcome(Contender("ds", 3), skipped="deepspeed is not installed")]
    measured = race.table("cpu", "title", Workload(TINY), outcomes)
    results = report.Results(Workload(TINY), Rounds(), found={"cpu": [measured]}, skipped={"gpu": "no CUDA device"})
    for sheet in results.sheets():
        show(sheet)
    text = capsys.readouterr().out
    assert "DeepSpeed 3 skipped: deepspeed is not installed" in text and "no CUDA device" in text
    report.write(results, tmp_path)
    document = json.loads((tmp_path / "results.json").read_text())
    (found,) = document["sections"]["cpu"]
    assert found["rows"][0]["seconds"] == [pytest.approx(1.1)] and found["skipped"]["DeepSpeed 3"].startswith("skipped")
    assert found["details"]["DDP"]["losses"] == [2.0, 1.0]
    assert all(goal["verdict"] == "not measured" for goal in document["goals"])
    assert pictures.draw([measured], "title", tmp_path / "plot.png") and (tmp_path / "plot.png").stat().st_size > 0


def test_deepspeed_is_skipped_where_it_is_not_installed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(race.importlib.util, "find_spec", lambda name: None)
    (result,) = race.race([Contender("ds", 3)], Workload(TINY), Rounds(rounds=1), tmp_path)
    assert "not installed" in result.skipped and "not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--only", "fsdp3"], "got 'fsdp3'"),
        (
            ["--sections", "tpu"],
            "expected --sections among cpu, tiers, host, hostadam, states, disk, checkpoints, parallel, sequences, gpu, got tpu",
        ),
        (["--path", "/nowhere"], "--path: .*/nowhere does not exist"),
        (["--rounds", "0"], "expected --rounds"),
        (["--dim", "10"], "expected --dim divisible by --heads, got 10 and 8"),
        (["--round", "3"], "unknown option --round; did you mean --rounds"),
    ],
)
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(UsageError, match=text):
        main(arguments)


def test_turns_change_their_order_and_the_first_rounds_do_not_count():
    seen: list[str] = []
    samples = take_turns({name: lambda name=name: seen.append(name) or len(seen) for name in "abc"}, rounds=4, warmup=2)
    rounds = [seen[at : at + 3] for at in range(0, 18, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds) and len(set(map(tuple, rounds))) > 1
    assert sorted(sum(samples.values(), [])) == list(range(7, 19)) and {len(of) for of in samples.values()} == {4}


@pytest.mark.processes
def test_what_runs_apart_gives_its_result_or_says_in_one_line_why_not(tmp_path):
    log = tmp_path / "logs" / "log"
    assert apart(int, "7", log_file=log) == 7
    with pytest.raises(Unmeasured, match="^ValueError: invalid literal .*'x'$"):
        apart(int, "x", log_file=log)
    assert "Traceback" in log.read_text()
    with pytest.raises(Unmeasured, match="exit code 3"):
        apart(os._exit, 3, log_file=log)
    with pytest.raises(Unmeasured, match="SIGKILL, at most 1 s"):
        apart(time.sleep, 60, log_file=log, timeout_s=1.0)


@pytest.mark.processes
def test_a_tiny_race_with_a_contender_that_fails(tmp_path, forked_teams):
    contenders = [Contender("ddp"), Contender("zs", 9)]  # there is no stage 9: it must not stop the race
    rounds = Rounds(warmup=1, rounds=2, steps=2, memory_steps=1)
    ddp, broken = race.race(contenders, Workload(TINY), rounds, tmp_path)
    assert broken.failed and not broken.rounds_step_s
    assert ddp.ran and [len(turn) for turn in ddp.rounds_step_s] == [2, 2]
    assert len(ddp.losses) == 1 + 4 + 1 and ddp.peak_rss > 0
    assert (tmp_path / "ddp.0.log").exists()


@pytest.mark.processes
def test_a_tiny_race_over_a_mesh(tmp_path, forked_teams):
    workload = Workload(TINY, sequences=2, ranks=2, mesh=(2, 1, 1), micro_batches=2)
    contenders = plan.select(("zs1", "fsdp2"), ("fp32",), among=plan.MESH_CONTENDERS)
    outcomes = race.race(contenders, workload, Rounds(warmup=1, rounds=1, steps=1, memory_steps=1), tmp_path)
    measured = race.table("parallel", "A mesh", workload, outcomes)
    assert all(o.ran and o.peak_pss_sum > 0 for o in outcomes) and not measured.broken, [o.status for o in outcomes]
    assert [row.name for row in measured.rows] == ["zeroshard 1", "FSDP2"] and "PSS MiB, all" in measured.sheet().header
    assert [goal.verdict == "not measured" for goal in measured.goals] == [False, False, True, True]  # stage 2 took no part


@pytest.mark.processes
def test_a_tiny_race_over_the_length_of_sequences(tmp_path, forked_teams):
    pytest.importorskip("transformers")
    contenders = [Contender("zs", 3), Contender("sp", 3), Contender("long", 3)]
    shape = ModelShape(vocab_size=64, dim=16, layers=2, heads=2)
    (table,) = sequence_lengths.run(contenders, 0, Rounds(rounds=1), tmp_path, (32,), shape, ranks=(2,))
    assert not table.broken and [row.name.partition("tokens  ")[2] for row in table.rows] == [each.label for each in contenders]
    assert any("losses: all contenders agree" in text for text, _ in table.notes)
    assert all(row.facts["tokens/s"] > 0 and "added MiB" in row.facts for row in table.rows)
