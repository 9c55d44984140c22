"""`zeroshard plan` and `zeroshard simulate`: tables, one line, JSON, files; mistakes are one sentence with the nearest choice."""

import dataclasses
import json
import re
import threading

import pytest

import zeroshard as zs
from zeroshard.cli import main
from zeroshard.cli.options import parse_train
from zeroshard.config import Tier, read_layout
from zeroshard.planner import recorder
from zeroshard.planner.simulator.hardware import Hardware
from zeroshard.planner.simulator.simulate import Simulation

SMALL = ["quickstart", "--ranks", "2", "--seq", "64"]


def run(capsys, *arguments):
    """(exit code, what was printed)"""
    code = main(list(arguments))
    captured = capsys.readouterr()
    told = captured.err.splitlines()
    assert all(line.startswith("... ") for line in told), captured.err  # progress, where it takes longer
    return code, captured.out


def test_a_plan_is_a_page_with_the_verdict_first(capsys):
    code, printed = run(capsys, "plan", *SMALL, "--stage", "2", "--precision", "fp32")
    assert code == 0
    lines = printed.splitlines()
    assert lines[0].startswith("fits: 1.2 of 80.0 GiB (device overhead 1.1 counted), fullest in backward, at ngrams.2")
    assert lines[1] == "quickstart (3.83M parameters) on 2 h100-80gb, stage 2, fp32, 1 x 1 x 64 tokens a rank"
    assert "Sends in a step, GB: dp 0.0153" in printed  # 2 Psi (N-1)/N elements of 4 bytes
    for words in ("Memory of rank 0 of 2", "device: optimizer states", "device: capacity", "Kept for backward", "blocks.*"):
        assert words in printed
    assert len(lines) <= 25


def test_full_adds_all_tables(capsys):
    _, printed = run(capsys, "plan", *SMALL, "--full")
    assert "Sent, copied, read and written in a step" in printed and "Kept for backward by a micro-batch" in printed


def test_the_verdict_stands_before_the_search_for_what_would_make_it_fit(capsys, small_device, monkeypatch):
    printed_before = []
    monkeypatch.setattr("zeroshard.cli.plan.remedies", lambda *_: printed_before.append(capsys.readouterr().out) or [])
    main(["plan", *SMALL, "--stage", "0", "--hardware", small_device])
    assert printed_before[0].startswith("short by ")


