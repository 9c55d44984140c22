"""Mistakes and faults: an error at once, on every rank, that names what is wrong and what to do; nothing half-changed.

Numbers as in ACCEPTANCE.md, part B. What needs real processes is in test_processes.py; B10 in test_init_context.py, B17 in
test_sharded_parameter.py, B19 in test_model_traits.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from zoo import Block, Stack, adamw, every_mode, normal_batches, run_threads, same, seeded, sgd, square

import zeroshard as zs
from zeroshard.config import PRESETS

X = torch.ones(2, 7)

# -- B13: options ------------------------------------------------------------------------------------------------

OPTIONS = {
    "stage text": ({"stage": "3"}, "stage: expected one of 0, 1, 2, 3, or 'auto' for zs.shard, got '3'. Pass the number"),
    "stage four": ({"stage": 4}, "stage: expected one of 0, 1, 2, 3, or 'auto' for zs.shard, got 4"),
    "stage float": ({"stage": 2.0}, "stage: expected one of"),
    "stage bool": ({"stage": True}, "stage: expected one of"),
    "precision": ({"precision": "bf61"}, "precision: expected one of 'fp32', 'bf16', 'fp16', got 'bf61'. Did you mean 'bf16'"),
    "precision object": ({"precision": torch.int8}, "precision: expected one of"),
    "unknown": ({"max_grad_nrom": 1.0}, "unknown option 'max_grad_nrom'. Did you mean 'max_grad_norm'"),
    "unknown group": ({"process_group": 7}, "unknown option 'process_group'. Did you mean comm?"),
    "unknown stage": ({"zero_stage": 3}, "unknown option 'zero_stage'. Did you mean 'stage'"),
    "norm text": ({"max_grad_norm": "1.0"}, "max_grad_norm: expected a number of at least 0, got '1.0'"),
    "norm negative": ({"max_grad_norm": -1.0}, "max_grad_norm: expected a number of at least 0"),
    "norm nan": ({"max_grad_norm": float("nan")}, "max_grad_norm: expected a number of at least 0"),
    "overlap": ({"overlap": "yes"}, "overlap: expected True or False, got 'yes'"),
    "dtype": ({"gradient_dtype": torch.int32}, "gradient_dtype: expected torch.float32"),
    "loss scale": ({"loss_scale": "dynamc"}, "loss_scale: expected 'dynamic' or a number"),
    "units": ({"units": ("Blokc",)}, "no module of class 'Blokc'. Did you mean 'Block'"),
    "units one": ({"units": "Blokc"}, "no module of class 'Blokc'. Did you mean 'Block'"),
    "comm": ({"comm": "shard"}, "comm: expected one of .* Did you mean 'shared'"),
    "norm list": ({"max_grad_norm": [1]}, r"max_grad_norm: expected a number of at least 0, got \[1\]"),
    "loss scale zero": ({"loss_scale": 0}, "loss_scale: expected 'dynamic' or a number above 0, got 0"),
    "first scale nan": ({"initial_loss_scale": float("nan")}, "initial_loss_scale: expected a number above 0, got nan"),
    "first scale negative": ({"initial_loss_scale": -1}, "initial_loss_scale: expected a number above 0, got -1"),
    "first scale text": ({"initial_loss_scale": "x"}, "initial_loss_scale: expected a number above 0, got 'x'"),
    "skipped text": ({"max_skipped_steps": "a"}, "max_skipped_steps: expected a whole number of at least 1, or inf, got 'a'"),
    "window zero": ({"loss_scale_window": 0}, "loss_scale_window: expected a whole number of at least 1, got 0"),
    "units number": ({"units": 5}, "units: expected 'auto', .* or a function .*, got 5"),
    "config mapping": ({"config": {"stage": 2}}, "config: expected a zs.Config, got dict"),
    "dtypes typo": ({"dtypes": {"LayerNorm": "fp23"}}, "dtypes: expected .* floating-point dtype}, got {'LayerNorm': 'fp23'}"),
    "dtypes class": ({"dtypes": {nn.LayerNorm: "fp32"}}, "dtypes: expected {class name or name pattern"),
    "preset": ({"preset": "zero3"}, "preset: expected one of ddp, .*, got 'zero3'. Did you mean 'zero-3'"),
    "offload ratio": ({"offload_optimizer": {"device": "cpu", "ratio": "0.5"}}, "ratio: expected a number from 0 to 1"),
    "offload count": ({"offload_optimizer": {"device": "cpu", "buffer_count": "8"}}, "count: expected a whole number, got '8'"),
    "offload path": ({"offload_optimizer": {"device": "nvme", "path": 5}}, "offload path: expected the path of a folder, got 5"),
    "offload device": ({"offload_optimizer": {"device": ["cpu"]}}, r"device: expected 'none', 'cpu' or 'nvme', got \['cpu'\]"),
    "offload pinned": ({"offload_optimizer": {"device": "cpu", "pin_memory": "no"}}, "pin_memory: expected True or False"),
    "offload nowhere": ({"offload_param": {"ratio": 0.5}}, "offload_param: {'ratio': 0.5} names no device.*add 'device'"),
    "offload half": ({"offload_param": zs.Offload("cpu", ratio=0.5)}, "offload_param: ratio applies to optimizer states only"),
    "offload fused": ({"offload_param": {"device": "cpu", "fused": True}}, "fused applies to optimizer states only"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_b13_options(name):
    options, message = OPTIONS[name]
    model = seeded(Stack)
    optimizer = adamw(model.parameters())
    before = [(id(p), type(p)) for p in model.parameters()]
    with pytest.raises(zs.ConfigError, match=message.replace("(", r"\(")) as caught:
        zs.shard(model, optimizer, **options)
    assert isinstance(caught.value, ValueError)
    assert before == [(id(p), type(p)) for p in model.parameters()] and type(optimizer) is torch.optim.AdamW
    assert "_zeroshard" not in model.__dict__
    zs.shard(model, optimizer)  # nothing stands in the way of the right call


def test_b13_the_natural_slips_of_a_call():
    model = seeded(Stack)
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got list"):
        zs.shard([model], None)
    with pytest.raises(TypeError, match="optimizer: expected a torch.optim.Optimizer or None, got int.*stage=3"):
        zs.shard(model, 3)
    with pytest.raises(zs.ConfigError, match="no parameters"):
        zs.shard(nn.ReLU())
    with pytest.raises(zs.ZeroshardError, match="not sharded: call zs.shard"):
        zs.report(model)
    for verb in (zs.close, zs.full_state_dict, zs.full_gradients):
        with pytest.raises(zs.ZeroshardError, match="not sharded: call zs.shard"):
            verb(model)


@every_mode
def test_a_part_of_a_sharded_model_or_what_holds_one(mode):
    """The error says which model to pass; torch's function, which it names, clips a part as one process does."""
    base, ((x,), (other,)) = seeded(Stack), normal_batches(1, 2, 2, 7)[0]
    plain = copy.deepcopy(base)
    ((square(plain, (x,)) + square(plain, (other,))) / 2).backward()
    wanted = nn.utils.clip_grad_norm_(plain.blocks.parameters(), 0.01)

    def run(rank):
        model = copy.deepcopy(base)
        model, _ = zs.shard(model, sgd(model.parameters()), **mode)
        square(model, ((x, other)[rank],)).backward()
        part = (
            r"this ModuleList is not sharded by itself: it is a part of a sharded Stack. Pass that model; .*clip_grad_norm_\(part"
        )
        for verb in (zs.full_state_dict, zs.close, lambda module: zs.clip_grad_norm_(module, 1.0)):
            with pytest.raises(zs.ZeroshardError, match=part):
                verb(model.blocks)
        with pytest.raises(zs.ZeroshardError, match="this Sequential is not sharded itself: pass its submodule 1.0, which is"):
            zs.report(nn.Sequential(nn.Linear(1, 1), nn.Sequential(model)))
        assert torch.allclose(nn.utils.clip_grad_norm_(model.blocks.parameters(), 0.01), wanted)
        return zs.full_gradients(model)

    for grads in run_threads(2, run):
        for name, param in plain.named_parameters():
            same(grads[name], param.grad, name, 1e-6)


