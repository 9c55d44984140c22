"""A plan's file: one JSON, and what each of its readers makes of it."""

import json
from functools import partial

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.cli.arguments import UsageError
from zeroshard.cli.options import parse_train
from zeroshard.config import Tier, read_layout
from zeroshard.errors import ConfigError
from zeroshard.integrations.deepspeed.ds_config import DeepSpeedConfig
from zeroshard.integrations.deepspeed.sections import DeepSpeedConfigError
from zeroshard.integrations.deepspeed.shard_options import shard_options
from zeroshard.planner.model_source import ModelSource
from zeroshard.planner.models.gpt import GPT, GPTConfig
from zeroshard.planner.request import Request
from zeroshard.planner.search.layout import Layout
from zeroshard.planner.search.layout_file import deepspeed_config, section, write_config
from zeroshard.planner.search.search import search
from zeroshard.planner.simulator.hardware import Hardware
from zeroshard.testing import imagined_mesh, run_threads

HOST, DISK = Tier.HOST, Tier.DISK
LAYOUTS = {
    "plain": Layout(dp=4, stage=1, micro_batch=2, micro_batches=3),
    "fp32": Layout(dp=4, stage=0, precision="fp32"),
    "offloaded": Layout(dp=4, stage=3, optimizer=DISK, gradient=DISK, parameter=HOST, checkpointing="host"),
    "nodes": Layout(dp=4, stage=3, node_size=2, hpz=2, hops="two", quantized_weights="int8", quantized_gradients="int4"),
    "units": Layout(dp=4, stage=3, max_unit_numel=1000, prefetch_nbytes=0, checkpointing="blocks"),
    "states": Layout(dp=4, stage=2, optimizer_states="int8", master_weights="split"),
    "no masters": Layout(dp=4, stage=1, optimizer_states="bf16", master_weights=False),
    "groups": Layout(dp=4, stage=3, node_size=2, shard_size=2),
    "mesh": Layout(dp=2, pp=2, tp=2, stage=1, micro_batches=4, checkpointing="partitioned"),
}


def written(layout, folder):
    """The path of a layout's file."""
    path = folder / "layout.json"
    path.write_text(json.dumps(deepspeed_config(layout, str(folder)) | {"zeroshard": section(layout, str(folder))}))
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_readers_come_to_the_same_options(name, tmp_path):
    layout = LAYOUTS[name]
    path, asked = written(layout, tmp_path), zs.Config(**layout.options(str(tmp_path)))
    assert zs.Config.build(path) == asked
    options = parse_train(["--config", str(path)])
    trained = options.sharding()
    for field in (
        "stage",
        "precision",
        "shard_size",
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_gradients",
        "offload_optimizer",
        "offload_gradient",
        "offload_param",
        "optimizer_states",
        "master_weights",
        "max_unit_numel",
        "prefetch_nbytes",
        "hierarchical",
    ):
        assert getattr(trained, field) == getattr(asked, field), field
    assert (options.global_batch, options.accumulate) == (layout.sequences, layout.micro_batches)
    assert options.checkpoints == (layout.checkpointing != "none") and options.partition_activations == (
        layout.checkpointing == "partitioned"
    )
    if name == "mesh":
        assert (options.axes.pp, options.axes.dp, options.axes.tp) == (2, 2, 2)
        with pytest.raises(DeepSpeedConfigError, match="data parallelism alone"):
            shard_options(DeepSpeedConfig(str(path), world_size=8))
        return
    assert options.ranks == layout.dp
    config = DeepSpeedConfig(str(path), world_size=layout.dp)
    assert config.notes == [] and config.train_batch_size == layout.sequences
    engine = zs.Config(**{key: value for key, value in shard_options(config).items() if key in asked.__dict__})
    for field in (
        "stage",
        "precision",
        "offload_optimizer",
        "offload_gradient",
        "offload_param",
        "zero_hpz_partition_size",
        "shard_size",
        "gradient_dtype",
        "optimizer_states",
        "master_weights",
        "max_unit_numel",
        "prefetch_nbytes",
        "hierarchical",
        "zero_quantized_gradients",
    ):
        assert getattr(engine, field) == getattr(asked, field), field


