"""Lightning's Trainer and Fabric on zeroshard: the numbers of a plain loop, and resumed as if never interrupted."""

import os
import subprocess
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import zeroshard as zs
from zeroshard.api import whole_state
from zeroshard.checkpoint.inspect import inspect_checkpoint
from zeroshard.comm.launch import run_processes
from zeroshard.errors import CheckpointError, ConfigError

# ./test installs it (requirements/test.txt); absent where the suite runs in an environment of other tools, as on a GPU machine
pytest.importorskip("lightning", reason="needs lightning")
warnings.filterwarnings("ignore", module="lightning")
import lightning.pytorch as pl  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from zeroshard.integrations.lightning import STRATEGIES, FabricZeroshardStrategy, ZeroshardStrategy, _register  # noqa: E402

WORDS, DIM, BATCHES = 11, 8, 8
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False)


@pytest.fixture(autouse=True)
def alone():
    """Lightning starts a process group of one, and sets a launcher's variables."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def body() -> dict[str, nn.Module]:
    torch.manual_seed(7)
    return {
        "emb": nn.Embedding(WORDS, DIM),
        "blocks": nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3)),
        "head": nn.Linear(DIM, WORDS, bias=False),
    }


class Net(nn.Module):
    """A parameter of its own, blocks, and a way in that is not forward."""

    def __init__(self):
        super().__init__()
        for name, module in body().items():
            setattr(self, name, module)
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, words):
        hidden = self.emb(words) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        return self.head(hidden)

    def loss(self, words):
        return nn.functional.cross_entropy(self(words), (words + 1) % WORDS)


class Module(pl.LightningModule):
    """As users write them. late: made in configure_model. manual: its own backward and step."""

    def __init__(self, late=False, manual=False, optimizers=1):
        super().__init__()
        self.net, self.optimizers_wanted, self.automatic_optimization = None if late else Net(), optimizers, not manual
        self.losses, self.born = [], None

    def configure_model(self):
        if self.net is None:
            self.net = Net()
            self.born = hasattr(self.net.head.weight, "to_local")

    def training_step(self, words, _):
        loss = self.net.loss(words)
        self.losses.append(loss.item())
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, words, _):
        self.log("checked", self.net.loss(words), sync_dist=True)

    test_step = validation_step

    def predict_step(self, words, _):
        return self.net(words)

    def configure_optimizers(self):
        made = [torch.optim.AdamW(self.parameters(), lr=0.03) for _ in range(self.optimizers_wanted)]
        return made, [torch.optim.lr_scheduler.StepLR(made[0], 1, gamma=0.5)]


class Compiled(Module):
    """One that compiles its net itself, so that Lightning's files have torch's names of that, which its class loads."""

    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


def words(rank=0, world=1):
    """Of a rank: rows of the same global batches, whatever the number of ranks."""
    every = torch.randint(WORDS, (BATCHES, 4), generator=torch.Generator().manual_seed(3))
    return DataLoader([rows.chunk(world)[rank] for rows in every], batch_size=None)


def plain(epochs=1, accumulate=1, clip=None):
    """(losses, parameters, learning rate) of the loop that Lightning stands for, in one process."""
    net, losses = Net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(epochs):
        for number, batch in enumerate(words()):
            loss = net.loss(batch)
            losses.append(loss.item())
            (loss / accumulate).backward()
            if (number + 1) % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return losses, {f"net.{name}": value.detach() for name, value in net.named_parameters()}, optimizer.param_groups[0]["lr"]


def trainer(root, strategy="zeroshard", epochs=1, ranks=1, **options):
    quiet = QUIET | {"enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in options.get("callbacks", ()))}
    fixed = {"accelerator": "cpu", "devices": ranks, "default_root_dir": str(root), "num_sanity_val_steps": 0}
    return pl.Trainer(strategy=strategy, max_epochs=epochs, **(fixed | quiet | options))


def check(module, expected, tolerance=1e-6):
    whole = zs.full_state_dict(module)
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=tolerance, msg=name)


# -- the Trainer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "zeroshard"])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, 0.1), (2, None), (2, 0.1)])
def test_a_fit_has_the_numbers_of_a_plain_loop(strategy, accumulate, clip, tmp_path):
    losses, expected, lr = plain(accumulate=accumulate, clip=clip)
    module, fit = Module(), trainer(tmp_path, strategy, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    fit.fit(module, words())
    assert module.losses == pytest.approx(losses, abs=1e-6)
    check(module, expected)
    optimizer = module._zeroshard.optimizers.one
    coefficient = 1.0 if clip is None else pytest.approx(clip / optimizer.last_step.grad_norm)
    assert optimizer.param_groups[0]["lr"] == lr and optimizer.last_step.clip_coefficient == coefficient
    assert module._zeroshard.config.stage == STRATEGIES[strategy]["stage"]


def test_clipping_by_value_reaches_the_slices(tmp_path):
    module, net = Module(), Net()
    trainer(tmp_path, gradient_clip_val=0.01, gradient_clip_algorithm="value", limit_train_batches=1).fit(module, words())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.03)
    net.loss(next(iter(words()))).backward()
    nn.utils.clip_grad_value_(net.parameters(), 0.01)
    optimizer.step()
    check(module, {f"net.{name}": value.detach() for name, value in net.named_parameters()})


def test_a_model_of_configure_model_is_born_sharded(tmp_path):
    module = Module(late=True)
    trainer(tmp_path).fit(module, words())
    assert module.born
    check(module, plain()[1])


def test_micro_batches_that_do_not_step_send_nothing(tmp_path):
    counts = []
    for accumulate in (1, 4):
        module = Module()
        trainer(tmp_path, "zeroshard_stage_2", accumulate_grad_batches=accumulate).fit(module, words())
        counts.append(reductions(module))
        fabric, net, optimizer = fabric_setup(2)
        fabric_loop(fabric, net, optimizer, words(), accumulate)
        assert reductions(net.module) == counts[-1]
    assert counts[0] == 4 * counts[1] > 0


def reductions(model):
    return sum(traffic.count for kind, traffic in zs.report(model).communication.items() if kind.startswith("reduce"))


class Direct(Module):
    """Computes with a parameter of its own in its steps."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WORDS))

    def training_step(self, words, _):
        return nn.functional.cross_entropy(self.net(words) + self.shift, (words + 1) % WORDS)

    validation_step = training_step