@every_mode
def test_the_wrapper_of_torch_compile_stands_for_the_sharded_model_in_it(mode, tmp_path):
    def run(rank):
        model = seeded(Stack)
        model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)
        wrapper = torch.compile(model, backend="eager")
        average = zs.ema(wrapper)
        with zs.accumulate(wrapper), zs.join(wrapper):
            square(model, (X,)).backward()
        assert zs.clip_grad_norm_(wrapper, 1.0) > 1 == round(zs.clip_grad_norm_(model, 1.0).item(), 3)
        optimizer.step()
        with average.swapped(wrapper) as shown:
            assert shown is model
        state, told = zs.full_state_dict(wrapper), zs.full_state_dict(model)
        assert list(state) == list(told) and all(torch.equal(state[name], told[name]) for name in told)
        assert str(zs.report(wrapper)) == str(zs.report(model))
        zs.save(tmp_path, wrapper, optimizer, extra={"average": average})
        zs.load(tmp_path, wrapper, optimizer, extra={"average": average})
        assert zs.close(wrapper) is wrapper and "_zeroshard" not in model.__dict__

    run_threads(2, run)


def test_b13_precision_has_its_usual_spellings():
    for name in ("bf16", "bfloat16", torch.bfloat16):
        assert zs.Config(precision=name).compute_dtype is torch.bfloat16