def test_options_given_beside_the_file_count(tmp_path):
    path = written(LAYOUTS["offloaded"], tmp_path)
    assert zs.Config.build(path, stage=3, offload_optimizer="cpu", offload_gradient="cpu").offload_optimizer.tier is HOST
    options = parse_train(
        ["--config", str(path), "--stage", "2", "--offload-param", "none", "--global-batch", "16", "--ranks", "2"]
    )
    assert (options.stage, options.global_batch, options.ranks, options.offload_optimizer) == (2, 16, 2, "nvme")


def shard_by_file(rank, path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), config=path)
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return zs.report(model).stage


def test_shard_takes_the_path_of_a_plan(tmp_path):
    assert run_threads(2, shard_by_file, str(written(LAYOUTS["plain"], tmp_path))) == [1, 1]


def test_a_search_is_written_with_its_prediction(tmp_path):
    shape = GPTConfig(vocab_size=1000, seq_len=128, dim=256, layers=4, heads=4)
    source = ModelSource("small", partial(GPT, shape), 128, 1000, config=shape)
    found = search(
        Request(source, Hardware.named("a100-80gb"), {"pp": 1, "dp": 4, "tp": 1}, 1, 128), 16, fixed={"tp": 1, "pp": 1}
    )
    write_config(found, tmp_path / "layout.json")
    plan = read_layout(tmp_path / "layout.json")
    assert (
        plan["seq"] == 128 and plan["prediction"]["step_s"] == found.best.step_s and plan["prediction"]["reason"] == found.reason
    )
    assert parse_train(["--config", str(tmp_path / "layout.json")]).seq == 128


def test_a_mesh_is_not_for_shard_alone(tmp_path):
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="pass it to zs.parallelize"):
        zs.shard(model, config=written(LAYOUTS["mesh"], tmp_path))


def test_bad_files_are_said(tmp_path):
    with pytest.raises(ConfigError, match="can not be read: No such file.*plan --auto"):
        zs.shard(nn.Linear(2, 2), config=tmp_path / "none.json")
    other = tmp_path / "ds.json"
    other.write_text('{"train_batch_size": 8}')
    with pytest.raises(ConfigError, match="has no 'zeroshard'.*zeroshard.deepspeed"):
        zs.Config.build(other)
    other.write_text("{")
    with pytest.raises(UsageError, match="--config: .* is not JSON"):
        parse_train(["--config", str(other)])
    with pytest.raises(ConfigError, match="offload_path: this layout keeps states on disk"):
        section(LAYOUTS["offloaded"])


@pytest.mark.parametrize(
    "edit", [{"shard": None}, {"mesh": 3}, {"mesh": {}}, {"mesh": {"pp": "1", "dp": 2}}, {"micro_batch": 0}, {"global_batch": -1},
             {"mesh": {"dp": 2, "xp": 2}}, {"checkpoint_activations": 3}, {"seq": "x"}, {"node_size": 0}],
)  # fmt: skip
def test_a_file_that_was_edited_into_nonsense_says_where(edit, tmp_path):
    plan = {"shard": {"stage": 2}, "mesh": {"dp": 2}, "micro_batch": 1, "micro_batches": 1, "global_batch": 2}
    (tmp_path / "layout.json").write_text(json.dumps({"zeroshard": plan | edit}))
    with pytest.raises(ConfigError, match=f"layout.json: {next(iter(edit))}.*: expected"):
        read_layout(tmp_path / "layout.json")


@pytest.mark.parametrize(
    ("shard", "named"),
    [({"stagee": 2}, "stage"), ({"stage": "2"}, "stage"), ({"optimizer_states": "int9"}, "did you mean 'int8'")],
)
def test_options_in_a_file_are_those_of_zs_shard(shard, named, tmp_path):
    plan = {"shard": shard, "mesh": {"dp": 2}, "micro_batch": 1, "micro_batches": 1, "global_batch": 2}
    (tmp_path / "layout.json").write_text(json.dumps({"zeroshard": plan}))
    with pytest.raises(ConfigError, match=f"(?i)layout.json: shard: .*{named}"):
        read_layout(tmp_path / "layout.json")


