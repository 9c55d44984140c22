"""`zeroshard check`: each key of a DeepSpeed configuration with its treatment; code 1 where `deepspeed.initialize` would refuse."""

import json

import pytest

from zeroshard.cli import main
from zeroshard.integrations.deepspeed.ds_config import DeepSpeedConfig
from zeroshard.integrations.deepspeed.sections import DeepSpeedConfigError

USUAL = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "gradient_clipping": 1.0, "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 900,
        "offload_optimizer": {"device": "cpu", "pin_memory": True}, "sub_group_size": 1e8,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "wall_clock_breakdown": True, "amp": {"enabled": False}, "made_by_hand": True,
}  # fmt: skip


def checked(given, tmp_path, capsys, *options):
    """(exit code, key -> row, all that was printed) of a configuration."""
    (tmp_path / "ds.json").write_text(json.dumps(given))
    code = main(["check", str(tmp_path / "ds.json"), "--json", *options])
    told = json.loads(capsys.readouterr().out)
    return code, {row["key"]: row for row in told["keys"]}, told


def test_a_usual_configuration_is_taken_and_each_key_is_told(tmp_path, capsys):
    code, rows, told = checked(USUAL, tmp_path, capsys)
    assert (code, told["refused"]) == (0, False)
    treatments = {
        "train_batch_size": "open", "gradient_clipping": "translated", "bf16.enabled": "translated", "fp16": "off",
        "zero_optimization.stage": "translated", "zero_optimization.overlap_comm": "ignored",
        "zero_optimization.reduce_bucket_size": "open", "zero_optimization.stage3_prefetch_bucket_size": "translated",
        "zero_optimization.offload_optimizer.device": "translated", "optimizer.type": "served", "optimizer.params.lr": "served",
        "scheduler.params.warmup_num_steps": "served", "wall_clock_breakdown": "ignored", "amp": "off", "made_by_hand": "ignored",
    }  # fmt: skip
    assert {key: rows[key]["treatment"] for key in treatments} == treatments
    assert rows["gradient_clipping"]["text"].startswith("zs.shard(max_grad_norm=1.0): ")
    assert rows["bf16.enabled"]["text"].startswith("zs.shard(precision='bf16'): ")
    assert "zs.report" in rows["wall_clock_breakdown"]["text"] and "not a key" in rows["made_by_hand"]["text"]
    assert sum(told["counts"].values()) == len(rows)


REFUSED = {
    "a slip": ({"zero_optimizaton": {"stage": 3}}, "zero_optimizaton", "Did you mean 'zero_optimization'?"),
    "a slip in a section": ({"zero_optimization": {"stge": 3}}, "zero_optimization.stge", "Did you mean 'stage'?"),
    "a section": ({"autotuning": {"enabled": True}}, "autotuning", "`zeroshard plan` says what fits"),
    "a value": ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage", "expected 0, 1, 2 or 3, got 7"),
    "an optimizer": ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", "not supported"),
    "an argument": ({"optimizer": {"type": "SGD", "params": {"lr": 1, "color": 2}}}, "(together)", "color"),
    "batches": ({"train_batch_size": 7, "gradient_accumulation_steps": 2}, "train_batch_size", "does not hold"),
    "two modes": ({"fp16": {"enabled": True}}, "fp16.enabled", "bf16.enabled"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_initialize_would_refuse_is_code_1_with_the_remedy(what, tmp_path, capsys):
    given, key, text = REFUSED[what]
    given = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, **given}
    code, rows, told = checked(given, tmp_path, capsys)
    assert (code, told["refused"]) == (1, True)
    assert rows[key]["treatment"] == "refused" and text in rows[key]["text"]
    if "optimizer" not in given:  # that one is built later
        with pytest.raises((ValueError, AssertionError, DeepSpeedConfigError)):
            DeepSpeedConfig(given, world_size=1)


def test_several_refusals_are_told_at_once(tmp_path, capsys):
    given = {"train_batch_size": 8, "gradient_cliping": 1, "zero_optimization": {"stage": 9, "sub_group_size": -1}, "comet": True}
    code, rows, _ = checked(given, tmp_path, capsys)
    refused = {key for key, row in rows.items() if row["treatment"] == "refused"}
    assert (code, refused) == (1, {"gradient_cliping", "zero_optimization.stage", "zero_optimization.sub_group_size", "comet"})
    main(["check", str(tmp_path / "ds.json"), "-q"])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[:-1]] == ["refused"] * 4 and printed[-1].endswith("1 served, 4 refused")


def test_batches_are_those_of_the_ranks(tmp_path, capsys):
    given = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert checked(given, tmp_path, capsys)[0] == 0  # of the 8 ranks that they say
    assert checked(given, tmp_path, capsys, "--ranks", "8")[0] == 0
    assert checked(given, tmp_path, capsys, "--ranks", "3")[0] == 1


@pytest.mark.parametrize("columns", [60, 160])
def test_the_table_keeps_to_the_terminal_and_json_to_100_lines(columns, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    (tmp_path / "ds.json").write_text(json.dumps(USUAL))
    assert main(["check", str(tmp_path / "ds.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= columns
    assert main(["check", str(tmp_path / "ds.json"), "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 100


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"a": 1, "a": 2}'])
def test_what_is_no_configuration_is_a_mistake_in_the_call(text, tmp_path, capsys):
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    assert main(["check", str(tmp_path / "ds.json")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("zeroshard: error: ") and said.err.count("\n") == 1 and said.out == ""
