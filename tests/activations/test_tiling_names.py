"""What a tiled model is called and what it refuses: names and shapes in state dicts, initial values, the verb `zs.tile`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import OddGPT, seeded
from tiling_kit import DIM, MODES, STAGE3, VOCAB, gpt, tiled, tiles_of
from torch import Tensor, nn
from zoo import Case, adamw, check, normal_batches, run_threads, square, token_batches

import zeroshard as zs
from zeroshard.errors import TiledAccessError

# -- state dicts, weights, initial values ----------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_state_dicts_have_the_original_names(tied):
    whole = gpt(tied=tied)
    parts = zs.tile(gpt(tied=tied), max_bytes=480)
    state = parts.state_dict()
    assert {n: v.shape for n, v in state.items()} == {n: v.shape for n, v in whole.state_dict().items()}
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in state.items())
    changed = {name: torch.randn_like(value) for name, value in state.items()}
    if tied:
        changed["head.weight"] = changed["embedding.weight"]
    parts.load_state_dict(changed)
    whole.load_state_dict(parts.state_dict())
    twin = copy.deepcopy(parts)
    twin.load_state_dict(dict(parts.state_dict(keep_vars=True)))  # the tiles' own names are read as well
    for model in (parts, whole, twin):
        assert all(torch.equal(value, changed[name]) for name, value in model.state_dict().items())


def test_loading_a_state_dict_that_does_not_fit():
    parts, state = tiled(gpt(tied=False), 4), gpt(tied=False).state_dict()
    state["extra"] = state.pop("head.weight")
    with pytest.raises(RuntimeError) as caught:
        parts.load_state_dict(state)
    assert 'Missing key(s) in state_dict: "head.weight". ' in str(caught.value) and '"extra"' in str(caught.value)
    state["head.weight"] = state.pop("extra")[1:]
    with pytest.raises(RuntimeError, match=r"size mismatch for head.weight: expected \(257, 7\), got \(256, 7\)") as caught:
        parts.load_state_dict(state)
    assert "Missing" not in str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_full_state_dict_and_loading_while_sharded(mode):
    """Ties stay one tensor; a sharded model reads whole values; closed, it is the tiled model again."""

    whole = gpt()

    def run(rank: int) -> None:
        model, _ = zs.shard(tiled(whole, 4), **mode)
        state = zs.full_state_dict(model)
        assert list(state) == list(whole.state_dict()) and state["head.weight"] is state["embedding.weight"]
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in state.items())
        with zs.gathered(model):
            assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        model.load_state_dict({name: value + 1 for name, value in state.items()})
        for name, value in zs.full_state_dict(model).items():
            assert torch.equal(value, state[name] + 1), name
        zs.close(model)
        assert list(model.state_dict()) == list(state) and not any("tiles" in name for name in state)

    run_threads(3, run)


@pytest.mark.parametrize("mode", MODES)
def test_weights_stream_by_the_original_names(mode, tmp_path):
    from safetensors.torch import save_file

    whole = nn.Sequential(gpt(), nn.Linear(900, 2))
    state = whole.state_dict()
    state.pop("0.head.weight")  # tied
    save_file(state, tmp_path / "model.safetensors")

    def run(rank: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(OddGPT(dim=DIM, layers=2, vocab_size=VOCAB), nn.Linear(900, 2))
        zs.tile(model, max_bytes=480)
        assert model[1].dim == 1  # by columns: not even one row of 900 fits
        zs.shard(model, weights=tmp_path, **mode)
        return zs.full_state_dict(model)

    for got in run_threads(2, run):
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in got.items())


def test_weights_that_do_not_fit_are_named_as_in_the_file(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(VOCAB, DIM + 1), "bias": torch.zeros(VOCAB)}, tmp_path / "model.safetensors")
    with pytest.raises(zs.ModelMismatch, match=r"\(1 problems\): of another shape: weight: saved \(257, 8\), wanted \(257, 7\)"):
        run_threads(1, lambda rank: zs.shard(tiled(nn.Linear(DIM, VOCAB), 4, dim=DIM + 1), weights=tmp_path))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("born", ["meta", "init"])
def test_initial_values_are_those_of_the_untiled_model(born, mode):
    """Drawn in the order of the original: the same bits, and the generator ends where it would have."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCAB, DIM, padding_idx=3), nn.Linear(DIM, 99), nn.Linear(900, 2), nn.Linear(DIM, DIM))

    torch.manual_seed(0)
    whole, after = build(), torch.rand(3)

    def run(rank: int) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(0)
        if born == "meta":
            with torch.device("meta"):
                model = build()
        else:
            with zs.init(**mode):
                model = build()
        # the third by columns, of which a born parameter has none to give
        zs.tile(model if born == "meta" or mode["stage"] < 3 else model[:2], max_bytes=520)
        zs.shard(model, **mode)
        return zs.full_state_dict(model), torch.rand(3)

    # one rank: torch's global generator is common to all threads
    ((got, then),) = run_threads(1, run)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in got.items())
    assert torch.equal(then, after)