def said(capfd, read, *arguments):
    """What a reader writes on stderr about the plan."""
    read(*arguments)
    return [line for line in capfd.readouterr().err.splitlines() if "was planned for" in line]


def test_other_ranks_than_planned_are_said_once_with_the_remedy(tmp_path, capfd):
    path = written(LAYOUTS["plain"], tmp_path)
    assert said(capfd, run_threads, 4, shard_by_file, str(path)) == []
    (line,) = said(capfd, run_threads, 2, shard_by_file, str(path))
    assert f"config: {path} was planned for 4 ranks (dp=4), and this run has 2 ranks (dp=2)" in line
    assert f"zeroshard plan MODEL --ranks 2 --auto --global-batch 24 --write-config {path}" in line
    given = json.loads(path.read_text())
    given["zeroshard"]["node_size"] = 2
    path.write_text(json.dumps(given))
    (line,) = said(capfd, run_threads, 4, shard_by_file, str(path))
    assert "4 ranks (dp=4) in nodes of 2, and this run has 4 ranks (dp=4) in nodes of 4" in line and "--node-size 4" in line


def test_the_engine_refuses_a_plan_for_other_ranks(tmp_path):
    path = written(LAYOUTS["plain"], tmp_path)
    with pytest.raises(
        DeepSpeedConfigError,
        match=r"planned for 4 ranks \(dp=4\), and this run has 2 ranks.*Plan again.*or leave out train_batch_size",
    ):
        DeepSpeedConfig(str(path), world_size=2)
    given = json.loads(path.read_text())
    del given["train_batch_size"]
    config = DeepSpeedConfig(given, world_size=2)
    assert config.train_batch_size == 12 and "was planned for 4 ranks" in config.notes[0]


def test_a_plan_of_a_model_that_is_cut_otherwise_is_refused_on_every_rank(tmp_path):
    path = written(LAYOUTS["mesh"], tmp_path)
    with imagined_mesh({"pp": 1, "dp": 1, "tp": 2}, 1) as mesh:
        model = GPT(GPTConfig(vocab_size=64, seq_len=16, dim=16, layers=2, heads=2))
        for read in (zs.parallelize, lambda model, mesh, config: zs.shard(model, mesh=mesh, config=config)):
            with pytest.raises(
                ConfigError, match=r"planned for 8 ranks \(pp=2,dp=2,tp=2\), and this run has \d ranks \(dp=\d,tp=2\)"
            ):
                read(model, mesh, config=path)


def test_training_says_that_the_plan_is_for_others(tmp_path):
    path = written(LAYOUTS["plain"], tmp_path)
    assert parse_train(["--config", str(path)]).planned_otherwise(4) == ""
    assert "was planned for 4 ranks" in parse_train(["--config", str(path), "--ranks", "2"]).planned_otherwise(2)
    path = written(LAYOUTS["mesh"], tmp_path)
    with pytest.raises(
        UsageError, match="to the 4 ranks, got dp=2,pp=2,tp=2 = 8.*the mesh is that of --config .*plan MODEL --ranks 4"
    ):
        parse_train(["--config", str(path)]).check_batch(4)


def test_a_layout_over_sp_is_for_the_same_mesh(tmp_path, capfd):
    path = written(Layout(dp=1, sp=2, stage=2, precision="fp32"), tmp_path)
    assert parse_train(["--config", str(path)]).axes.planned == {"pp": 1, "dp": 1, "tp": 1, "sp": 2}
    with pytest.raises(DeepSpeedConfigError, match="data-parallel only"):
        DeepSpeedConfig(str(path), world_size=2)

    def sharded(rank, mesh):
        model = GPT(GPTConfig(vocab_size=64, seq_len=16, dim=16, layers=2, heads=2))
        zs.close(zs.shard(model, torch.optim.AdamW(model.parameters()), mesh=mesh, config=path)[0])

    run_threads(2, partial(sharded, mesh={"dp": 1, "sp": 2}))
    assert "planned for" not in capfd.readouterr().err
    run_threads(2, partial(sharded, mesh=None))
    assert "planned for 2 ranks (dp=1,sp=2), and this run has 2 ranks (dp=2)" in capfd.readouterr().err