def test_parameters_of_the_lightning_module_itself_are_there_in_its_steps(tmp_path):
    module, alone = Direct(), Direct()
    trainer(tmp_path).fit(module, words(), words())
    trainer(tmp_path, "auto").fit(alone, words())
    check(module, alone.state_dict())
    assert alone.shift.abs().max() > 0


def test_manual_optimization_is_the_users(tmp_path):
    module = Module(manual=True)
    trainer(tmp_path).fit(module, words())
    check(module, plain()[1])


def test_evaluation_before_and_after_a_fit_and_a_second_fit(tmp_path):
    module, run = Module(), trainer(tmp_path)
    (before,) = run.validate(module, words(), verbose=False)
    predicted = run.predict(module, words())
    assert before["checked"] == pytest.approx(sum(Net().loss(batch).item() for batch in words()) / BATCHES, abs=1e-6)
    torch.testing.assert_close(predicted[0], Net()(next(iter(words()))).detach())
    run.fit(module, words(), words())
    (tested,) = run.test(module, words(), verbose=False)
    (validated,) = run.validate(module, words(), verbose=False)
    assert tested["checked"] == pytest.approx(validated["checked"]) and tested["checked"] < before["checked"]
    check(module, plain()[1])
    trainer(tmp_path).fit(module, words())  # a new optimizer, at the values reached
    assert len(module.losses) == 2 * BATCHES
    zs.close(module)
    assert type(module.net.scale) is nn.Parameter


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_fit_is_one_that_was_never_interrupted(kind, stage, tmp_path):
    def strategy():
        return ZeroshardStrategy(stage=stage, state_dict_type=kind)

    losses, expected, lr = plain(epochs=3, accumulate=2)
    kept = ModelCheckpoint(tmp_path, save_last=True, save_top_k=1, monitor="checked", filename="{epoch}-{checked:.2f}")
    first, second = Module(), Module()
    trainer(tmp_path, strategy(), accumulate_grad_batches=2, callbacks=[kept]).fit(first, words(), words())
    again = trainer(tmp_path, strategy(), epochs=3, accumulate_grad_batches=2)
    again.fit(second, words(), ckpt_path=kept.last_model_path)
    assert first.losses + second.losses == pytest.approx(losses, abs=1e-6)
    assert second._zeroshard.optimizers.one.param_groups[0]["lr"] == pytest.approx(lr)
    check(second, expected)
    if kind == "sharded":
        (found,) = inspect_checkpoint(kept.best_model_path)
        assert found.step == BATCHES // 2 and "lightning" in found.extras
    else:  # a file as one process writes it
        loaded = Module.load_from_checkpoint(kept.best_model_path)
        torch.testing.assert_close(loaded.net.scale.detach(), plain(accumulate=2)[1]["net.scale"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [Module, Compiled])
def test_a_checkpoint_of_one_process_is_resumed_sharded_and_the_reverse(kind, tmp_path):
    losses, expected, _ = plain(epochs=2)
    one, two, three = kind(), kind(), kind()
    run = trainer(tmp_path, "auto")
    run.fit(one, words())
    run.save_checkpoint(tmp_path / "one.ckpt")
    run = trainer(tmp_path, ZeroshardStrategy(state_dict_type="full"), epochs=2)
    run.fit(two, words(), ckpt_path=tmp_path / "one.ckpt")
    check(two, expected)
    run.save_checkpoint(tmp_path / "two.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "two.ckpt").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in whole_state(two).items())
    trainer(tmp_path, "auto", epochs=3).fit(three, words(), ckpt_path=tmp_path / "two.ckpt")
    assert one.losses + two.losses + three.losses == pytest.approx(plain(epochs=3)[0], abs=1e-6)


def test_hyperparameters_of_any_class_are_read_by_ones_word(tmp_path):
    module, run = Module(), trainer(tmp_path)
    module.save_hyperparameters({"options": Namespace(depth=3)})
    run.fit(module, words())
    run.save_checkpoint(tmp_path / "kept.ckpt")
    with pytest.raises(CheckpointError, match="trusted=True"):
        trainer(tmp_path).test(Module(), words(), ckpt_path=tmp_path / "kept.ckpt", verbose=False)
    trainer(tmp_path, ZeroshardStrategy(trusted=True)).test(Module(), words(), ckpt_path=tmp_path / "kept.ckpt", verbose=False)


def test_only_the_best_checkpoint_stays_and_a_module_without_optimizer_runs(tmp_path):
    kept, module = ModelCheckpoint(tmp_path / "best", monitor="checked", save_top_k=1), Module()
    run = trainer(tmp_path, epochs=3, callbacks=[kept])
    run.fit(module, words(), words())
    assert os.listdir(tmp_path / "best") == [os.path.basename(kept.best_model_path)]
    assert run.test(module, words(), ckpt_path="best", verbose=False)[0]["checked"] == pytest.approx(kept.best_model_score.item())
    idle = Module()
    idle.configure_optimizers, idle.training_step = lambda: None, lambda batch, batch_idx: None
    trainer(tmp_path).fit(idle, words())
    check(idle, {f"net.{name}": value.detach() for name, value in Net().named_parameters()}, tolerance=0)


def test_weights_alone_are_saved_tested_and_exported(tmp_path):
    run, module = trainer(tmp_path), Module()
    run.fit(module, words())
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    fresh = Module(late=True)
    (found,) = trainer(tmp_path).test(fresh, words(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    check(fresh, plain()[1])
    assert found["checked"] < 2
    exported = zs.export(tmp_path / "weights.ckpt", tmp_path / "model", format="torch")
    check(module, torch.load(exported.path), tolerance=0)


@pytest.mark.parametrize(
    ("given", "precision", "masters"),
    [("32-true", "fp32", True), ("bf16-mixed", "bf16", True), ("bf16-true", "bf16", False), ("16-true", "fp16", True)],
)
def test_precision_is_what_lightning_calls_it(given, precision, masters, tmp_path):
    module, seen = Module(), []
    module.net.blocks[0].register_forward_hook(lambda block, args, output: seen.append(output.dtype))
    trainer(tmp_path, precision=given, epochs=3).fit(module, words())
    config = module._zeroshard.config
    assert (config.precision, config.master_weights) == (precision, masters)
    assert set(seen) == {config.compute_dtype} and sum(module.losses[-8:]) < 0.8 * sum(module.losses[:8])


def test_half_mixed_has_masters_and_our_loss_scale():
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=object())
    strategy = ZeroshardStrategy(parallel_devices=[torch.device("cpu")], precision_plugin=plugin)
    assert strategy.shard_options() == {"config": None, "precision": "fp16", "stage": 3}
    with strategy.precision_plugin.forward_context():
        assert torch.get_autocast_dtype("cpu") == torch.float16 and torch.is_autocast_enabled("cpu")


REFUSED = {
    "64-true": (lambda root: trainer(root, precision="64-true"), "64-true"),
    "an option": (lambda root: ZeroshardStrategy(stagee=1), "Did you mean 'stage'"),
    "their options as one": (lambda root: ZeroshardStrategy(kwargs=1), "unknown option 'kwargs'"),
    "a stage": (lambda root: ZeroshardStrategy(stage=4), "stage"),
    "precision as an option": (lambda root: ZeroshardStrategy(precision="bf16"), "Trainer"),
    "a state dict": (lambda root: ZeroshardStrategy(state_dict_type="whole"), "whole"),
    "a plugin that would not be asked": (
        lambda root: trainer(root, plugins=[pl.plugins.io.AsyncCheckpointIO()]),
        "AsyncCheckpointIO",
    ),
    "two optimizers": (lambda root: trainer(root).fit(Module(optimizers=2, manual=True), words()), "one optimizer, got 2"),
    "a filter": (lambda root: FabricZeroshardStrategy().save_checkpoint("x", {}, filter={"x": 1}), "filter"),
    "an optimizer alone": (lambda root: FabricZeroshardStrategy().setup_optimizer(None), "together"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name, tmp_path):
    call, words_of_it = REFUSED[name]
    with pytest.raises(ConfigError, match=words_of_it):
        call(tmp_path)


def test_a_module_has_its_own_forward_again_also_after_a_refusal(tmp_path):
    module, run = Module(), trainer(tmp_path)
    run.fit(module, words())
    assert "forward" not in module.__dict__

    def refuse(module, args):
        raise ValueError("no")

    module.register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        run.validate(module, words(), verbose=False)
    assert "forward" not in module.__dict__


def test_all_names_are_registered_for_both():
    for name, options in STRATEGIES.items():
        for registry in (StrategyRegistry, STRATEGY_REGISTRY):
            assert registry.get(name).shard_options()["stage"] == options["stage"]


def test_the_other_package_is_served_too(tmp_path):
    other = pytest.importorskip("pytorch_lightning")  # comes with lightning; not with all of its releases
    strategy, _ = _register("pytorch_lightning", "lightning_fabric")
    fields = {name: value for name, value in vars(Module).items() if name not in ("__dict__", "__weakref__", "__init__")}
    module = type("Other", (other.LightningModule,), fields)()
    module.net, module.losses, module.optimizers_wanted, module.born = Net(), [], 1, None
    fixed = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_checkpointing": False}
    other.Trainer(strategy=strategy(stage=2), **fixed, **QUIET).fit(module, words())
    check(module, plain()[1])


# -- Fabric ------------------------------------------------------------------------------------------------------------


def fabric_loop(fabric, net, optimizer, batches, accumulate=1, clip=None):
    for number, batch in enumerate(batches):
        stepping = (number + 1) % accumulate == 0
        with fabric.no_backward_sync(net, enabled=not stepping):
            fabric.backward(net.loss(batch) / accumulate)
        if stepping:
            if clip:
                fabric.clip_gradients(net, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()


def fabric_setup(stage=3, precision="32-true", **options):
    strategy = FabricZeroshardStrategy(stage=stage, **options)
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision, strategy=strategy)
    fabric.launch()
    with fabric.init_module():
        net = Net()
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.03))
    net.mark_forward_method("loss")
    return fabric, net, optimizer


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.1), (2, None)])
def test_fabric_has_the_numbers_of_a_plain_loop(stage, accumulate, clip):
    fabric, net, optimizer = fabric_setup(stage)
    fabric_loop(fabric, net, optimizer, words(), accumulate, clip)
    check(net.module, {name.removeprefix("net."): value for name, value in plain(accumulate=accumulate, clip=clip)[1].items()})


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_fabric_goes_on_from_what_it_saved(kind, tmp_path):
    batches = list(words())
    fabric, net, optimizer = fabric_setup(state_dict_type=kind)
    fabric_loop(fabric, net, optimizer, batches[:4])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fabric.save(tmp_path / "saved", {"model": net, "optimizer": optimizer, "scheduler": scheduler, "seen": 4})
    fabric, net, optimizer = fabric_setup(state_dict_type=kind)
    state = {"model": net, "optimizer": optimizer, "seen": 0}
    rest = fabric.load(tmp_path / "saved", state)
    assert state["seen"] == 4 and list(rest) == ["scheduler"]
    fabric_loop(fabric, net, optimizer, batches[4:])
    check(net.module, {name.removeprefix("net."): value for name, value in plain()[1].items()})
    if kind == "sharded":
        with pytest.raises(KeyError, match="epoch"):
            fabric.load(tmp_path / "saved", {"model": net, "epoch": 0})


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16), ("16-true", torch.float16)]
)
def test_fabric_trains_in_the_precision_asked_for(precision, dtype):
    fabric, net, optimizer = fabric_setup(precision=precision)
    before = sum(net.loss(batch).item() for batch in words())
    for _ in range(3):
        fabric_loop(fabric, net, optimizer, words(), clip=1.0)
    assert next(net.module.parameters()).dtype is dtype
    assert sum(net.loss(batch).item() for batch in words()) < 0.8 * before


