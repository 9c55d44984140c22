"""Optimizers of bitsandbytes and torchao, given to zs.shard: stand-ins with their modules, names and attributes."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads

ADAM = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
LION = {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}


class Blockwise(torch.optim.Optimizer):
    """What the classes of both libraries have in common here: their own steps are never to be taken."""

    def step(self, closure=None):
        raise AssertionError("stepped by the other library")


class OfBitsandbytes(Blockwise):
    def __init__(self, params, bits=8, max_unorm=0.0, **options):
        super().__init__(params, options | {"alpha": 0.0})
        self.own = {"optim_bits": bits, "min_8bit_size": 100, "max_unorm": max_unorm, "skip_zeros": False}
        self.mng = SimpleNamespace(index2config={}, pid2config={}, module_weight_config_triple=[])

    def get_config(self, gindex, pindex, group):
        of_group = {name: value for name, value in group.items() if name in ("lr", "betas", "eps", "weight_decay")}
        return of_group | self.own | self.mng.index2config.get((gindex, pindex), {})


class OfTorchao(Blockwise):
    def __init__(self, params, block_size=256, bf16_stochastic_round=False, **options):
        super().__init__(params, options | {"lr": torch.tensor(options["lr"]), "amsgrad": False})
        self.block_size, self.bf16_stochastic_round = block_size, bf16_stochastic_round


def made(path, params, **options):
    module, _, name = path.rpartition(".")
    base = OfBitsandbytes if module.startswith("bits") else OfTorchao
    return type(name, (base,), {"__module__": module})(params, **options)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 33))


def trained(model, optimizer, scheduler):
    for step in range(3):
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return zs.full_state_dict(model), zs.full_optimizer_state(model)


INT8 = zs.StateFormat("int8", min_numel=100)
TAKEN = [
    ("bitsandbytes.optim.adamw.AdamW8bit", ADAM, torch.optim.AdamW, INT8),
    ("bitsandbytes.optim.adamw.PagedAdamW8bit", ADAM, torch.optim.AdamW, INT8),
    ("bitsandbytes.optim.adamw.PagedAdamW", ADAM | {"bits": 32}, torch.optim.AdamW, None),
    ("bitsandbytes.optim.adam.Adam8bit", ADAM, torch.optim.AdamW, INT8),
    ("bitsandbytes.optim.lion.Lion8bit", LION, zs.Lion, INT8),
    ("torchao.optim.adam.AdamW8bit", ADAM, torch.optim.AdamW, zs.StateFormat("int8")),
    ("torchao.optim.adam.Adam4bit", ADAM | {"block_size": 128}, torch.optim.Adam, zs.StateFormat("int4", block=128)),
    ("torchao.prototype.low_bit_optim.adam.AdamWFp8", ADAM, torch.optim.AdamW, zs.StateFormat("fp8")),
    ("torchao.optim.adam._AdamW", ADAM | {"block_size": float("inf")}, torch.optim.AdamW, None),
]


@pytest.mark.parametrize(("path", "options", "cls", "form"), TAKEN, ids=[row[0] for row in TAKEN])
def test_the_object_steps_as_torchs_class_with_states_of_its_width(path, options, cls, form, capfd):
    whole = net()

    def run(rank, theirs):
        model = copy.deepcopy(whole)
        if theirs:
            optimizer = made(path, model.parameters(), **options)
        else:
            own = {key: value for key, value in options.items() if key not in ("bits", "block_size")}
            own["lr"] = torch.tensor(own["lr"]) if path.startswith("torchao") else own["lr"]
            optimizer = cls(model.parameters(), **own)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        sharded = zs.shard(model, optimizer, stage=3, optimizer_states=None if theirs else form)
        assert sharded[1] is optimizer and isinstance(optimizer, cls) and type(optimizer).__name__ == cls.__name__
        assert runtime_of(model).config.optimizer_states == form
        return trained(model, optimizer, scheduler)

    expected = run_threads(2, run, False)
    assert "is stepped as" not in capfd.readouterr().err
    torch.testing.assert_close(run_threads(2, run, True), expected, rtol=0, atol=0)
    told = capfd.readouterr().err  # other threads of this process, such as those that an earlier test left, may print lines, too
    instead = f"{'zs' if cls is zs.Lion else 'torch.optim'}.{cls.__name__}"
    sentence = f"zeroshard: optimizer: {path.rpartition('.')[2]} of {path.partition('.')[0]} is stepped as {instead}"
    assert told.count(sentence) == told.count("is stepped as") == 1
    assert told.count("with optimizer_states=") == told.count(f"{sentence} with optimizer_states=zs.{form}") == (form is not None)


@pytest.mark.parametrize("path", ["bitsandbytes.optim.adamw.AdamW8bit", "torchao.optim.adam._AdamW"])
def test_made_after_zs_shard(path, capfd):
    """Its states need the option, with which parameters are laid out for them; without it an error says so."""
    whole, form = net(), INT8 if path.startswith("bits") else None

    def run(rank, late):
        model = copy.deepcopy(whole)
        optimizer = None if late else made(path, model.parameters(), **ADAM)
        if late and form is not None:
            zs.shard(model, stage=3)
            refused = made(path, model.parameters(), **ADAM)
            with pytest.raises(
                zs.ConfigError, match=r"this AdamW8bit keeps states encoded.*or give zs.shard\(model\) the optimizer_states"
            ):
                refused.step()
            assert type(refused).__bases__[1].__module__ == "bitsandbytes.optim.adamw" and "alpha" in refused.param_groups[0]
            zs.close(model)
        zs.shard(model, optimizer, stage=3, optimizer_states=form)
        optimizer = optimizer or made(path, model.parameters(), **ADAM)
        return trained(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))

    expected = run_threads(2, run, False)
    capfd.readouterr()
    torch.testing.assert_close(run_threads(2, run, True), expected, rtol=0, atol=0)
    assert "is stepped as torch.optim.AdamW" in capfd.readouterr().err


def test_a_given_format_and_parameters_that_are_exempt_are_kept():
    model = net()
    optimizer = made("bitsandbytes.optim.adamw.AdamW", model.parameters(), **ADAM)
    zs.shard(model, optimizer, optimizer_states="fp8")
    assert runtime_of(model).config.optimizer_states == zs.StateFormat("fp8")
    model = net()
    optimizer = made("bitsandbytes.optim.adamw.AdamW", model.parameters(), **ADAM)
    optimizer.mng.module_weight_config_triple.append((model[2], "weight", {"optim_bits": 32}))  # as Transformers does
    zs.shard(model, optimizer)
    assert runtime_of(model).config.optimizer_states == zs.StateFormat("int8", min_numel=100, exempt=("2.weight",))


def override(optimizer, **given):
    optimizer.mng.index2config[0, 1] = given or {"lr": 0.1}


def step_before(optimizer):
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"state1": torch.zeros(3)}


@pytest.mark.parametrize(
    ("path", "options", "before", "words"),
    [
        (
            "bitsandbytes.optim.sgd.SGD8bit",
            {"lr": 0.1},
            None,
            r"SGD8bit of bitsandbytes would step.*Write torch.optim.SGD\(.*optimizer_states='int8'",
        ),
        (
            "bitsandbytes.optim.lamb.LAMB8bit",
            ADAM,
            None,
            r"LAMB8bit of bitsandbytes would step.*Write torch.optim.AdamW\(\.\.\.\)",
        ),
        ("bitsandbytes.optim.adamw.AdamW8bit", ADAM, step_before, "has states already.*before the first step"),
        ("bitsandbytes.optim.adamw.AdamW8bit", ADAM, override, "overrides {'lr': 0.1} for 0.bias.*group of its own"),
        (  # as it is now, which a scheduler does not change
            "bitsandbytes.optim.adamw.AdamW8bit",
            ADAM,
            functools.partial(override, lr=ADAM["lr"]),
            "overrides {'lr': 0.01} for 0.bias.*group of its own",
        ),
        (
            "bitsandbytes.optim.adamw.AdamW",
            ADAM | {"bits": 32},
            functools.partial(override, optim_bits=8),
            "overrides {'optim_bits': 8} for 0.bias",
        ),
        (
            "bitsandbytes.optim.adamw.AdamW8bit",
            ADAM,
            functools.partial(override, block_wise=False),
            "overrides {'block_wise': False} for 0.bias",
        ),
        (
            "bitsandbytes.optim.adam.Adam",
            ADAM | {"max_unorm": 1.0},
            None,
            "max_unorm=1.0 .*no counterpart in torch.optim.AdamW: leave",
        ),
        ("torchao.optim.adam.AdamW4bit", ADAM | {"bf16_stochastic_round": True}, None, "bf16_stochastic_round=True .*'int4'"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_the_line_to_write(path, options, before, words):
    model = net()
    optimizer = made(path, model.parameters(), **options)
    cls, keys = type(optimizer), list(optimizer.param_groups[0])
    if before is not None:
        before(optimizer)
    with pytest.raises(zs.ConfigError, match=words):
        zs.shard(model, optimizer, stage=2)
    assert type(optimizer) is cls and list(optimizer.param_groups[0]) == keys and "_zeroshard" not in model.__dict__
    zs.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), optimizer_states="int8")  # the remedy


def test_an_optimizer_of_torchao_that_holds_another_is_to_wrap_what_zs_shard_returns():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = made("torchao.prototype.parq.optim.quantopt.QuantOptimizer", model.parameters(), **ADAM)
    optimizer.base_optimizer = inner
    with pytest.raises(zs.ConfigError, match="QuantOptimizer.base_optimizer holds another.*Give the inner optimizer"):
        zs.shard(model, optimizer)


def test_a_derived_class_is_refused_and_a_failing_shard_undoes_the_change():
    model = net()
    optimizer = made("bitsandbytes.optim.adamw.AdamW8bit", model.parameters(), **ADAM)
    derived = type("Mine", (type(optimizer),), {"__module__": "mine"})(model.parameters(), **ADAM)
    with pytest.raises(zs.ConfigError, match=r"Mine of bitsandbytes would step.*torch.optim.AdamW"):
        zs.shard(model, derived)
    cls, keys, defaults = type(optimizer), list(optimizer.param_groups[0]), optimizer.defaults
    with pytest.raises(zs.ConfigError, match="not the model's"):
        zs.shard(nn.Linear(2, 2), optimizer)
    assert type(optimizer) is cls and list(optimizer.param_groups[0]) == keys and optimizer.defaults is defaults
