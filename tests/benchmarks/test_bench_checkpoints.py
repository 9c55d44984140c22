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
    ours, theirs = result.kept
    for kept in (ours, theirs):
        assert kept.skipped is None and len(kept.save_s) == len(kept.load_s) == 2
        assert min(kept.save_s + kept.load_s) > 0
        assert kept.nbytes > 12 * 28_000  # fp32 parameters and two moments
        assert len(kept.stall_s) == len(kept.lost_s) == 2 and min(kept.stall_s) > 0
    assert len(ours.copy_s) == len(ours.engine_nbytes_per_s) == 2
    verdicts = {goal.text: goal.verdict for goal in result.goals}
    assert verdicts["tiny: save and load / DCP with FSDP2, time"] != "not measured"
    assert verdicts["tiny: save and load / DeepSpeed 3, time"] == "not measured"  # it took no part
    assert [row[0] for row in checkpoints.sheet(result).rows] == ["zeroshard 3", "FSDP2"]
    assert not list((tmp_path / "disk").iterdir())


def test_ratios_are_of_medians_and_name_what_is_missing():
    ours = checkpoints.Kept(
        Contender("zs", 3), save_s=[1.0, 2.0, 3.0], load_s=[1.0, 1.0, 1.0], stall_s=[0.11, 0.12, 0.5],
        copy_s=[0.1, 0.1, 0.1], engine_nbytes_per_s=[100.0, 100.0, 100.0], nbytes=180,
    )  # fmt: skip
    theirs = checkpoints.Kept(Contender("fsdp2"), save_s=[4.0, 5.0, 6.0], load_s=[1.0, 1.0, 2.0])
    failed = checkpoints.Kept(Contender("ds", 3), skipped="failed: no")
    result = checkpoints.Kepts("some", ModelShape(), [ours, theirs, failed], cold=True)
    values = {goal.text.split(": ")[1]: (goal.value, goal.verdict) for goal in result.goals}
    assert values["save throughput / file engine"] == (pytest.approx(0.9), "met")
    assert values["save and load / DCP with FSDP2, time"] == (pytest.approx(0.5), "met")
    assert values["save and load / DeepSpeed 3, time"] == (None, "not measured")
    assert values["stall of a save in the background / one memory copy"] == (pytest.approx(1.2), "met")
    assert any("failed: no" in text for text, _ in checkpoints.sheet(result).notes)