def test_progress_is_told_from_the_second_second_on(capsys, monkeypatch):
    monkeypatch.setattr("zeroshard.cli.progress._FIRST_S", 0.01)
    monkeypatch.setattr("zeroshard.cli.progress._EVERY_S", 0.01)
    shown, tell = threading.Event(), recorder.tell

    def write(line, **where):
        print(line, **where)
        if "dry run of rank 0: " in line:
            shown.set()

    def tell_and_wait(text):  # a dry run takes 0.3 s: on a busy machine it may be over before the thread that prints gets a core
        tell(text)
        if text.startswith("dry run of rank 0: "):
            assert shown.wait(30)

    monkeypatch.setattr("zeroshard.cli.progress.print", write, raising=False)
    monkeypatch.setattr(recorder, "tell", tell_and_wait)
    assert main(["simulate", *SMALL]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told and all(line.startswith("... ") for line in told)
    assert any("dry run of rank 0: " in line for line in told)


def test_brief_is_the_line_alone(capsys):
    _, printed = run(capsys, "plan", *SMALL, "--brief")
    assert printed.count("\n") == 1 and "fits" in printed


@pytest.fixture
def small_device(tmp_path):
    """A file of hardware with 80 MiB a device, which the states of the quickstart's model fill at stage 0."""
    whole = Hardware.named("h100-80gb")
    device = dataclasses.replace(whole.device, memory_nbytes=80 << 20)
    dataclasses.replace(whole, name="small", device=device, overhead_nbytes=0).save(tmp_path / "small.toml")
    return str(tmp_path / "small.toml")


def test_what_does_not_fit_is_exit_code_1_with_what_would_make_it_fit(capsys, small_device):
    code, printed = run(capsys, "plan", *SMALL, "--stage", "0", "--hardware", small_device)
    assert code == 1
    assert "What would make it fit" in printed and "--stage 1" in printed and printed.startswith("short by")
    code, printed = run(capsys, "plan", *SMALL, "--stage", "1", "--hardware", small_device, "--brief")
    assert (code, "fits" in printed) == (0, True)
    code, printed = run(capsys, "plan", *SMALL, "--stage", "0", "--hardware", small_device, "--try-seconds", "0.000001")
    assert code == 1 and "no change was found in 1e-06 s" in printed


def test_json_is_a_summary_and_json_full_all_of_it(capsys):
    asked = ["plan", *SMALL, "--offload-optimizer", "cpu", "--precision", "fp16"]
    _, printed = run(capsys, *asked, "--json")
    assert len(printed.splitlines()) <= 100
    short = json.loads(printed)
    assert short["verdict"]["fits"] and short["remedies"] == [] and short["run"]["num_parameters"] == 3_834_752
    _, printed = run(capsys, *asked, "--json-full")
    found = json.loads(printed)
    assert found["plan"]["num_parameters"] == 3_834_752 and found["plan"]["config"]["stage"] == 3
    assert found["verdict"] == short["verdict"]
    held = {phase["name"]: phase["held"] for phase in found["plan"]["phases"]}
    assert held["step"][Tier.HOST.value]["optimizer states"] >= 8 * 3_834_752 / 2
    assert short["peak_nbytes"]["host"] == max(sum(each.get("host", {}).values()) for each in held.values())
    assert found["plan"]["trace"]["tasks"][0]["nbytes"]


def test_how_states_and_masters_rest(capsys, tmp_path):
    coded = ["--stage", "2", "--optimizer-states", "int8", "--master-weights", "split"]
    _, printed = run(capsys, "plan", *SMALL, *coded, "--json-full")
    report = json.loads(printed)["plan"]["report"]
    told = re.fullmatch(r"optimizer states int8 \(.* ([\d,]+) elements, keep fp32\); masters split: .*", report["states"])
    numel, exempt = report["num_parameters"], int(told[1].replace(",", ""))
    kept = 2 * 4 * exempt + 2 * 260 / 256 * (numel - exempt) + 2 * numel
    assert report["formula"]["optimizer states"] == pytest.approx(kept / 2, abs=8)
    assert main(["plan", *SMALL, *coded, "--precision", "fp32"]) == 2
    assert "master_weights='split' does not go with precision='fp32'" in capsys.readouterr().err
    path = tmp_path / "layout.json"
    run(capsys, "plan", *SMALL, *coded, "--mesh", "dp=2", "--auto", "--global-batch", "2", "--write-config", str(path))
    assert {"optimizer_states": "int8", "master_weights": "split"}.items() <= read_layout(path)["shard"].items()
    for options in (["--config", str(path)], [*coded, "--precision", "bf16"]):
        trained = parse_train(options).sharding()
        assert trained.optimizer_states == zs.StateFormat("int8") and trained.master_weights == "split"
    given = parse_train(["--config", str(path), "--optimizer-states", "bf16", "--master-weights", "none"]).sharding()
    assert given.optimizer_states == zs.StateFormat("bf16") and given.master_weights is False


def test_a_model_that_reads_no_tokens_is_fed_by_an_example(capsys, tmp_path, monkeypatch):
    (tmp_path / "seeing.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def model():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))\n"
        "def images(rows):\n    return torch.zeros(rows, 3, 16, 16)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    _, printed = run(capsys, "plan", "seeing:model", "--example", "seeing:images", "--micro-batch", "5", "--ranks", "2", "--json")
    few = json.loads(printed)
    _, printed = run(
        capsys, "plan", "seeing:model", "--example", "seeing:images", "--micro-batch", "500", "--ranks", "2", "--json"
    )
    more = json.loads(printed)
    # outputs of the convolution, kept in 16 bits, for 495 images more
    assert more["peak_nbytes"]["device"] - few["peak_nbytes"]["device"] >= 495 * 8 * 14 * 14 * 2
    assert main(["plan", "seeing:model", "--example", "seeing:pictures"]) == 2
    assert "--example: seeing has no function 'pictures'" in capsys.readouterr().err


def test_files_of_a_plan(capsys, tmp_path):
    _, printed = run(capsys, "plan", *SMALL, "--out", str(tmp_path / "plan"))
    assert sorted(path.name for path in (tmp_path / "plan").iterdir()) == [
        "memory.png",
        "plan.html",
        "report.json",
        "timeline.png",
    ]
    assert str(tmp_path / "plan" / "plan.html") in printed
    page = (tmp_path / "plan" / "plan.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "s a step" in page


def test_a_pipeline_is_planned_at_its_first_and_last_stage(capsys, monkeypatch):
    looked = []
    plan = zs.plan
    monkeypatch.setattr(
        "zeroshard.planner.dry_run.plan", lambda *args, **options: looked.append(options["rank"]) or plan(*args, **options)
    )
    _, printed = run(capsys, "plan", "quickstart", "--seq", "64", "--mesh", "pp=3,dp=2", "--stage", "1", "--brief")
    assert looked == [0, 4] and "6 h100-80gb (pp=3, dp=2), stage 1, bf16, 6 x 1 x 64" in printed


def test_the_rest_of_the_ranks_is_data_parallel(capsys):
    _, printed = run(capsys, "plan", "quickstart", "--seq", "64", "--ranks", "8", "--mesh", "tp=2", "--brief")
    assert "8 h100-80gb (dp=4, tp=2)" in printed


def test_auto_writes_a_configuration_that_train_and_shard_read(capsys, tmp_path):
    path = tmp_path / "layout.json"
    arguments = ["quickstart", "--ranks", "4", "--auto", "--global-batch", "16", "--write-config", str(path)]
    code, printed = run(capsys, "plan", *arguments, "--hardware", "a100-40gb")
    assert code == 0 and "the fastest" in printed and "runner-up" in printed and "It is bound by" in printed.replace("\n", " ")
    config = zs.Config.build(str(path))
    section = json.loads(path.read_text())["zeroshard"]
    assert section["global_batch"] == 16 and section["shard"]["stage"] == config.stage


def test_a_simulation_says_seconds_and_what_bounds_them(capsys, tmp_path):
    code, printed = run(capsys, "simulate", *SMALL, "--out", str(tmp_path))
    assert code == 0 and "What is busy in a step" in printed and "s a step, " in printed and "bound by computation" in printed
    names = {"memory.png", "simulation.html", "timeline.json", "timeline.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    _, printed = run(capsys, "simulate", *SMALL, "--json")
    fast = json.loads(printed)
    _, printed = run(capsys, "simulate", *SMALL, "--json", "--utilisation", "0.01", "--latency", "100")
    assert json.loads(printed)["step_s"] > 1.5 * fast["step_s"] and {"tflops", "tokens_per_s", "busy_s", "bound"} <= fast.keys()


def test_a_simulation_of_a_pipeline_joins_all_stages(capsys, monkeypatch):
    seen = []
    made = Simulation.__init__
    monkeypatch.setattr(
        Simulation, "__init__", lambda self, *args, **fields: seen.append(fields["traces"]) or made(self, *args, **fields)
    )
    run(capsys, "simulate", "quickstart", "--seq", "64", "--mesh", "pp=3,dp=2", "--stage", "1")
    assert [trace.rank for trace in seen[0]] == [0, 2, 4]


def test_a_sweep_is_a_table_and_a_picture(capsys, tmp_path):
    sweep = ["--sweep", "ranks=2,16;micro-batch=1,2", "--utilisation", "0.5,1"]
    _, printed = run(capsys, "simulate", "quickstart", "--seq", "64", *sweep, "--out", str(tmp_path))
    assert "speed-up" in printed and "micro-batch 2, 50% of bandwidth" in printed and (tmp_path / "scaling.png").exists()
    page = (tmp_path / "sweep.html").read_text()
    assert "data:image/png;base64," in page and "micro-batch 2, 50% of bandwidth" in page and 'src="http' not in page
    _, printed = run(capsys, "simulate", "quickstart", "--seq", "64", *sweep, "--json")
    assert [(row["ranks"], row["micro_batch"]) for row in json.loads(printed)["rows"]] == [
        (r, b) for b in (1, 2) for _ in (0.5, 1) for r in (2, 16)
    ]


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstrat"], ["'quickstrat'", "Did you mean 'quickstart'?"]),
        (["quickstart", "--hardware", "h100"], ["hardware", "'h100'", "Did you mean 'h100-80gb'?"]),
        (["quickstart", "--hardware", "none.toml"], ["none.toml", "can not be read"]),
        (["quickstart", "--mesh", "dp=2,tp=3"], ["tp to divide the 4 heads", "the nearest: tp=2"]),
        (["quickstart", "--mesh", "pp=4"], ["at most 3 stages", "pp=4; the nearest: pp=3"]),
        (["quickstart", "--mesh", "pp=2,tp=2", "--ranks", "6"], ["multiply to the 6 ranks", "try 4 or 8 ranks"]),
        (["quickstart", "--ranks", "99999999999"], ["at most 1,048,576", "got 99,999,999,999"]),
        (["quickstart", "--mesh", "ep=2"], ["no module of experts", "axis ep out of the mesh"]),
        (["quickstart", "--mesh", "sp=3"], ["sp to divide the 256 tokens of a sequence, got sp=3"]),
        (["quickstart", "--mesh", "cp=2"], ["--mesh", "cp=2"]),
        (["quickstart", "--seq", "300"], ["at most the 256 tokens", "got 300"]),
        (["quickstart", "--micro-batch", "0"], ["--micro-batch", "positive", "got 0"]),
        (["quickstart", "--stage", "2", "--offload-param", "cpu"], ["offload_param='cpu' needs stage 3"]),
        (["quickstart", "--ranks", "4", "--shard-size", "3"], ["--shard-size", "divisor of the 4 ranks"]),
        (["quickstart", "--partition-activations"], ["--partition-activations", "--mesh tp=2"]),
        (["math:pi"], ["math has no function 'pi'"]),
        (["math:"], ["expected module:function, got 'math:'"]),
        (["no_such_module:model"], ["'no_such_module:model': there is no such module"]),
        (["--stagee", "3", "quickstart"], ["--stagee", "did you mean --stage?"]),
        (["quickstart", "--batch", "4"], ["did you mean --micro-batch?"]),
        (["quickstart", "--device=h100-80gb"], ["did you mean --hardware?"]),
        (["quickstart", "--micro-batches", "4"], ["did you mean --accumulate?"]),
        (["nobody/no-such-model"], ["'nobody/no-such-model' is not in the local cache", "hf download"]),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_choice(command, arguments, words, capsys):
    assert main([command, *arguments]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("... ")]
    assert captured.out == "" and len(lines) == 1 and lines[0].startswith("zeroshard: error: ")
    for word in words:
        assert word in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "quickstart", "--lossy"], ["--lossy", "only with --auto"]),
        (["plan", "quickstart", "--auto", "--global-batch", "0"], ["--global-batch", "positive", "got 0"]),
        (["plan", "quickstart", "--try-seconds", "nan"], ["--try-seconds", "at least 0", "got nan"]),
        (["simulate", "quickstart", "--sweep", ""], ["--sweep", "expected ranks=8,16"]),
        (["simulate", "quickstart", "--sweep", "ranks=inf"], ["--sweep", "positive numbers", "'inf'"]),
        (["simulate", "quickstart", "--sweep", "ranks=2;ranks=4"], ["--sweep", "ranks twice"]),
        (["simulate", "quickstart", "--latency", "nan"], ["--latency", "positive numbers", "'nan'"]),
        (["plan", "quickstart", "--auto", "--offload-param", "cpu"], ["--auto", "leave out the --offload options"]),
        (
            ["plan", "quickstart", "--auto", "--mesh", "dp=4", "--global-batch", "6"],
            ["batch of 6 sequences", "the nearest: 4 or 8"],
        ),
        (["plan", "quickstart", "--auto", "--config", "layout.json"], ["unknown option --config; did you mean --write-config?"]),
        (["plan", "quickstart", "--mesh", "sp=8", "--auto"], ["sp=8", "a divisor of 4"]),
        (
            ["plan", "quickstart", "--auto", "--mlp-tokens", "8", "--write-config", "layout.json"],
            ["--mlp-tokens", "zs.long_context"],
        ),
        (["plan", "quickstart", "--loss-tokens", "8"], ["loss_tokens", "no language model of Transformers"]),
        (["plan", "quickstart", "--mesh", "tp=2", "--mlp-tokens", "8"], ["mlp_tokens", "axes dp and sp"]),
        (["simulate", "quickstart", "--mesh", "sp=2", "--sweep", "ranks=3"], ["multiples of pp x tp x sp = 2", "the nearest: 2"]),
        (["simulate", "quickstart", "--sweep", "batch=2"], ["--sweep", "did you mean micro-batch?"]),
        (["simulate", "quickstart", "--sweep", "rank=2"], ["--sweep", "did you mean ranks?"]),
        (["simulate", "quickstart", "--sweep", "ranks=2,x"], ["--sweep", "positive numbers", "'2,x'"]),
        (
            ["simulate", "quickstart", "--mesh", "tp=2", "--sweep", "ranks=3"],
            ["--sweep", "multiples of pp x tp = 2", "the nearest: 2"],
        ),
        (["simulate", "quickstart", "--utilisation", "2"], ["utilisation", "up to 1"]),
    ],
)
def test_mistakes_of_one_command_alone(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    for word in words:
        assert word in captured.err


def test_nothing_is_written_where_the_hardware_lacks_a_number(capsys, tmp_path):
    known = Hardware.named("a100-40gb")
    peaks = {name: peak for name, peak in known.device.peak_flops.items() if name != "bf16"}
    dataclasses.replace(known, device=dataclasses.replace(known.device, peak_flops=peaks)).save(tmp_path / "old.toml")
    for command in ("plan", "simulate"):
        assert main([command, *SMALL, "--hardware", str(tmp_path / "old.toml"), "--out", str(tmp_path / "plan")]) == 2
        assert "no peak_flops for 'bf16'" in capsys.readouterr().err and not (tmp_path / "plan").exists()


def test_a_sweep_varies_axes(capsys):
    _, printed = run(capsys, "simulate", "quickstart", "--seq", "64", "--sweep", "ranks=4,8;sp=1,2;tp=1", "--json")
    rows = json.loads(printed)["rows"]
    assert [(row["mesh"], row["ranks"]) for row in rows] == [(f"sp={sp},tp=1", ranks) for sp in (1, 2) for ranks in (4, 8)]
    assert rows[0]["tokens_per_s"] != rows[2]["tokens_per_s"]
    _, printed = run(capsys, "simulate", "quickstart", "--seq", "64", "--sweep", "ranks=4;sp=1,2")
    assert "sp=2" in printed


def test_a_folder_that_can_not_be_made_is_a_sentence(capsys):
    assert main(["plan", *SMALL, "--out", f"{__file__}/plan"]) == 2
    assert "--out: cannot create" in capsys.readouterr().err
