"""Mixtures of experts in tiles: Transformers' weights (experts, ..., ...), cut by experts; experts in a ModuleList.

As in test_tiling.py: sharded tiles equal tiles on one process, in bits; tiles equal the uncut model, to rounding.
"""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from private_ranks import PostOffice, PrivateComm
from tiling_kit import MODES, STAGE3, tiles_of
from torch import Tensor, nn
from zoo import Case, MixtureOfExperts, check, compare, normal_batches, reference, run_threads, seeded, sharded, square

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.runtime import runtime_of

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 31, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
LIMIT = 2 * 3 * 12 * 20 * 4  # two experts of Mixtral's


def mixtral(implementation: str = "eager", experts: int = 5, chosen: int = 2, **options):
    config = transformers.MixtralConfig(
        num_local_experts=experts, num_experts_per_tok=chosen, output_router_logits=True, **{**COMMON, **options}
    )
    config._experts_implementation = implementation
    return transformers.MixtralForCausalLM(config)


def qwen(implementation: str = "eager"):
    config = transformers.Qwen3MoeConfig(
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, decoder_sparse_step=1, head_dim=6, **COMMON
    )
    config._experts_implementation = implementation
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss(implementation: str = "eager"):
    """Biases, weights transposed, gate and up interleaved, other names of the arguments."""
    config = transformers.GptOssConfig(
        num_local_experts=5, num_experts_per_tok=2, head_dim=6, attn_implementation="eager",
        layer_types=["full_attention"] * 2, **COMMON,
    )  # fmt: skip
    config._experts_implementation = implementation
    return transformers.GptOssForCausalLM(config)


def deepseek(implementation: str = "eager"):
    """Shared experts beside the routed ones, and a first layer without."""
    config = transformers.DeepseekV3Config(
        n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, first_k_dense_replace=1, n_group=1,
        topk_group=1, kv_lora_rank=6, q_lora_rank=6, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6,
        **{**COMMON, "num_hidden_layers": 3},
    )  # fmt: skip
    config._experts_implementation = implementation
    return transformers.DeepseekV3ForCausalLM(config)


def spread(model: nn.Module) -> nn.Module:
    """Router and experts as far from zero as trained ones: Transformers draws them with 0.02."""
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(8)
    return model


def tokens(steps: int, world: int, shape=(2, 5)):
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randint(1, 31, shape, generator=generator)  # noqa: E731
    return [[{"input_ids": (x := draw()), "labels": x} for _ in range(world)] for _ in range(steps)]


def loss(model, batch):
    return model(**batch).loss


# -- training: sharded tiles equal tiles on one process, in bits --------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [mixtral, qwen, gpt_oss, deepseek], ids=lambda f: f.__name__)
def test_experts_train_as_on_one_process(build, mode):
    """The batch is small: at each step some tile has no token, on one rank or on all."""
    model = zs.tile(spread(seeded(build)).train(), max_bytes=LIMIT)
    assert {"experts"} == {name.split(".")[-3] for name, _ in model.named_modules() if ".experts.tiles." in name}
    case = Case(model, tokens(3, 2, (1, 2)), loss)
    check(case, **mode)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation(implementation):
    model = zs.tile(spread(seeded(mixtral, implementation)).train(), max_bytes=LIMIT)
    check(Case(model, tokens(2, 2, (1, 2)), loss), **STAGE3)


