"""The benchmark of checkpoints, on a model of nothing: every contender saves and loads, and the figures follow."""

import pytest

from benchmarks import checkpoints
from benchmarks.plan import Contender, ModelShape


@pytest.mark.slow  # 12 s; saves and loads themselves: tests/checkpoint
@pytest.mark.processes
@pytest.mark.limit(120)
def test_a_tiny_race_of_checkpoints(tmp_path, monkeypatch, forked_teams):
    tiny = ModelShape(vocab_size=64, seq_len=16, dim=32, layers=2, heads=2)
    monkeypatch.setattr(checkpoints, "SIZES", {"tiny": (tiny, True, 2)})
    monkeypatch.setattr(checkpoints, "drop_page_cache", lambda: False)  # other tests are running
    (tmp_path / "disk").mkdir()
    (result,) = checkpoints.run(str(tmp_path / "disk"), tmp_path / "logs", checkpoints.CONTENDERS[:2])
    common = ("save", "load", "save and load", "stall")
    for name in [f"{who}: {what}" for who in ("zeroshard 3", "FSDP2") for what in common] + ["zeroshard 3: memory copy"]:
        row = result.row(name)
        assert len(row.seconds) == 2 and min(row.seconds) > 0
        assert row.nbytes is None or row.nbytes > 12 * 28_000  # fp32 parameters and two moments
    assert not result.skipped and not result.broken
    verdicts = {goal.text: goal.verdict for goal in result.goals}
    assert verdicts["tiny: save and load / DCP with FSDP2, time"] != "not measured"
    assert verdicts["tiny: save and load / DeepSpeed 3, time"] == "not measured"  # it took no part
    assert not list((tmp_path / "disk").iterdir())


def test_a_table_has_the_goals_and_names_what_is_missing():
    ours = checkpoints.Kept(Contender("zs", 3), nbytes=180, seconds={
        "save": [1.0, 2.0, 3.0], "save and load": [2.0, 3.0, 4.0], "the file engine alone": [0.9, 1.8, 2.7],
        "stall": [0.11, 0.12, 0.5], "memory copy": [0.1, 0.1, 0.1],
    })  # fmt: skip
    theirs = checkpoints.Kept(Contender("fsdp2"), seconds={"save and load": [5.0, 6.0, 8.0]})
    failed = checkpoints.Kept(Contender("ds", 3))
    failed.fail("no")
    result = checkpoints.table("some", [ours, theirs, failed], cold=True)
    values = {goal.text.split(": ")[1]: (goal.value, goal.verdict) for goal in result.goals}
    assert values["save throughput / file engine"] == (pytest.approx(0.9), "met")
    assert values["save and load / DCP with FSDP2, time"] == (pytest.approx(0.5), "met")
    assert values["save and load / DeepSpeed 3, time"] == (None, "not measured")
    assert values["stall of a save in the background / one memory copy"] == (pytest.approx(1.2), "met")
    assert result.broken and any("failed: no" in text for text, _ in result.sheet().notes)
