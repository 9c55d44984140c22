"""zs.shard(optimizer_states=...), master_weights="split": states in 16, 8 and 4 bits, masters in the parameter and 16 bits more.

Compared with plain torch on one process, bit for bit, where each state is rounded after each step as it would be at rest.
"""

import copy
import json
import math
import zlib

import pytest
import torch
import torch.nn.functional as F
from helpers import differences, state_differences
from offloading import offload
from optimizers import backward
from torch import nn

import zeroshard as zs
from zeroshard.engine.masters import Masters
from zeroshard.engine.runtime import runtime_of
from zeroshard.formats.state_codecs import FloatCodec, coded_column
from zeroshard.testing import run_threads
from zeroshard.tiers import slab_step
from zeroshard.tiers.slab_step import hashed_uniform
from zeroshard.tiers.stretch import SplitStretch

FORMATS = ("bf16", "fp8", "int8", "int4")
FUSED = "AdamW, fused"
FORM = zs.StateFormat("int8", block=64, min_numel=100)
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "Adam-amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5, centered=True),
    "Lion": lambda params: zs.Lion(params, lr=1e-3),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-3),
}


class Net(nn.Module):
    """An embedding, a norm and matrices whose sizes are no multiples of a block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 13)
        self.layers = nn.ModuleList([nn.Linear(13, 31), nn.LayerNorm(31), nn.Linear(31, 29, bias=False), nn.Linear(29, 3)])

    def forward(self, tokens, targets):
        x = self.embed(tokens).mean(1)
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(x, targets.to(x.dtype))


torch.manual_seed(0)
MODEL = Net()
BATCHES = [[(torch.randint(17, (3, 4)), torch.randn(3, 3)) for _ in range(4)] for _ in range(4)]
CODED = {"layers.0.weight", "layers.2.weight"}


def rounded(name, state, value, form, step=None):
    """A state after it has rested. step: of stochastic rounding."""
    column = coded_column(state, form)
    flat = F.pad(value.reshape(-1), (0, -value.numel() % column.elements))
    if column.noisy is not None:
        key = zlib.crc32(f"{step} {state} {name}".encode())
        coded = column.noisy(flat, hashed_uniform(key, 0, flat.numel(), flat.device))
    else:
        coded = column.encode(flat)
    return column.decode(coded.to(column.dtype)).float()[: value.numel()].view(value.shape)


def plain_run(optimizer, steps, world, form):
    model = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for number in range(steps):
        backward(model, BATCHES[number][:world])
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            for state, value in optimizer.state[param].items():
                if name in CODED and torch.is_tensor(value) and value.shape == param.shape:
                    optimizer.state[param][state] = rounded(name, state, value, form, number)
    return model.state_dict(), {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}


def sharded(optimizer, stage, device, folder, **options):
    model = copy.deepcopy(MODEL)
    if device != "none":
        options["offload_optimizer"] = offload(
            device, str(folder), buffer_nbytes=1 << 16, buffer_count=2, fused=optimizer == FUSED
        )
    make = OPTIMIZERS.get(optimizer, lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True))
    return zs.shard(model, make(model.parameters()), stage=stage, **options)


def take_steps(model, optimizer, rank, world, steps):
    for number in steps:
        backward(model, [BATCHES[number][:world][rank]])
        optimizer.step()
        optimizer.zero_grad()


def assert_as_plain(model, plain):
    assert not differences(zs.full_state_dict(model), plain[0])
    assert not state_differences(zs.full_optimizer_state(model), plain[1])


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("stage", "device", "world"), [(0, "none", 2), (1, "none", 3), (2, "cpu", 2), (3, "none", 1), (3, "nvme", 4)]
)
def test_each_format_equals_one_process(stage, device, world, name, stochastic, tmp_path):
    form = zs.StateFormat(name, block=64, min_numel=100, stochastic_rounding=stochastic)
    plain = plain_run("AdamW", 3, world, form)

    def rank_run(rank):
        model, optimizer = sharded("AdamW", stage, device, tmp_path, optimizer_states=form)
        take_steps(model, optimizer, rank, world, range(3))
        assert_as_plain(model, plain)
        zs.close(model)

    run_threads(world, rank_run)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("stage", "device"), [(1, "none"), (3, "cpu")])
def test_each_optimizer_equals_one_process(optimizer, stage, device, tmp_path):
    plain = plain_run(optimizer, 3, 2, FORM)

    def rank_run(rank):
        model, made = sharded(optimizer, stage, device, tmp_path, optimizer_states=FORM)
        take_steps(model, made, rank, 2, range(3))
        assert_as_plain(model, plain)
        zs.close(model)

    run_threads(2, rank_run)


@pytest.mark.parametrize(
    ("stage", "device", "separate"), [(3, "none", False), (3, "none", True), (2, "cpu", True), (1, "nvme", False)]
)
def test_training_goes_on_at_another_world_size(stage, device, separate, strict_device, tmp_path):
    form = zs.StateFormat("int8", block=64, min_numel=100, stochastic_rounding=True)

    def first(rank):
        strict_device(rank, separate)
        model, optimizer = sharded("AdamW", stage, device, tmp_path, optimizer_states=form)
        take_steps(model, optimizer, rank, 2, range(2))
        zs.save(tmp_path / "saved", model, optimizer).wait()
        take_steps(model, optimizer, rank, 2, range(2, 4))
        states = zs.full_state_dict(model), zs.full_optimizer_state(model)
        zs.close(model)
        return states

    def second(rank):
        model, optimizer = sharded("AdamW", stage % 3 + 1, "none", tmp_path, optimizer_states=form)
        zs.load(tmp_path / "saved", model, optimizer)
        for number in (2, 3):
            backward(model, BATCHES[number][:2])
            optimizer.step()
            optimizer.zero_grad()
        states = zs.full_state_dict(model), zs.full_optimizer_state(model)
        zs.close(model)
        return states

    plain = run_threads(2, first)[0]
    again = run_threads(1, second)[0]
    assert not differences(again[0], plain[0]) and not state_differences(again[1], plain[1])


@pytest.mark.parametrize(
    ("saved", "loaded"), [("int8", "int8"), ("int4", None), ("bf16", "int8"), (None, "int8"), ("fp8", "bf16"), ("int8", "int4")]
)
@pytest.mark.parametrize("verify", [True, "before", False])
def test_checkpoints_have_states_as_they_rest_and_load_into_any_other_format(saved, loaded, verify, tmp_path):
    form = {name: name and zs.StateFormat(name, block=64, min_numel=100) for name in (saved, loaded)}

    def first(rank):
        model, optimizer = sharded("AdamW", 3, "none", None, optimizer_states=form[saved])
        take_steps(model, optimizer, rank, 2, range(2))
        zs.save(tmp_path / "saved", model, optimizer).wait()
        states = zs.full_optimizer_state(model)
        zs.close(model)
        return states

    def second(rank):
        model, optimizer = sharded("AdamW", 2, "cpu", None, optimizer_states=form[loaded])
        zs.load(tmp_path / "saved", model, optimizer, verify=verify)
        states = zs.full_optimizer_state(model)
        zs.close(model)
        return states

    before, after = run_threads(2, first)[0], run_threads(3, second)[0]
    (path,) = (tmp_path / "saved").rglob("manifest.json")
    manifest = json.loads(path.read_text())
    keys = {tensor["keys"][-1] for name, tensor in manifest["tensors"].items() if name.startswith("optim.state.layers.0.weight")}
    labels = {"int8": ("@e3m4/64", "@e4m4/64"), "int4": ("@e2m1/64", "@e3m1/64"), "fp8": ("@e4m3/64", "@e5m3/64")}
    first_moment, squares = labels.get(saved, ("", ""))
    assert {f"exp_avg{first_moment}", f"exp_avg_sq{squares}"} <= keys and manifest["version"] == (2 if squares else 1)
    if loaded is not None:
        for name in CODED:
            for state in ("exp_avg", "exp_avg_sq"):
                before[name][state] = rounded(name, state, before[name][state], form[loaded])
    assert not state_differences(after, before)


def settle_ties(model, optimizer):
    """Take the last bit of masters half-way above an even bf16 number, as split ones lose it."""
    if optimizer.core.host is not None:
        optimizer.core.host.drop_ahead()  # it has read some ahead
    for rest in (group.masters.rest for group in runtime_of(model).groups):
        bits = rest.load(0, rest.numel).clone().view(torch.int32)
        rest.store(0, (bits - (bits & 0x1FFFF == 0x8000).int()).view(torch.float32))


@pytest.mark.parametrize(
    ("stage", "device", "separate", "states"),
    [
        (0, "none", False, None),
        (0, "none", True, FORM),
        (1, "none", False, FORM),
        (2, "none", True, None),
        (3, "none", False, FORM),
        (2, "cpu", False, None),
        (3, "cpu", True, FORM),
        (3, "nvme", False, None),
        (3, "nvme", True, FORM),
    ],
)
def test_split_masters_are_those_of_fp32(stage, device, separate, states, strict_device, tmp_path):
    def rank_run(rank):
        strict_device(rank, separate)
        found = []
        for masters in (True, "split"):
            model, optimizer = sharded(
                "AdamW", stage, device, tmp_path, precision="bf16", master_weights=masters, optimizer_states=states
            )
            for number in range(3):
                take_steps(model, optimizer, rank, 2, [number])
                if masters is True:
                    settle_ties(model, optimizer)
            found.append([zs.full_state_dict(model, masters=True), zs.full_state_dict(model), zs.full_optimizer_state(model)])
            if masters == "split":
                assert all(group.masters.rest.nbytes == 2 * group.masters.rest.numel for group in runtime_of(model).groups)
            zs.close(model)
        assert not differences(found[1][0], found[0][0]) and not differences(found[1][1], found[0][1])
        assert not state_differences(found[1][2], found[0][2])

    run_threads(2, rank_run)


def test_what_was_loaded_is_the_callers_own():
    """The memory in which a thread opens chunks is for steps alone: a load of other elements does not change an earlier one's."""

    def rank_run(rank):
        model, optimizer = sharded("AdamW", 3, "none", None, precision="bf16", master_weights="split", optimizer_states=FORM)
        take_steps(model, optimizer, rank, 2, [0])
        group = next(group for group in runtime_of(model).groups if group.plan.coded)
        for rest in (group.masters.rest, *group.columns.values()):
            first = rest.load(0, 64)
            kept = first.clone()
            assert not torch.equal(rest.load(64, 128), kept) and torch.equal(first, kept)
            rest.store(64, torch.full((64,), 0.5))
            assert torch.equal(first, kept) and torch.equal(rest.load(0, 64), kept)
        zs.close(model)

    run_threads(2, rank_run)