def test_parameters_born_on_several_ranks_are_cut_again():
    whole = gpt(tied=False)

    def run(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(whole)
        with zs.init(stage=3):
            for module in model.modules():
                for name, param in list(module._parameters.items()):
                    module.register_parameter(name, param)
        zs.tile(model, max_bytes=480)
        zs.shard(model, **STAGE3)
        return zs.full_state_dict(model)

    for got in run_threads(3, run):
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in got.items())


def test_initialisation_by_class_reaches_the_tiles():
    """`_init_weights` as models have it: nn.Linear and nn.Embedding by isinstance, over model.apply."""

    class Net(nn.Sequential):
        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.5)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def build() -> nn.Module:
        return Net(nn.Embedding(VOCAB, DIM, padding_idx=200), nn.Linear(DIM, VOCAB), nn.Linear(DIM, 3))

    torch.manual_seed(0)
    whole = build()
    whole.apply(whole._init_weights)

    def run(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = build()
        zs.tile(model, max_bytes=-(-VOCAB // 4) * (DIM + 1) * 4)
        assert len(tiles_of(model)) == 8
        zs.shard(model, **STAGE3)
        return zs.full_state_dict(model)

    got = run_threads(1, run)[0]
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in got.items())


# -- the verb --------------------------------------------------------------------------------------------------


def test_what_stays_and_what_is_carried():
    model = gpt(tied=False)
    model.head.weight.tag = "mine"
    seen = []
    model.head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model.eval()
    head, storage = model.head, model.head.weight.untyped_storage().data_ptr()
    optimizer = torch.optim.AdamW([
        {"params": list(model.blocks.parameters()), "lr": 1.0},
        {"params": [model.embedding.weight, model.head.weight, *model.norm.parameters()], "lr": 2.0},
    ])  # fmt: skip
    zs.tile(model, max_bytes=-(-VOCAB // 2) * DIM * 4, optimizer=optimizer)
    assert model.head is head and all(not module.training for module in model.modules())
    assert head.tiles[0].weight.tag == "mine" and head.tiles[1].weight.untyped_storage().data_ptr() == storage
    model(*token_batches(1, 1, VOCAB, 2, 5)[0][0])
    assert seen == [(2, 5, VOCAB)]
    wanted = [*model.embedding.parameters(), *head.parameters(), *model.norm.parameters()]
    assert all(a is b for a, b in zip(optimizer.param_groups[1]["params"], wanted, strict=True))
    assert zs.tile(model, max_bytes=-(-VOCAB // 2) * DIM * 4) is model and len(head.tiles) == 2  # again: nothing left


def test_a_budget_for_all_that_is_gathered():
    model = gpt()

    def peak(rank: int, tiles: bool, budget: int = 3000) -> int:
        sharded = copy.deepcopy(model)
        if tiles:
            zs.tile(sharded, budget_bytes=budget)
        sharded, _ = zs.shard(sharded, **STAGE3)
        sharded(*token_batches(1, 2, VOCAB, 2, 5)[0][rank]).backward()
        return zs.report(sharded).peak["gathered units"]

    padding = 3 * 2 * 32 * 4 * 2  # of three units' groups to 32 elements on each of two ranks
    assert run_threads(2, peak, False)[0] > 3000 + padding
    assert run_threads(2, peak, True)[0] <= 3000 + padding
    with pytest.raises(zs.ConfigError, match="are too few"):
        zs.tile(model, budget_bytes=100)
    assert not tiles_of(model)


def test_dtype_rules_treat_tiles_as_the_layer():
    """Config.dtypes by the layer's class and name: head and its tiles in fp32, the rest in bf16."""
    for key in ("head", "Linear"):
        model = nn.Sequential()
        model.body, model.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

        def run(rank: int, model: nn.Module = model, key: str = key) -> tuple:
            sharded, _ = zs.shard(tiled(model, 4, dim=DIM + 1), precision="bf16", dtypes={key: torch.float32}, **STAGE3)
            out = sharded(torch.ones(2, DIM))
            out.float().sum().backward()
            return out.dtype, {p.dtype for p in sharded.head.parameters()}, {p.dtype for p in sharded.body.parameters()}

        assert run_threads(1, run)[0] == (torch.bfloat16, {torch.float32}, {torch.bfloat16})


def test_reading_the_weight_names_the_remedy():
    model = tiled(gpt(tied=False), 4)
    with pytest.raises(TiledAccessError, match="tiled_cross_entropy"):
        F.linear(torch.ones(2, DIM), model.head.weight)
    with pytest.raises(TiledAccessError, match="before zs.tile"):
        model.head.weight = nn.Parameter(torch.ones(VOCAB, DIM))
    assert not hasattr(model.head, "weight") and model.head.bias is None and not hasattr(model.embedding, "bias")


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_what_is_not_known_stays_whole_and_is_named(capsys):
    class Raw(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.table = weight

    patched = nn.Linear(DIM, VOCAB)
    patched.forward = lambda x: x
    tied = nn.Linear(DIM, VOCAB, bias=False)
    model = nn.ModuleDict({
        "own": OwnForward(DIM, VOCAB), "patched": patched, "tied": tied, "raw": Raw(tied.weight),
        "mix": nn.MultiheadAttention(64, 2), "one": nn.Linear(DIM, VOCAB), "two": nn.Linear(5, VOCAB),
    })  # fmt: skip
    model["two"].bias = model["one"].bias
    before = {name: type(module) for name, module in model.named_modules()}
    assert zs.tile(model, max_bytes=1000) is model
    assert {name: type(module) for name, module in model.named_modules()} == before
    said = capsys.readouterr().err
    for text in ("own is a OwnForward", "forward of patched", "raw is a Raw", "mix is a Multi", "bias of one is shared"):
        assert text in said, (text, said)
    assert "mix.out_proj is a NonDynamically" in said and said.count("stays whole") == 10
    zs.tile(model, max_bytes=1 << 20)
    assert "nothing to tile" in capsys.readouterr().err


def test_bad_input():
    for options in ({"max_bytes": 0}, {"max_bytes": -4}, {"max_bytes": "1G"}, {"max_bytes": True}, {"budget_bytes": 0}, {},
                    {"max_bytes": 1, "budget_bytes": 1}):  # fmt: skip
        with pytest.raises(zs.ConfigError, match="expected"):
            zs.tile(nn.Linear(3, 3), **options)
    with pytest.raises(zs.ConfigError, match=r"less than one row of weight \(9, 8\), 32 bytes\. Give"):
        zs.tile(nn.Embedding(9, 8), max_bytes=31)
    with pytest.raises(zs.ConfigError, match="and than one column"):
        zs.tile(nn.Linear(8, 9), max_bytes=31)
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(NotImplementedError, match=next(iter(option))):
            tiled(nn.Embedding(VOCAB, DIM, **option), 4)
    run_threads(1, refuse_after_sharding)


def refuse_after_sharding(rank: int) -> None:
    model, optimizer = zs.shard(nn.Linear(3, 3), stage=3)
    with pytest.raises(zs.ZeroshardError, match="before zs.shard"):
        zs.tile(model, max_bytes=8)


def test_nothing_is_lost_silently_and_nothing_changes_before_all_is_checked():
    def with_gradient(model):
        model[1](torch.ones(1, DIM)).sum().backward()

    def with_hook(model):
        model[1].weight.register_hook(lambda grad: grad)

    def with_late_hook(model):
        model[1].bias.register_post_accumulate_grad_hook(lambda param: None)

    def with_state_hook(model):
        model[1].register_state_dict_pre_hook(lambda *_: None)

    for spoil, match in [
        (with_gradient, "has a gradient"), (with_hook, "has hooks"), (with_late_hook, "has hooks"),
        (with_state_hook, "state-dict hooks"),
    ]:  # fmt: skip
        model = nn.Sequential(nn.Linear(DIM, VOCAB), nn.Linear(DIM, VOCAB))
        spoil(model)
        with pytest.raises(zs.ConfigError, match=match):
            zs.tile(model, max_bytes=1000)
        assert not tiles_of(model)
    model = nn.Linear(DIM, VOCAB)
    optimizer = adamw(model.parameters())
    model(torch.ones(1, DIM)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(zs.ConfigError, match="before the optimizer's first step"):
        zs.tile(model, max_bytes=1000, optimizer=optimizer)


def test_one_tiled_module_in_two_places():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 5)) for _ in range(2)])
            self.blocks.append(self.blocks[0])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    check(Case(zs.tile(seeded(Twice), max_bytes=400), normal_batches(2, 2, 3, 5), square), **STAGE3)