@pytest.mark.parametrize("how", ["frozen", "checkpointed", "reentrant", "disk"])
def test_beside_other_options(how, tmp_path):
    model, options = spread(seeded(qwen)).train(), dict(STAGE3)
    if how == "frozen":
        for name, param in model.named_parameters():
            param.requires_grad_("experts" not in name)
    elif how == "disk":
        disk = zs.Offload("nvme", any_filesystem=True)
        options |= {"offload_param": disk, "offload_optimizer": disk, "offload_path": str(tmp_path)}
    else:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    check(Case(zs.tile(model, max_bytes=LIMIT), tokens(2, 2, (1, 2)), loss), **options)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_steps_as_the_uncut_model(precision):
    """The losses of eight steps, to the rounding of the dtype."""

    def run(rank: int, base: nn.Module) -> list[float]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        model, optimizer = zs.shard(model, optimizer, precision=precision, **STAGE3)
        losses = []
        for _ in range(8):
            out = model(**tokens(1, 2)[0][rank]).loss
            out.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(out.item())
        return losses

    whole = spread(seeded(mixtral)).train()
    expected, got = run_threads(2, run, whole), run_threads(2, run, zs.tile(copy.deepcopy(whole), max_bytes=LIMIT))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-2) and mine[-1] < mine[0]


def test_ranks_without_common_memory():
    """Gathers need every rank: all run all tiles, also those of which they need no expert."""
    case = Case(zs.tile(spread(seeded(mixtral)).train(), max_bytes=LIMIT), tokens(3, 2, (1, 2)), loss)
    wanted, office = reference(case), PostOffice()
    run = lambda rank: sharded(case, rank, comm=PrivateComm(office, rank, 2, ordered=True), stage=3)  # noqa: E731
    for got, expected in zip(run_threads(2, run), wanted, strict=True):
        compare(got, expected, 0.0)


def of_sockets() -> dict[str, Case]:
    """Over sockets at stage 3 ranks must use the same units, so each expert of the list gets tokens on every rank."""
    tensors, modules = spread(seeded(mixtral)).train(), seeded(MixtureOfExperts)
    with torch.no_grad():
        modules.router.weight.copy_(torch.eye(4, 6))
    return {
        "tensors": Case(zs.tile(tensors, max_bytes=LIMIT), tokens(2, 2, (1, 2)), loss),
        "list": Case(zs.tile(modules, max_bytes=112), normal_batches(2, 2, 40, 6), square),
    }


def _over_sockets(rank: int, world: int) -> dict[tuple, bytes]:
    dist.init_process_group("gloo")
    found = {}
    for name, case in of_sockets().items():
        for comm in ("shared", "dist"):
            trace = sharded(case, rank, stage=3, comm=comm)
            trace.notes = None
            found[name, comm] = pickle.dumps(trace)
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.limit(150)
def test_processes_on_both_transports():
    results = run_processes(_over_sockets, 2)
    for name, case in of_sockets().items():
        for expected, result in zip(reference(case), results, strict=True):
            for comm in ("shared", "dist"):
                compare(pickle.loads(result[name, comm]), expected, 0.0)


# -- equal to the uncut model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("build", [mixtral, qwen, gpt_oss, deepseek], ids=lambda f: f.__name__)
def test_training_equals_the_uncut_model(build, implementation):
    """Also where an expert has no token: its gradient is zero, not missing, and the optimizer steps it."""
    whole = spread(seeded(build, implementation)).train()
    parts = copy.deepcopy(whole)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (whole, parts)]
    zs.tile(parts, max_bytes=LIMIT, optimizer=optimizers[1])
    assert len(tiles_of(parts)) >= 6 and list(whole.state_dict()) == list(parts.state_dict())
    for ((batch,),) in zip(tokens(3, 1, (1, 2)), strict=True):
        losses = [model(**batch).loss for model in (whole, parts)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        for each, optimizer in zip(losses, optimizers, strict=True):
            each.backward()
        expected = {name: param.grad for name, param in whole.named_parameters()}
        largest = max(grad.abs().max().item() for grad in expected.values() if grad is not None)
        for name, grad in gradients(parts).items():
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-5 * largest, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in parts.state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=0, atol=1e-5, msg=name)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the uncut parameters' names, read through the state dict of a copy that holds them as values."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            if mine.grad is not None:
                theirs.copy_(mine.grad)
    names = {name for name, _ in model.named_parameters() if ".tiles." not in name}
    return {
        name: value
        for name, value in twin.state_dict().items()
        if (name in names and model.get_parameter(name).grad is not None) or "experts" in name
    }


