"""Which module computes in which dtype: `Config.dtypes` over whole subtrees, norms with statistics, and buffers.

Bit for bit one process's, where the same casts are made by hooks that are written out here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable

import pytest
import torch
from helpers import OddGPT, Rounding, Task, assert_equal_runs, differences, reference, seeded, token_batches, train
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from zoo import Attention, Block, Language, MixtureOfExperts, Stack, normal_batches

import zeroshard as zs
from zeroshard.policies import collect
from zeroshard.policies.dtypes import cast_modules, casts
from zeroshard.testing import run_threads

LOW, HIGH = torch.bfloat16, torch.float32
MODES = [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "map_shared": False}]
SCALE = 8.0  # fp16: a power of two changes no bits


def cast(tree: object, dtype: torch.dtype) -> object:
    """Each tensor once: attention asks whether queries, keys and values are one."""
    made: dict[int, Tensor] = {}
    return tree_map_only(Tensor, lambda t: made.setdefault(id(t), t.to(dtype)) if t.is_floating_point() else t, tree)


def compute_in(modules: Iterable[nn.Module], inside: torch.dtype, around: torch.dtype) -> None:
    """What the policy does, by hand."""
    for module in modules:
        module.to(inside)
        module.register_forward_pre_hook(lambda _, args, kwargs: (cast(args, inside), cast(kwargs, inside)), with_kwargs=True)
        module.register_forward_hook(lambda _, args, output: cast(output, around))


def of_class(model: nn.Module, *classes: type) -> list[nn.Module]:
    return [module for module in model.modules() if type(module) in classes]


def equals_one_process(
    model: nn.Module, data: list, prepare: Callable[[nn.Module], object], precision: str = "bf16",
    loss: Callable[..., Tensor] = lambda model, *batch: model(*batch), **options: object,
) -> None:  # fmt: skip
    """prepare: makes the casts in the low-precision model of the reference. loss: as of a Task."""

    def prepared(low: nn.Module) -> None:
        prepare(low)
        with torch.no_grad():  # what is fp32 was never rounded
            for param, exact in zip(low.parameters(), model.parameters(), strict=True):
                param.copy_(exact)

    task, buffers = Task(model, data, loss=loss), {name for name, _ in model.named_buffers()}
    if precision == "fp16":
        options["initial_loss_scale"] = SCALE
    outcomes = run_threads(2, lambda rank: [train(rank, task, precision=precision, **mode, **options) for mode in MODES])
    wanted = reference(
        task, 2, precision, outcomes[0][0].coefficients, scale=SCALE if precision == "fp16" else 1.0,
        rounding=Rounding(prepare=prepared),
    )  # fmt: skip
    for outcome in (wanted, *(outcome for rank in outcomes for outcome in rank)):
        outcome.gradients = [{n: g if g is None else g.float() for n, g in step.items()} for step in outcome.gradients]
        outcome.weights = {n: value for n, value in outcome.weights.items() if n not in buffers}  # of each rank its own
    for rank in outcomes:
        for mode, got in zip(MODES, rank, strict=True):
            assert_equal_runs(got, wanted, f"{mode}:")


# -- subtrees ----------------------------------------------------------------------------------------------------


def inner_low(model: nn.Module) -> None:
    compute_in(model.blocks, HIGH, LOW)
    compute_in([block.into for block in model.blocks], LOW, HIGH)


SUBTREES = {
    "class": ({"OddBlock": HIGH}, lambda m: compute_in(m.blocks, HIGH, LOW)),
    "name": ({"blocks.1": HIGH}, lambda m: compute_in([m.blocks[1]], HIGH, LOW)),
    "container": ({"blocks": HIGH}, lambda m: compute_in(m.blocks, HIGH, LOW)),
    "nearest": ({"OddBlock": HIGH, "*.into": LOW}, inner_low),
    "leaves": ({"Linear": HIGH}, lambda m: compute_in(of_class(m, nn.Linear), HIGH, LOW)),
}


@pytest.mark.parametrize("kind", SUBTREES)
def test_a_policy_holds_for_all_that_is_inside_its_module(kind):
    dtypes, prepare = SUBTREES[kind]
    model = seeded(lambda: OddGPT(tied=False))
    equals_one_process(model, token_batches(2, 1, 2), prepare, dtypes=dtypes)


@pytest.mark.parametrize("units", ["leaf", "model"])
def test_a_policy_does_not_depend_on_units(units):
    model = seeded(lambda: OddGPT(tied=False))
    equals_one_process(model, token_batches(2, 1, 2), inner_low, dtypes=SUBTREES["nearest"][0], units=units)


@pytest.mark.parametrize("wanted", [nn.MultiheadAttention, nn.Linear, Attention])
def test_attention_whose_parent_reads_its_projection(wanted):
    model = seeded(lambda: Language(vocab=11))
    prepare = lambda m: compute_in(of_class(m, wanted), HIGH, LOW)  # noqa: E731
    equals_one_process(model, token_batches(2, 1, 2), prepare, dtypes={wanted.__name__: HIGH})


class Encoder(nn.Module):
    """An encoder of torch's own; with a table of positions if asked for. `model(tokens, targets)` is the loss."""

    def __init__(self, table: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        if table:
            self.register_buffer("table", torch.randn(4, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 11, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.table if hasattr(self, "table") else x
        return nn.functional.cross_entropy(self.head(self.encoder(x)).flatten(0, 1), targets.flatten())


def test_layers_of_torch_in_fp32():
    prepare = lambda m: compute_in(m.encoder.layers, HIGH, LOW)  # noqa: E731
    equals_one_process(seeded(Encoder), token_batches(2, 1, 2), prepare, dtypes={"TransformerEncoderLayer": HIGH})


def test_a_policy_inside_compiled_blocks():
    base, (batches,) = seeded(lambda: OddGPT(tied=False)), token_batches(1, 1, 1)

    def run(rank, compiled):
        model = copy.deepcopy(base)
        for block in model.blocks if compiled else ():
            block.compile(fullgraph=True, backend="eager")
        model, _ = zs.shard(model, torch.optim.SGD(model.parameters()), precision="bf16", dtypes={"LayerNorm": HIGH})
        model(*batches[0][rank]).backward()
        return zs.full_gradients(model)

    eager, compiled = (run_threads(1, run, compiled)[0] for compiled in (False, True))
    assert not differences(compiled, eager)


def test_only_modules_where_the_dtype_changes_get_hooks():
    model = seeded(lambda: OddGPT(tied=False))
    assert casts(model, zs.Config(precision="bf16")) == []
    found = casts(model, zs.Config(precision="bf16", dtypes=SUBTREES["nearest"][0]))
    first, second = model.blocks
    assert found == [(first, HIGH, LOW), (first.into, LOW, HIGH), (second, HIGH, LOW), (second.into, LOW, HIGH)]


@pytest.mark.parametrize("key, meant", [("LayrNorm", "LayerNorm"), ("blocks.9", "blocks.1"), ("*.nothing", None)])
def test_a_key_that_matches_nothing_is_refused(key, meant):
    with pytest.raises(zs.ConfigError, match=f"dtypes: no module.*{meant or 'nothing'}"):
        collect(OddGPT(), zs.Config(precision="bf16", dtypes={"Embedding": HIGH, key: HIGH}))


def test_tied_parameters_in_two_dtypes_are_refused():
    with pytest.raises(zs.ConfigError, match="embedding.weight and head.weight are one tied.*bfloat16 and torch.float32"):
        collect(OddGPT(tied=True), zs.Config(precision="bf16", dtypes={"head": HIGH}))


def test_tied_parameters_in_one_dtype():
    prepare = lambda m: compute_in([m.embedding, m.head], HIGH, LOW)  # noqa: E731
    equals_one_process(seeded(OddGPT), token_batches(2, 1, 2), prepare, dtypes={"embedding": HIGH, "head": HIGH})


# -- inputs of the model -----------------------------------------------------------------------------------------


class Timed(nn.Module):
    """`model(x, step, times=...)` is the loss; `met` are the inputs, as its forward gets them. run: calls a module."""

    def __init__(self, run: Callable[..., Tensor] = lambda module, t: module(t)) -> None:
        super().__init__()
        self.time, self.lin, self.run = Clock(), nn.Linear(8, 8), run

    def forward(self, x: Tensor, step: object, *, times: dict[str, list[Tensor]]) -> Tensor:
        self.met = [x, step, times["t"][0]]
        t = self.run(self.time, times["t"][0])
        return (self.lin(x.to(self.lin.weight.dtype)) + t.to(self.lin.weight.dtype)).float().square().mean()


class Clock(nn.Module):
    """Waves of a time, from a table of frequencies that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.linspace(0.1, 1.0, 8))

    def forward(self, t: Tensor) -> Tensor:
        self.met = t
        return (t[:, None] * self.frequencies).sin()


def timed_batches(steps: int) -> list:
    draw = torch.Generator().manual_seed(4)
    return [
        [[(torch.randn(2, 8, generator=draw), torch.arange(2), 999.0 - torch.arange(2) - 10 * rank) for rank in range(2)]]
        for _ in range(steps)
    ]


def timed_loss(model: nn.Module, x: Tensor, step: Tensor, t: Tensor) -> Tensor:
    return model(x, step, times={"t": [t]})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_inputs_are_cast_or_handed_over(precision, stage):
    low, asked = {"bf16": LOW, "fp16": torch.float16}[precision], 2049.0  # neither dtype has this number

    def given(options: dict) -> tuple[list, Tensor, Tensor]:
        model, _ = zs.shard(Timed(), None, stage=stage, precision=precision, **options)
        t, other = torch.tensor([asked, 1.0], requires_grad=True), torch.ones(2, dtype=torch.float64)
        batch = {"t": [t], "other": other}
        model(torch.ones(2, 8), torch.arange(2), times=batch).backward()
        assert batch["t"][0] is t and t.grad.dtype == HIGH and t.grad.abs().sum() > 0
        return model.met, model.time.met, t

    def rank_main(rank: int) -> None:
        for options in ({}, {"dtypes": {"Clock": HIGH}}):
            (x, step, t), inner, _ = given(options)
            assert (x.dtype, step.dtype, t.dtype) == (low, torch.int64, low) and t[0].item() == 2048.0
            assert inner.dtype == options.get("dtypes", {}).get("Clock", low)
        for options in ({"cast_inputs": False, "dtypes": {"Clock": HIGH}}, {"dtypes": {"Timed": HIGH}},
                        {"dtypes": {"Linear": HIGH, "Clock": HIGH}}, {"dtypes": {"Linear": HIGH, "*frequencies": HIGH}}):  # fmt: skip
            (x, step, t), inner, own = given(options)
            assert (x.dtype, step.dtype, t.dtype) == (HIGH, torch.int64, HIGH)
            assert t[0].item() == inner[0].item() == asked, options
            assert precision == "fp16" or t is own

    run_threads(2, rank_main)


def test_bf16_inputs_of_an_fp32_model():
    """They are raised, as where a module in fp32 meets a model in bf16; cast_inputs=False leaves them."""
    for options, dtype in (({}, HIGH), ({"cast_inputs": False}, LOW)):
        model, _ = zs.shard(Timed(), None, precision="bf16", dtypes={"Timed": HIGH}, **options)
        loss = model(torch.ones(2, 8, dtype=LOW), 0, times={"t": [torch.ones(2, dtype=LOW)]})
        assert model.met[0].dtype == dtype and loss.dtype == HIGH


RUNS = {
    "plain": lambda module, t: module(t),
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": lambda module, t: checkpoint(module, t.requires_grad_(), use_reentrant=True),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("run", RUNS)
def test_training_with_inputs_as_they_are(run, precision):
    low = {"bf16": LOW, "fp16": torch.float16}[precision]
    prepare = lambda m: compute_in([m.time], HIGH, low)  # noqa: E731
    options = {"dtypes": {"Clock": HIGH}, "cast_inputs": False}
    equals_one_process(seeded(lambda: Timed(RUNS[run])), timed_batches(2), prepare, precision, timed_loss, **options)


@pytest.mark.parametrize("options", [{}, {"cast_inputs": False, "dtypes": {"Clock": HIGH}}, {"dtypes": {"Timed": HIGH}}], ids=str)
def test_inputs_of_a_compiled_model(options):
    base, (((batch, _),), *_) = seeded(Timed), timed_batches(1)

    def run(rank, compiled):
        model = copy.deepcopy(base)
        if compiled:
            model.compile(backend="eager")
        model, _ = zs.shard(model, torch.optim.SGD(model.parameters()), precision="bf16", **options)
        timed_loss(model, *batch).backward()
        return zs.full_gradients(model)

    eager, compiled = (run_threads(1, run, compiled)[0] for compiled in (False, True))
    assert not differences(compiled, eager)


# -- norms with statistics, and buffers --------------------------------------------------------------------------


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).relu()


class ConvNet(nn.Module):
    """Convolutions and batch norms. `model(x)` is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 1)
        self.blocks = nn.ModuleList(ConvBlock(5) for _ in range(2))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x.mean((2, 3))).square().mean()


IMAGES = [[ranks] for ranks in normal_batches(2, 2, 2, 3, 4, 4)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_norms_with_statistics_stay_in_fp32(precision):
    low = {"bf16": LOW, "fp16": torch.float16}[precision]
    prepare = lambda m: compute_in(of_class(m, nn.BatchNorm2d), HIGH, low)  # noqa: E731
    equals_one_process(seeded(ConvNet), IMAGES, prepare, precision)


def test_statistics_are_those_of_one_process():
    given = seeded(ConvNet)
    wanted = copy.deepcopy(given).bfloat16()
    compute_in(of_class(wanted, nn.BatchNorm2d), HIGH, LOW)
    ((x,),) = IMAGES[0][0][:1]
    wanted(x.bfloat16())

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(given), None, precision="bf16")
        model(x)
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    for buffers in run_threads(2, run):
        for name, buffer in wanted.named_buffers():
            assert torch.equal(buffers[name], buffer) and buffers[name].dtype == buffer.dtype, name


def test_a_key_for_the_norm_itself_wins():
    model = ConvNet()
    config = zs.Config(precision="bf16", dtypes={"blocks.0.norm": LOW, "blocks.1": LOW})
    assert casts(model, config) == [(model.blocks[1].norm, HIGH, LOW)]


def test_norms_given_in_low_precision_stay_so():
    model = ConvNet().bfloat16()
    assert casts(model, zs.Config(precision="bf16")) == [] and casts(model, zs.Config()) == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_buffers_that_are_cast(precision):
    equals_one_process(seeded(lambda: Encoder(table=True)), token_batches(2, 1, 2), lambda m: None, precision, cast_buffers=True)


def test_cast_buffers_leaves_fp32_modules_and_is_undone_by_close():
    def run(rank):
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model[2].register_buffer("table", torch.ones(2))
        model[0].register_buffer("again", model[2].table)
        given = {name: buffer.dtype for name, buffer in model.named_buffers()}
        model, _ = zs.shard(model, None, precision="bf16", cast_buffers=True)
        assert model[2].table.dtype == LOW and model[0].again is model[2].table
        assert model[0].parametrizations.weight[0]._u.dtype == LOW and model[1].running_mean.dtype == HIGH
        model(torch.randn(3, 4)).sum().backward()
        zs.close(model)
        assert {name: buffer.dtype for name, buffer in model.named_buffers()} == given and model[0].again is model[2].table

    torch.manual_seed(0)
    run_threads(2, run)


def test_buffers_that_can_not_be_cast_leave_the_model_as_it_was(monkeypatch):
    def to(tensor: Tensor, *args, **kwargs):
        if tensor.shape == (3,):
            raise MemoryError
        return plain(tensor, *args, **kwargs)

    model, plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Tensor.to
    model[0].register_buffer("small", torch.ones(2))
    model[1].register_buffer("large", torch.ones(3))
    monkeypatch.setattr(Tensor, "to", to)
    with pytest.raises(MemoryError):
        cast_modules(model, zs.Config(precision="bf16", cast_buffers=True, dtypes={"BatchNorm1d": "fp16"}))
    assert model[0].small.dtype == HIGH and not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


# -- models of every kind in low precision -----------------------------------------------------------------------


class Squared(nn.Module):
    """`model(x)` is the mean square of what the wrapped model gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return (x[0] if isinstance(x, tuple) else x).square().mean()


VECTORS = [[ranks] for ranks in normal_batches(2, 2, 4, 7)]
KINDS = {
    "stack": (lambda: Squared(Stack()), VECTORS),
    "experts": (lambda: Squared(MixtureOfExperts(dim=7)), VECTORS),
    "lstm": (lambda: Squared(nn.LSTM(7, 6, num_layers=2)), VECTORS),
    "attention": (lambda: Language(vocab=11), token_batches(2, 1, 2)),
    "tied": (lambda: Language(vocab=11, tied=True, block=Block), token_batches(2, 1, 2)),
    "encoder": (Encoder, token_batches(2, 1, 2)),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_kind(kind, precision):
    build, data = KINDS[kind]
    equals_one_process(seeded(build), data, lambda m: None, precision)