def test_halves_of_masters():
    """All values come back, except those half-way above an even bf16 number, which lose their last bit and no other."""
    bits = torch.cat(
        [torch.randint(-(2**31), 2**31 - 1, (1 << 16,)), torch.tensor([0, 1, 0x8000, 0x18000, 0x7F7FFFFF, -(2**31)])]
    )
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.cat([values[values.isfinite()], torch.tensor([math.inf, -math.inf, math.nan])])
    halves = torch.empty(values.numel(), dtype=torch.bfloat16), torch.empty(values.numel(), dtype=torch.int16)
    stretch = SplitStretch(*halves)
    stretch.close(values)
    assert torch.equal(halves[0].view(torch.int16)[:-1], values.to(torch.bfloat16).view(torch.int16)[:-1])
    given, back = values.view(torch.int32)[:-1], stretch.open().view(torch.int32)[:-1]
    tie = given & 0x1FFFF == 0x8000
    assert torch.equal(given[~tie], back[~tie]) and torch.equal(given[tie] - 1, back[tie]) and tie.any()
    assert stretch.open()[-1].isnan()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
def test_what_was_decoded_is_encoded_to_the_same_bytes(name, state):
    torch.manual_seed(1)
    values = torch.randn(1 << 14) * torch.exp(4 * torch.randn(1 << 14))
    values[:512] = 0
    values[600] = 0
    values[1024:1280] *= 1e-15
    values = values.square() if state == "exp_avg_sq" else values
    column = coded_column(state, zs.StateFormat(name))
    coded = column.encode(values).to(column.dtype)
    decoded = column.decode(coded).float()
    assert torch.equal(column.encode(decoded).to(column.dtype), coded) and not decoded[:512].any()
    assert coded.nbytes == column.nbytes(values.numel(), torch.float32)
    largest = values.view(-1, 256).abs().amax(1)
    error = (decoded - values).view(-1, 256).abs().amax(1)
    bound = {"bf16": 2**-8, "fp8": 2**-3, "int8": 1 / 60, "int4": 0.17}[name]
    assert (error <= largest * bound).all()
    if state == "exp_avg_sq":
        assert (decoded[values > 1e-37] > 0).all()  # a divisor of the update


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("stage", [0, 2])
def test_padding_does_not_set_the_scale_of_a_block(stage, name, tmp_path):
    """Rprop's first step sizes are not zero, in padding neither: as the largest of a block they would be lost by a checkpoint."""

    torch.manual_seed(0)
    made = nn.Linear(32, 3)  # 96 elements: the second block of 64 is half padding

    def states(load):
        def rank_states(rank):
            model = copy.deepcopy(made)
            optimizer = torch.optim.Rprop(model.parameters(), lr=0.5)
            zs.shard(model, optimizer, stage=stage, optimizer_states=zs.StateFormat(name, block=64, min_numel=64))
            for step in range(0 if load else 9):
                draw = torch.Generator().manual_seed(step)
                model(torch.randn(4, 32, generator=draw)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if load:
                zs.load(tmp_path, model, optimizer)
            else:
                zs.save(tmp_path, model, optimizer)
            return zs.full_optimizer_state(model)["weight"]["step_size"].clone()

        return run_threads(2, rank_states)[0]

    saved = states(load=False)
    assert torch.equal(states(load=True), saved)


@pytest.mark.parametrize("quantized", [False, True], ids=["whole", "quantized"])
@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("kind", ["Adam", "RMSprop", "Rprop", "SGD"])
def test_padding_of_parameters_is_not_stepped(kind, name, quantized, tmp_path):
    """It takes part in the scale of a quantized gather's last block, and a load leaves it zero: a resumed run has the same bits."""
    torch.manual_seed(0)
    made = nn.Linear(32, 3, bias=False)  # 96 elements: the second block of 64 is half padding
    with torch.no_grad():
        made.weight.mul_(0.01)
    options = {
        "Adam": {"lr": 0.05, "eps": 0.0},  # divides by a state that is zero in padding
        "RMSprop": {"lr": 0.01, "momentum": 0.9},
        "Rprop": {"lr": 0.5},
        "SGD": {"lr": 0.05, "momentum": 0.9},
    }
    packed = {"zero_quantized_weights": zs.Compression("int8", force=True, block=64, min_numel=1)} if quantized else {}

    def losses(resumed):
        def rank_losses(rank):
            def build():
                model = copy.deepcopy(made)
                optimizer = getattr(torch.optim, kind)(model.parameters(), **options[kind])
                return zs.shard(model, optimizer, stage=3, optimizer_states=zs.StateFormat(name, block=64, min_numel=1), **packed)

            (model, optimizer), found = build(), []
            for step in range(12):
                inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(step * 7 + rank))
                inputs[:, :31] *= 0.05  # so that the last element has the largest momentum
                loss = (model(inputs) - torch.sin(torch.arange(3.0) + step)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
                if step == 5 and resumed:
                    zs.save(tmp_path, model, optimizer)
                    zs.close(model)
                    model, optimizer = build()
                    zs.load(tmp_path, model, optimizer)
            [group] = runtime_of(model).groups
            piece, rest = group.homes[0].piece, group.masters.stepped
            assert not rest.load(piece.numel, rest.numel).any(), "padding was stepped"
            return found, rest.numel - piece.numel

        results = run_threads(2, rank_losses)
        assert [padding for _, padding in results] == [0, 32]
        return [found for found, _ in results]

    assert losses(resumed=True) == losses(resumed=False)


def test_a_step_asks_where_a_parameter_lies_as_often_in_a_large_model(monkeypatch):
    """A run of many parameters has many chunks, too: to ask for each parameter in each chunk would be quadratic."""
    monkeypatch.setattr(slab_step, "_CLASS_CHUNK_NUMEL", 64)
    asked, given = [], Masters.range

    def count(parameters):
        model = nn.ParameterList(nn.Parameter(torch.ones(10, 10)) for _ in range(parameters))
        form = zs.StateFormat("int8", block=64, min_numel=1, stochastic_rounding=True)
        _, optimizer = zs.shard(model, torch.optim.RMSprop(model.parameters(), momentum=0.9), stage=3, optimizer_states=form)
        for param in model:
            param.grad = torch.ones(10, 10)
        asked.clear()
        optimizer.step()
        return len(asked)

    monkeypatch.setattr(Masters, "range", lambda self, index: asked.append(index) or given(self, index))
    assert 0 < count(40) <= 4 * count(10)


def test_codes_that_no_kernel_packs_are_refused():
    """The kernels know one and two codes in a byte; those of 6 bits would be written over their neighbours."""
    with pytest.raises(NotImplementedError, match="e3m2: expected codes of 4 or 8 bits, two or one in a byte, got 6"):
        FloatCodec(32, 3, 2, squares=False)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
def test_stochastic_rounding_has_the_value_as_its_mean(name, state):
    torch.manual_seed(1)
    values = torch.rand(1 << 12) + 0.05
    column = coded_column(state, zs.StateFormat(name, stochastic_rounding=True))
    total = torch.zeros_like(values)
    for number in range(256):
        noise = hashed_uniform(number, 0, values.numel(), values.device)
        total += column.decode(column.noisy(values, noise).to(column.dtype)).float()
    nearest = (column.decode(column.encode(values).to(column.dtype)).float() - values).abs()
    clipped = values.view(-1, 256) >= values.view(-1, 256).amax(1, keepdim=True) * 0.999
    error = (total / 256 - values).abs().masked_fill(clipped.view(-1), 0)
    assert error.mean() < 0.2 * nearest.mean() and abs((total / 256 - values).mean()) < 1e-3


def test_noise_is_uniform_and_depends_on_key_and_element_alone():
    whole = hashed_uniform(7, 0, 1 << 16, torch.device("cpu"))
    assert torch.equal(whole[1000:2000], hashed_uniform(7, 1000, 2000, torch.device("cpu")))
    other = hashed_uniform(8, 0, 1 << 16, torch.device("cpu"))
    assert whole.min() >= 0 and whole.max() < 1 and abs(whole.mean() - 0.5) < 0.01 and abs(whole.var() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(torch.stack([whole, other]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([whole[1:], whole[:-1]]))[0, 1]) < 0.02


def test_which_parameters_keep_fp32_states():
    def rank_run(rank):
        options = {"exp_avg": "int8", "exp_avg_sq": zs.StateFormat("bf16", min_numel=100, exempt=("layers.2*",))}
        model, _ = sharded("AdamW", 3, "none", None, optimizer_states=options)
        plans = {spec.name: group.plan for group in runtime_of(model).groups for spec in group.specs}
        coded = {name: plan.column("exp_avg_sq").dtype for name, plan in plans.items() if plan.coded}
        assert coded == {"layers.0.weight": torch.bfloat16}  # of exp_avg: none has 4096 elements
        zs.close(model)

    run_threads(2, rank_run)


class Momentum(torch.optim.Optimizer):
    """A class whose states zeroshard does not know."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            mean = self.state[param].setdefault("mean", torch.zeros_like(param))
            param.sub_(mean.lerp_(param.grad, 0.1), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_formats_by_name_for_a_class_that_is_not_known(stage):
    """The names lay parameters out in whole blocks. One format for all states gives the same bits."""

    def run(rank, form):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, Momentum(model.parameters()), stage=stage, optimizer_states=form)
        for batches in BATCHES[:3]:
            model(*batches[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zs.full_state_dict(model)

    for mine, expected in zip(run_threads(2, run, {"mean": FORM}), run_threads(2, run, FORM), strict=True):
        assert not differences(mine, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_states": "int9"}, "optimizer_states: expected one of 'fp32'.*got 'int9'"),
        ({"optimizer_states": {"exp_avg": 8}}, "optimizer_states: expected a format"),
        ({"optimizer_states": {"exp_av": "int8"}}, "AdamW keeps exp_avg, exp_avg_sq, not 'exp_av'.*exp_avg"),
        ({"optimizer_states": {"format": "int8", "blok": 3}}, "unknown field 'blok'.*block"),
        ({"optimizer_states": {"format": "int8", "block": 48}}, "a power of two"),
        ({"master_weights": "split"}, "use precision='bf16'"),
        ({"master_weights": "halves", "precision": "bf16"}, "True, False or 'split'"),
        ({"master_weights": "split", "precision": "bf16", "stage": 2, "zero_quantized_weights": True}, "use stage 3"),
    ],
)
def test_wrong_options_are_named(options, message):
    def rank_run(rank):
        with pytest.raises(zs.ConfigError, match=message):
            sharded("AdamW", options.pop("stage", 3), "none", None, **options)

    run_threads(1, rank_run)