def test_b13_dtypes_have_names():
    assert zs.Config(dtypes={"LayerNorm": "fp32"}).dtypes == {"LayerNorm": torch.float32}
    assert zs.Config(gradient_dtype="bfloat16", reduce_dtype="half").gradient_dtype is torch.bfloat16


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_rows_of_options(name, tmp_path):
    """By Config.preset, and beside the options of zs.shard, which count."""
    path = {"offload_path": str(tmp_path)} if name == "zero-infinity" else {}
    config = zs.Config.preset(name, **path)
    assert config == zs.Config(**PRESETS[name], **path) == zs.Config.build(None, preset=name, **path)
    assert zs.Config.build(zs.Config(max_grad_norm=1.0), preset=name, **path).max_grad_norm == 1.0
    assert zs.Config.preset("zero-offload", stage=3, offload_optimizer=None).offload_optimizer.device == "cpu"
    model, _ = zs.shard(seeded(Stack), None, preset="zero-2")
    assert zs.report(model).stage == 2


# -- B14: the process group ----------------------------------------------------------------------------------------


def test_b14_launched_without_a_process_group(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = seeded(Stack)
    with pytest.raises(zs.ConfigError, match="RANK=1 and WORLD_SIZE=2 are set.*init_process_group"):
        zs.shard(model, adamw(model.parameters()))
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(zs.ConfigError, match="init_process_group"):
        zs.shard(model, None)
    assert "_zeroshard" not in model.__dict__


def test_b14_a_single_process_says_so_once(capsys, monkeypatch):
    monkeypatch.setattr("zeroshard.comm.backend_select._solo_said", False)
    for _ in range(2):
        zs.shard(seeded(Stack), None)
    assert capsys.readouterr().err.count("single process (world size 1)") == 1


@every_mode
def test_a_lazy_module_is_named(mode):
    """Parameters, and buffers of one that has no parameters; after a forward it is served, also where it is born sharded."""

    def build():
        return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyBatchNorm1d(affine=False))

    def run(rank):
        message = r"weight of 0 \(LazyLinear\) has no shape before the first forward.*model\(batch\)"
        for optimizer in (None, sgd([nn.Parameter(torch.zeros(1))])):
            with pytest.raises(zs.ShardedAccessError, match=message):
                zs.shard(build(), optimizer, **mode)
        with pytest.raises(zs.ShardedAccessError, match=r"running_mean of 2 \(LazyBatchNorm1d\) has no shape"):
            zs.shard(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LazyBatchNorm1d(affine=False)), None, **mode)
        with zs.init(stage=3):
            model = build()
        with pytest.raises(zs.ShardedAccessError, match=message):
            zs.shard(model, None, **mode)
        with torch.no_grad():
            model(torch.ones(2, 3))
        model, optimizer = zs.shard(model, sgd(model.parameters()), **mode)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    run_threads(2, run)


# -- B15: different models -----------------------------------------------------------------------------------------


def freeze(model):
    model.blocks[0].up.weight.requires_grad_(False)


def tie(model):
    model.blocks[1].up.weight = model.blocks[0].up.weight


def rename(model):
    model.blocks[2].register_parameter("gain", nn.Parameter(torch.ones(1)))


def widen(model):
    model.last = nn.Linear(7, 5)


MISMATCHES = {
    freeze: ("rank 0: blocks.0.up.weight (14, 7) torch.float32;", "rank 1: blocks.0.up.weight (14, 7) torch.float32 frozen"),
    tie: ("rank 1: blocks.0.up.weight (14, 7) torch.float32, tied 2 times", "rank 0: blocks.0.up.weight"),
    rename: ("rank 1: blocks.2.gain (1,)", "rank 0: blocks.2.norm.weight"),
    widen: ("rank 0: last.weight (3, 7)", "rank 1: last.weight (5, 7)"),
}


@pytest.mark.parametrize("change", MISMATCHES, ids=lambda f: f.__name__)
def test_b15_different_models(change):
    def run(rank):
        model = seeded(Stack)
        if rank == 1:
            change(model)
        with pytest.raises(zs.ModelMismatch) as caught:
            zs.shard(model, adamw(model.parameters()), stage=3)
        assert "_zeroshard" not in model.__dict__ and all(type(p) is nn.Parameter for p in model.parameters())
        return str(caught.value)

    for message in run_threads(2, run):
        assert all(part in message for part in MISMATCHES[change]), message