def test_fabric_evaluates_a_module_alone(tmp_path):
    fabric, net, optimizer = fabric_setup()
    fabric_loop(fabric, net, optimizer, words())
    fabric.save(tmp_path / "saved", {"model": net})
    expected = zs.full_state_dict(net.module)
    alone = fabric.setup_module(Net())
    assert fabric.load(tmp_path / "saved", {"model": alone}) == {}
    check(alone.module, expected, tolerance=0)
    with torch.no_grad():
        torch.testing.assert_close(alone(next(iter(words()))), net(next(iter(words()))))


def test_fabric_refuses_to_clip_what_is_not_a_number():
    fabric, net, optimizer = fabric_setup()
    fabric.backward(net.loss(next(iter(words()))) * float("inf"))
    with pytest.raises(RuntimeError, match="can not be clipped"):
        fabric.clip_gradients(net, optimizer, max_norm=1.0)
    with pytest.raises(ConfigError, match="norm_type"):
        fabric.clip_gradients(net, optimizer, max_norm=1.0, norm_type=1.0)


# -- real processes ------------------------------------------------------------------------------------------------------


def _two_ranks(rank, world, root):
    kept = ModelCheckpoint(root, save_last=True)
    module = Module(late=True)
    run = trainer(root, ranks=2, accumulate_grad_batches=2, gradient_clip_val=0.1, callbacks=[kept], num_sanity_val_steps=1)
    run.fit(module, words(rank, world), words(rank, world))
    checked = run.callback_metrics["checked"].item()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="zeroshard_stage_2")
    fabric.launch()
    net = Net()
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.03))
    net.mark_forward_method("loss")
    fabric_loop(fabric, net, optimizer, words(rank, world), 2, 0.1)
    return zs.full_state_dict(module), zs.full_state_dict(net.module), checked