def test_no_two_tiles_are_gathered_at_one_time():
    """The peak holds the root unit, a block without its experts, and one tile."""

    def run(rank: int) -> tuple[int, int]:
        model, _ = zs.shard(copy.deepcopy(base), **STAGE3)
        for batches in tokens(2, 2):
            model(**batches[rank]).loss.backward()
            zs.full_gradients(model)
        units = runtime_of(model).units
        sizes = {unit.name: unit.gathered_nbytes for unit in units}
        tiles = [size for name, size in sizes.items() if ".tiles." in name]
        root = [unit.gathered_nbytes for unit in units if model in unit.modules]
        others = [u.gathered_nbytes for u in units if ".tiles." not in u.name and model not in u.modules]
        return zs.report(model).peak["gathered units"], sum(root) + max(others) + max(tiles)

    base = zs.tile(spread(seeded(qwen)).train(), max_bytes=LIMIT)  # logits of routers that are kept would keep units
    whole = sum(p.nbytes for p in base.model.layers[0].mlp.experts.parameters())
    for peak, bound in run_threads(2, run):
        assert peak <= bound and whole > LIMIT


# -- names, values, copies ----------------------------------------------------------------------------------------


def test_names_and_shapes_of_state_dicts_and_checkpoints_are_those_of_the_uncut_model(tmp_path):
    """Saved in tiles of two, loaded in tiles of one, and by the uncut model."""
    whole = spread(seeded(mixtral)).train()

    def run(rank: int) -> None:
        first, second = (zs.tile(copy.deepcopy(whole), max_bytes=limit) for limit in (LIMIT, LIMIT // 2))
        assert len(tiles_of(first)) == 2 * 3 and len(tiles_of(second)) == 2 * 5
        models = [first, second, copy.deepcopy(whole)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        pairs = [zs.shard(model, optimizer, stage=3) for model, optimizer in zip(models, optimizers, strict=True)]
        for model, optimizer in pairs[:1]:
            model(**tokens(1, 2)[0][rank]).loss.backward()
            optimizer.step()
        state, states = zs.full_state_dict(pairs[0][0]), zs.full_optimizer_state(pairs[0][0])
        assert {n: v.shape for n, v in state.items()} == {n: v.shape for n, v in whole.state_dict().items()}
        zs.save(tmp_path, *pairs[0], step=1)
        for model, optimizer in pairs[1:]:
            zs.load(tmp_path, model, optimizer)
            for name, value in zs.full_state_dict(model).items():
                assert torch.equal(value, state[name]), name
        again, name = zs.full_optimizer_state(pairs[2][0]), "model.layers.0.mlp.experts"
        for attribute in ("gate_up_proj", "down_proj"):
            joined = torch.cat([states[f"{name}.tiles.{number}.{attribute}"]["exp_avg"] for number in range(3)])
            assert torch.equal(again[f"{name}.{attribute}"]["exp_avg"], joined) and joined.any()

    run_threads(2, run)


def test_weights_stream_into_tiles_on_the_meta_device(tmp_path):
    whole = spread(seeded(mixtral)).train()
    from safetensors.torch import save_file

    save_file(whole.state_dict(), tmp_path / "model.safetensors")

    def run(rank: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = mixtral()
        zs.tile(model, max_bytes=LIMIT)
        zs.shard(model, weights=tmp_path, stage=3)
        return zs.full_state_dict(model)

    for got in run_threads(1, run):
        for name, value in whole.state_dict().items():
            assert torch.equal(got[name], value), name


def test_init_weights_reaches_tiles_on_the_meta_device():
    def run(rank: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = mixtral(initializer_range=0.5)
        zs.tile(model, max_bytes=LIMIT)
        zs.shard(model, stage=3)
        return zs.full_state_dict(model)

    state = run_threads(1, run)[0]
    drawn = torch.cat([value.flatten() for name, value in state.items() if ".experts." in name])
    assert 0.45 < drawn.std().item() < 0.55 and drawn.mean().abs().item() < 0.05


def test_copies_and_pickles():
    model = zs.tile(spread(seeded(mixtral)).eval(), max_bytes=LIMIT)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    batch = tokens(1, 1)[0][0]
    for twin in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert torch.equal(twin(**batch).logits, model(**batch).logits)
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    experts = model.model.layers[0].mlp.experts
    assert experts.num_experts == 5 and "MixtralExperts, 5 experts" in repr(experts)
    with pytest.raises(zs.ShardedAccessError, match="gate_up_proj of a TiledExperts is in its 3 tiles"):
        experts.gate_up_proj  # noqa: B018


def test_a_budget_counts_the_largest_tile_of_experts():
    model = mixtral()
    with pytest.raises(zs.ConfigError, match="budget_bytes: 5,000 bytes are too few"):
        zs.tile(copy.deepcopy(model), budget_bytes=5000)
    zs.tile(model, budget_bytes=14000)
    sizes = [sum(p.nbytes for p in tile.parameters()) for tile in tiles_of(model)]
    assert len(sizes) > 2 * 2 and max(sizes) <= 2 * LIMIT


# -- what can not be tiled is named -------------------------------------------------------------------------------


class Batched(nn.Module):
    """Experts of one's own, with a weight of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 40, 40))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("td,edf->tf", x, self.weight)


def test_what_stays_whole_is_named_with_the_reason(capsys):
    models = {name: mixtral() for name in ("tied", "spread", "common", "odd")}
    model = nn.ModuleDict({"moe": Batched(), **models})
    layers = {name: each.model.layers for name, each in models.items()}
    layers["tied"][1].mlp.experts.gate_up_proj = layers["tied"][0].mlp.experts.gate_up_proj
    layers["spread"][0].mlp.experts._is_expert_parallel = True
    layers["common"][0].mlp.experts.register_buffer("scale", torch.ones(1))
    layers["odd"][0].mlp.experts.extra = nn.Parameter(torch.zeros(3))
    zs.tile(model, max_bytes=LIMIT)
    said = capsys.readouterr().err
    for words in (
        "moe.weight (25,600 bytes): moe is a Batched; weights of nn.Linear, nn.Emb",
        "tied.model.layers.0.mlp.experts (14,400 bytes): a parameter of tied.model.layers.0.mlp.experts is shared",
        "spread.model.layers.0.mlp.experts (14,400 bytes): the experts of spread.model.layers.0.mlp.experts are spread",
        "common.model.layers.0.mlp.experts has buffers that its experts share: scale",
        "odd.model.layers.0.mlp.experts.extra (3,) is not divided by the 5 experts",
    ):
        assert words in said, said
    assert said.count("stays whole") == 1 + 2 + 3


def test_a_bound_below_one_expert_says_how_much_it_takes():
    model = mixtral()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(zs.ConfigError, match=r"2879 bytes are less than one expert of model\..*\.experts, 2880 bytes"):
        zs.tile(model, max_bytes=2879)
    assert list(model.state_dict()) == list(state) and not tiles_of(model)
    zs.tile(model, max_bytes=2880)
    assert len(tiles_of(model)) == 10


# -- experts that are modules in a list ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_experts_in_a_list_are_cut_each(mode):
    """Three tokens for four experts: at each step an expert is unused, on one rank or on all, as are its tiles."""
    whole = seeded(MixtureOfExperts)
    model = zs.tile(copy.deepcopy(whole), max_bytes=112)
    assert len(tiles_of(model)) == 4 * (3 + 3) and not tiles_of(model.router)
    case = Case(model, normal_batches(4, 2, 3, 6), square)
    check(case, **mode)
    for got, expected in zip(reference(case), reference(Case(whole, case.batches, square)), strict=True):
        assert got.losses == pytest.approx(expected.losses, rel=1e-6)
        for name, value in expected.state.items():
            torch.testing.assert_close(got.state[name], value, rtol=0, atol=1e-5)