def test_b15_different_values_are_taken_from_rank_0(capsys):
    models = [seeded(Stack, seed=seed) for seed in range(2)]
    states = run_threads(2, lambda rank: zs.full_state_dict(zs.shard(copy.deepcopy(models[rank]), None, stage=3)[0]))
    for state in states:
        for name, value in models[0].state_dict().items():
            same(state[name], value, name, 0.0)
    assert "ranks had different initial values" in capsys.readouterr().err


# -- calls at the wrong time ---------------------------------------------------------------------------------------


@every_mode
def test_shard_twice(mode):
    model = seeded(Stack)
    model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)
    with pytest.raises(zs.ZeroshardError, match="this optimizer is sharded already"):
        zs.shard(model, optimizer)
    with pytest.raises(zs.ZeroshardError, match="this model is sharded already"):
        zs.shard(model, None, **mode)
    with pytest.raises(zs.ZeroshardError, match="sharded already"):
        zs.shard(nn.Sequential(model, nn.Linear(3, 3)), None, **mode)
    with pytest.raises((zs.ZeroshardError, TypeError), match="sharded already"):
        zs.shard(model.blocks[0], None, **mode)
    square(model, (X,)).backward()  # none of which did harm
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_optimizer_holds_foreign_parameters(stage):
    model, other = seeded(Stack), nn.Linear(3, 2)
    for parameters in (other.parameters(), [*model.parameters(), other.bias]):
        with pytest.raises(zs.ConfigError, match=r"group 0 holds a parameter \(position \d+, shape \(.*not the model's"):
            zs.shard(model, adamw(parameters), stage=stage)
    assert "_zeroshard" not in model.__dict__


def test_a_group_added_to_the_optimizer_of_zs_shard():
    """Of parameters that it has not laid out as a group, and of ordinary ones."""
    model, other = seeded(Stack), nn.Parameter(torch.ones(2))
    model, optimizer = zs.shard(model, adamw(model.first.parameters()))
    before = model.last.weight.full_tensor() if hasattr(model.last.weight, "full_tensor") else model.last.weight.detach().clone()
    optimizer.add_param_group({"params": [*model.last.parameters(), other]})
    square(model, (X,)).backward()
    optimizer.step()
    after = model.last.weight.full_tensor() if hasattr(model.last.weight, "full_tensor") else model.last.weight
    assert not torch.equal(after, before) and torch.equal(other, torch.ones(2))


@every_mode
@pytest.mark.parametrize("change", ["replaced", "unfrozen", "resized"])
def test_b18_the_model_changed_after_sharding(mode, change):
    def run(rank):
        model = seeded(Stack)
        model.blocks[1].up.weight.requires_grad_(change != "unfrozen")
        model, optimizer = zs.shard(model, adamw(p for p in model.parameters() if p.requires_grad), **mode)
        square(model, (X,)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if change == "replaced":
            model.blocks[1].up.weight = nn.Parameter(torch.zeros(14, 7))
        elif change == "resized":
            model.last = nn.Linear(7, 5)
        else:
            model.blocks[1].up.weight.requires_grad_(True)
        name = "last.weight" if change == "resized" else "blocks.1.up.weight"
        what = "requires_grad of parameter" if change == "unfrozen" else "was replaced"
        with pytest.raises(zs.ModelChanged, match=rf"{name}.*zs.close\(model\)") as caught:
            square(model, (X,)).backward()
            optimizer.step()
        assert what in str(caught.value)

    run_threads(2, run)


@every_mode
def test_use_after_close(mode):
    def run(rank):
        model = seeded(Stack)
        model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)
        loss = square(model, (X,))
        zs.close(model)
        with pytest.raises(zs.ModelClosed, match="closed with zs.close"):
            loss.backward()
        with pytest.raises(zs.ModelClosed, match="after zs.close"):
            optimizer.step()
        with pytest.raises(zs.ZeroshardError, match="not sharded"):
            zs.close(model)
        square(model, (X,)).backward()
        again = torch.optim.AdamW(model.parameters())
        model, again = zs.shard(model, again, **mode)
        square(model, (X,)).backward()
        again.step()
        assert not again.last_step.skipped

    run_threads(2, run)


# -- B20, B21: numbers ---------------------------------------------------------------------------------------------


class Poisoned(Block):
    """Makes the gradient of one parameter infinite where the input asks for it."""

    def forward(self, x):
        return super().forward(x) + self.up.bias.sum() * (torch.inf if x.abs().max() > 99 else 1.0)