@pytest.mark.slow  # 15 s; processes with the strategy: test_programs.py
@pytest.mark.processes
def test_two_processes_train_as_one_and_one_goes_on_from_their_checkpoint(tmp_path):
    _, expected, _ = plain(accumulate=2, clip=0.1)
    for fitted, looped, checked in run_processes(_two_ranks, 2, str(tmp_path)):
        for name, value in expected.items():
            torch.testing.assert_close(fitted[name], value, rtol=0, atol=1e-6)
            torch.testing.assert_close(looped[name.removeprefix("net.")], value, rtol=0, atol=1e-6)
        assert 0 < checked < 3
    module = Module()
    run = trainer(tmp_path, epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1)
    run.fit(module, words(), ckpt_path=str(tmp_path / "last.ckpt"))
    check(module, plain(epochs=2, accumulate=2, clip=0.1)[1])


@pytest.mark.slow  # 30 s; processes with the strategy: test_programs.py
@pytest.mark.processes
def test_the_example_starts_its_ranks_by_itself(tmp_path):
    example = Path(__file__).parents[2] / "examples/lightning_strategy.py"
    command = [sys.executable, str(example), "2", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "steps of 2 ranks" in done.stdout
    (found,) = inspect_checkpoint(tmp_path / "last.ckpt")
    assert found.facts["world_size"] == 2 and found.checksums == "hold"
