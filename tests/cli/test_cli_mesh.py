"""`zeroshard train` on a mesh and with the published architectures: what is parsed, refused, and asked of zs.parallelize."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model

import zeroshard as zs
from zeroshard.cli import main, train
from zeroshard.cli import trainer as trainer_module
from zeroshard.cli.arguments import UsageError
from zeroshard.cli.mesh_axes import MeshAxes
from zeroshard.cli.options import TrainOptions, parse_train
from zeroshard.cli.ranks import Ranks
from zeroshard.cli.trainer import Trainer
from zeroshard.comm.launch import run_processes
from zeroshard.data.text import read_corpus
from zeroshard.planner.models import CASE_STUDIES, GPT, GPTConfig


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"{i}: the cat sat on the mat, and the dog ate the hat. " * 20)
    return folder


def _train(text, out, *arguments: str) -> list[str]:
    short = ["--steps", "4", "--eval-every", "2", "--eval-bytes", "300", "--seq", "16", "--sample-bytes", "0", "--threads", "1"]
    return ["train", "--data", str(text), *short, "--out", str(out), *arguments]


# -- axes --------------------------------------------------------------------------------------------------------------


def test_axes_have_names_and_an_order_of_their_own():
    axes = MeshAxes.parse("tp=2, dp=3,pp=4")
    assert (axes.pp, axes.dp, axes.tp, axes.ranks, str(axes)) == (4, 3, 2, 24, "dp=3,pp=4,tp=2")
    assert MeshAxes.parse(str(axes)) == axes and axes.cuts_model and not MeshAxes.parse("dp=8").cuts_model
    mesh = torch.arange(24).view(4, 3, 2)  # as init_device_mesh numbers ranks
    assert all(axes.data_place(int(mesh[p, d, t])) == d for p in range(4) for d in range(3) for t in range(2))
    experts = MeshAxes.parse("ep=2,dp=3,tp=2")
    assert (experts.ranks, experts.readers, str(experts)) == (12, 6, "dp=3,pp=1,tp=2,ep=2") and experts.cuts_model
    assert [experts.data_place(rank) for rank in range(12)] == [place for place in range(6) for _ in range(2)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "dpp=2"], ["--mesh", "dp=2,pp=2,tp=2", "'dpp=2'", "did you mean"]),
        (["--mesh", "dp=2;pp=2"], ["positive integer for dp", "'2;pp=2'"]),
        (["--mesh", "dp"], ["positive integer for dp", "write dp=2"]),
        (["--mesh", "tp=0"], ["positive integer for tp", "'0'"]),
        (["--mesh", "dp=2,dp=4"], ["each axis once", "dp twice"]),
        (["--mesh", ""], ["expected axes", "''"]),
        (["--mesh", "dp=2,tp=2", "--ranks", "8"], ["the 8 ranks", "dp=2,pp=1,tp=2 = 4", "try --mesh dp=4,pp=1,tp=2"]),
        (["--mesh", "pp=2,tp=2", "--ranks", "6"], ["pp x tp = 4", "try 4 or 8 ranks"]),
        (["--mesh", "pp=2,tp=2", "--ranks", "3"], ["pp x tp = 4", "try 4 ranks"]),
        (["--mesh", "tp=3"], ["tp to divide the model's 4 heads", "got tp=3", "tp=2 or tp=4"]),
        (["--mesh", "ep=2"], ["ep to divide the model's 0 experts", "got ep=2", "try --experts 2"]),
        (["--mesh", "ep=4", "--experts", "6"], ["ep to divide the model's 6 experts", "try --experts 8"]),
        (["--experts", "-1"], ["--experts", "zero or a positive number", "-1"]),
        (["--experts", "1"], ["--experts", "at least experts_per_token=2", "got 1"]),
        (["--mesh", "ep=2,dp=2", "--experts", "4", "--global-batch", "6"], ["dp x ep x accumulate = 4 x 1 = 4", "--global-batch 8"]),
        (["--mesh", "tp=16"], ["4 heads", "the nearest: tp=4"]),
        (["--mesh", "pp=5", "--layers", "4"], ["at most as many stages", "4, got pp=5", "the nearest: pp=4"]),
        (["--mesh", "pp=2", "--accumulate", "3"], ["--global-batch", "dp x accumulate = 1 x 3 = 3", "try --global-batch 9"]),
        (["--mesh", "pp=2", "--sample-bytes", "20"], ["--sample-bytes", "expected 0 with --mesh dp=1,pp=2,tp=1", "got 20"]),
        (["--mesh", "tp=2", "--tile-max-bytes", "4096"], ["--tile-max-bytes", "cuts weights itself"]),
        (["--mesh", "sp=2", "--seq", "65"], ["sp to divide the 65 tokens of a sequence (--seq)", "got sp=2"]),
        (["--preset", "bloom", "--mesh", "sp=2"], ["no sp for a model with ALiBi"]),
        (["--mesh", "sp=2,tp=2", "--ranks", "6"], ["sp x tp = 4", "try 4 or 8 ranks"]),
        (["--mesh", "dp=2,sp=2", "--ranks", "8"], ["the 8 ranks", "dp=2,sp=2 = 4", "try --mesh dp=4,sp=2"]),
        (["--schedule", "1f1b"], ["--schedule", "only with stages (--mesh pp=2)"]),
        (["--mesh", "pp=2", "--schedule", "1f2b"], ["--schedule", "1f2b", "zbvzerobubble"]),
        (["--mesh", "pp=2", "--sequence-parallel"], ["--sequence-parallel", "only with --mesh tp=2"]),
        (["--scale", "tiny"], ["--scale", "only with --preset turing-nlg, bloom, mt-nlg"]),
        (["--preset", "zero-3", "--scale", "tiny"], ["--scale", "only with --preset"]),
        (["--preset", "bloom", "--size", "small"], ["--size", "not with --preset bloom; give --scale"]),
        (["--preset", "bloom", "--scale", "big"], ["--scale", "big", "full"]),
        (["--preset", "blom"], ["--preset", "blom", "bloom"]),
        (["--preset", "mt-nlg", "--mesh", "tp=3"], ["8 heads", "tp=2 or tp=4"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_option_and_nearest(arguments, words, capsys):
    assert main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("zeroshard: error: ") and captured.err.count("\n") == 1 and captured.out == ""
    for word in words:
        assert word in captured.err


# -- presets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASE_STUDIES)
def test_a_published_run_gives_shape_and_stage(name):
    study = CASE_STUDIES[name]
    options = parse_train(["--preset", name])
    assert (options.stage, options.model_config()) == (1, study.tiny)
    assert TrainOptions(**dataclasses.asdict(options)) == options
    given = parse_train(["--preset", name, "--stage", "3", "--layers", "2", "--seq", "32", "--offload-param", "cpu"])
    shape = given.model_config()
    assert (given.stage, shape.layers, shape.seq_len, shape.positions) == (3, 2, 32, study.tiny.positions)
    full = parse_train(["--preset", name, "--scale", "full"])
    layout = study.layout
    assert (full.model_config(), full.global_batch, full.precision) == (study.full, layout.global_batch, layout.precision)
    published = parse_train(["--preset", name, "--scale", "full", "--mesh", f"dp={layout.dp},pp={layout.pp},tp={layout.tp}"])
    assert published.axes.ranks == layout.ranks


def test_what_a_mesh_stands_for_can_be_given_otherwise():
    options = parse_train(["--preset", "bloom", "--scale", "tiny", "--mesh", "dp=2,pp=2,tp=2"])
    assert (options.accumulate, options.global_batch, options.sample_bytes) == (4, 8, 0)
    options.check_batch(8)
    options = parse_train(["--mesh", "dp=2,pp=2", "--accumulate", "2", "--global-batch", "12", "--schedule", "GPipe"])
    assert (options.accumulate, options.global_batch, options.schedule) == (2, 12, "gpipe")
    assert parse_train(["--mesh", "dp=3,pp=2"]).global_batch == 24
    plain = parse_train(["--mesh", "dp=2"])
    assert (plain.accumulate, plain.global_batch, plain.sample_bytes) == (1, 8, 300)
    with pytest.raises(UsageError, match="the 4 ranks, got dp=2,pp=1,tp=1 = 2; try --mesh dp=4"):
        plain.check_batch(4)


@pytest.mark.parametrize("name", ["bloom", "mt-nlg"])  # ALiBi and learned positions
def test_a_published_architecture_trains_in_small(name, text, tmp_path, capsys):
    assert main(_train(text, tmp_path, "--preset", name, "--mesh", "dp=1", "--steps", "12", "--lr", "0.01")) == 0
    printed = capsys.readouterr().out
    assert f"{name} of " in printed and "stage 1" in printed and "1 rank (dp=1,pp=1,tp=1)" in printed
    losses = [row["loss"] for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    model = GPT(GPTConfig(**json.loads((tmp_path / "config.json").read_text())["model"]))
    assert load_model(model, tmp_path / "model.safetensors") == (set(), [])


def test_the_ranks_are_those_of_the_mesh(monkeypatch):
    started = []
    monkeypatch.setattr(train, "spawn", lambda argv, world_size: started.append(world_size) or 0)
    for arguments in (["--mesh", "dp=2"], ["--mesh", "dp=4", "--ranks", "4"], ["--preset", "bloom", "--mesh", "dp=2,pp=2,tp=2"]):
        assert main(["train", *arguments]) == 0
    assert started == [2, 4, 8]


# -- parts of a model: what is asked of zs.parallelize -------------------------------------------------------------------


class OneRank:
    """A run of zs.parallelize whose rank has the whole model."""

    def __init__(self, model, mesh, *, optimizer, config, micro_batches, **options):
        self.asked = {"mesh": mesh, "micro_batches": micro_batches, **options}
        self.micro_batches = micro_batches
        self.model, self.optimizer = zs.shard(model, optimizer(model.parameters()), config=config)

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        total = 0.0
        with_targets = zip(inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True)
        for tokens, wanted in with_targets:
            loss = self.model(tokens, wanted) / self.micro_batches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        return total

    @torch.no_grad()
    def evaluate(self, inputs, targets):
        assert len(inputs) == self.rows and not self.model.training
        logits = self.model(inputs).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=trainer_module.IGNORED)


def test_parts_of_a_model_train_as_the_whole_does(text, tmp_path, monkeypatch):
    """With a stand-in for zs.parallelize whose one rank has all of it: text, learning rates and scores are the same."""
    made = []
    monkeypatch.setattr(zs, "parallelize", lambda *a, **k: made.append(OneRank(*a, **k)) or made[-1], raising=False)
    monkeypatch.setattr(trainer_module, "init_device_mesh", lambda _, shape, mesh_dim_names: (mesh_dim_names, shape))
    arguments = _train(text, tmp_path, "--global-batch", "6", "--accumulate", "3", "--eval-bytes", "500")[1:]
    corpus, alone = read_corpus(text, held_out_nbytes=500), Ranks(0, 1, torch.device("cpu"))
    plain = Trainer(parse_train([*arguments, "--preset", "bloom"]), alone, corpus)
    expected = [plain.held_out_loss(overlap=True), *(result.loss for result in plain.steps()), plain.held_out_loss()]
    plain.close()
    options = parse_train([*arguments, "--preset", "bloom", "--mesh", "pp=2,tp=2", "--schedule", "gpipe", "--sequence-parallel"])
    parts = Trainer(options, alone, corpus)
    (run,) = made
    assert run.asked == {
        "mesh": (("pp", "dp", "tp"), (2, 1, 2)), "micro_batches": 3, "schedule": "gpipe", "sequence_parallel": True, "loss_parallel": False,
        "experts": None,
    }  # fmt: skip
    run.rows = 6
    found = [parts.held_out_loss(overlap=True), *(result.loss for result in parts.steps()), parts.held_out_loss()]
    assert parts.forecast() is None and parts.sample("x") == ""
    parts.close()
    assert found == pytest.approx(expected, rel=1e-5) and math.isfinite(found[-1])


def test_ranks_of_one_place_read_the_same_and_count_once(text, monkeypatch):
    """Eight ranks of dp 2, pp 2, tp 2: two parts of each batch; of the scores, which four ranks each tell, one is taken."""
    options = parse_train(["--mesh", "dp=2,pp=2,tp=2", "--seq", "16", "--eval-bytes", "300", "--preset", "mt-nlg"])
    corpus = read_corpus(text, held_out_nbytes=300)
    part = SimpleNamespace(model=torch.nn.Identity(), optimizer=None)
    monkeypatch.setattr(trainer_module, "parallelize", lambda options, ranks: part)
    monkeypatch.setattr(Ranks, "gather", lambda self, nats: torch.full((8, 1), nats))
    read, scored = {}, {}
    for rank in range(8):
        trainer = Trainer(options, Ranks(rank, 8, torch.device("cpu")), corpus)
        scored[rank] = []
        trainer.run = SimpleNamespace(
            step=lambda x, y, rank=rank: read.update({rank: x.tolist()}) or 0.0,
            evaluate=lambda x, y, rank=rank: scored[rank].extend((y != trainer_module.IGNORED).sum(1).tolist()) or 1.0,
        )
        trainer._take_step(0)
        bits = trainer.held_out_loss()
        calls = len(scored[rank]) // 4  # rows of a step
        assert bits == pytest.approx((2 * calls / math.log(2) + 8) / 300)  # one nat a call, at two places
    assert read[0] == read[1] == read[4] == read[5] != read[2] == read[3] == read[6] == read[7]
    assert read[0] + read[2] == trainer.batches.rows(0, 0, 8)[0].tolist()
    assert sum(scored[0]) + sum(scored[2]) == 299 and scored[0] == scored[5] and scored[2] == scored[7]


def _command(rank: int, size: int, arguments: list[str]) -> int:
    """A rank of a command, as torchrun starts it: it joins the others, and starts none."""
    return main(arguments)


@pytest.mark.processes
def test_a_run_over_sp_has_the_losses_of_one_rank(text, tmp_path):
    """The rows of n-gram tables that a token reads depend on tokens of the rank before it."""
    losses = []
    for mesh, ranks in (("dp=1", 1), ("dp=1,sp=2", 2), ("pp=2,sp=2", 4)):
        options = ["--mesh", mesh, "--seq", "64", "--global-batch", "4", "--stage", "3", "--quiet"]
        options += ["--sample-bytes", "4"] if "pp" not in mesh else []
        assert run_processes(_command, ranks, _train(text, tmp_path / mesh, *options)) == [0] * ranks
        rows = [json.loads(line) for line in (tmp_path / mesh / "metrics.jsonl").read_text().splitlines()]
        losses.append([row.get("loss", row.get("held_out_bits_per_byte")) for row in rows])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)