@every_mode
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_b20_a_nonfinite_gradient_on_one_rank_skips_everywhere(mode, precision):
    def run(rank):
        model = seeded(Stack, block=Poisoned)
        optimizer = sgd(model.parameters())
        model, optimizer = zs.shard(model, optimizer, precision=precision, max_skipped_steps=3, initial_loss_scale=256.0, **mode)

        def step(bad):
            x = X.clone()
            if bad and rank == 1:
                x[0, 0] = 1e4
            square(model, (x,)).backward()
            optimizer.step()
            optimizer.zero_grad()
            return optimizer.last_step

        assert not step(False).skipped
        before = zs.full_state_dict(model)
        record = step(True)
        assert record.skipped and "blocks.1.up.bias (rank 1)" in record.nonfinite
        assert all(name.endswith("(rank 1)") for name in record.nonfinite)
        after = zs.full_state_dict(model)
        for name in before:
            same(after[name], before[name], name, 0.0)
        assert not step(False).skipped  # the count begins anew
        step(True), step(True)
        with pytest.raises(zs.NonFiniteError, match="3 steps in a row had non-finite gradients.*last: .*rank 1"):
            step(True)

    run_threads(2, run)


def test_b20_the_scheduler_does_not_advance_on_a_skipped_step():
    """The record says so; and the loop that everyone writes can ask for it."""
    model = seeded(Stack, block=Poisoned)
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer = zs.shard(model, optimizer, stage=2)
    for bad in (False, True, False):
        x = X.clone()
        x[0, 0] = 1e4 if bad else 1.0
        square(model, (x,)).backward()
        optimizer.step()
        if not optimizer.last_step.skipped:
            scheduler.step()
        optimizer.zero_grad()
    assert scheduler.last_epoch == 2 and optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 3)


@pytest.mark.parametrize("stage", range(4))
def test_b21_a_bf16_model_has_fp32_states(stage):
    def run(rank, **options):
        model = seeded(Stack).bfloat16()
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage, **options)
        square(model, (X.bfloat16(),)).backward()
        optimizer.step()
        states = zs.full_optimizer_state(model)
        return {v.dtype for s in states.values() for k, v in s.items() if k != "step"}, zs.full_state_dict(model, masters=True)

    for dtypes, state in run_threads(2, run):
        assert dtypes == {torch.float32} and {v.dtype for v in state.values()} == {torch.float32}
    for dtypes, state in run_threads(2, lambda rank: run(rank, master_weights=False)):
        assert dtypes == {torch.bfloat16} and {v.dtype for v in state.values()} == {torch.bfloat16}


def test_b21_opting_out_of_masters_is_logged(capsys):
    zs.shard(seeded(Stack), None, precision="bf16", master_weights=False)
    assert "master" in capsys.readouterr().err


# -- exceptions ----------------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_b04_an_exception_on_one_rank(mode, where):
    """Raised where it happened; PeerFailed with its traceback elsewhere; and nobody waits long."""
    seen = {}

    def run(rank):
        model = seeded(Stack)
        model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)

        def fail(*args):
            raise KeyError("no such image")

        try:
            for step in range(4):
                if step == 2 and rank == 1:
                    if where == "forward":
                        model.blocks[1].register_forward_pre_hook(fail)
                    else:
                        model.blocks[1].up.weight.register_hook(fail)
                square(model, (X,)).backward()
                optimizer.step()
                optimizer.zero_grad()
        except Exception as error:
            seen[rank] = error
            raise

    with pytest.raises(KeyError, match="no such image"):
        run_threads(2, run)
    assert isinstance(seen[0], zs.PeerFailed) and seen[0].rank == 1 and "no such image" in str(seen[0])


@every_mode
@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_an_exception_on_all_ranks_can_be_survived(mode, where):
    """As an out-of-memory error that is caught: the next step starts clean."""
    base, batches = seeded(Stack), normal_batches(3, 2, 4, 7)

    def run(rank, fail):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)

        def raising(*args):
            raise MemoryError("too long a batch")

        for step, ranks in enumerate(batches):
            if fail and step == 1:
                block = model.blocks[1]
                handle = block.register_forward_hook(raising) if where == "forward" else block.up.weight.register_hook(raising)
                if where == "loss":
                    handle.remove()
                try:
                    loss = square(model, (ranks[rank][0] * 3,))
                    raising() if where == "loss" else loss.backward()
                except MemoryError:
                    optimizer.zero_grad()
                    loss = None
                handle.remove()
            square(model, ranks[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zs.full_state_dict(model)

    wanted = run_threads(2, run, False)[0]
    for state in run_threads(2, run, True):
        for name, value in wanted.items():
            same(state[name], value, name, 0.0)
