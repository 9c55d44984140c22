"""Born sharded: zs.init, meta-device construction and streamed weights equal, bit for bit, one process's model.

Ranks run one after another over FakeComm where the values are random, since threads share torch's generator.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from zoo import Block, Language, Stack, adamw, normal_batches, run_threads, same, seeded, square

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.planner.models.gpt import GPT, GPTConfig


def gpt():
    return GPT(GPTConfig(vocab_size=33, seq_len=8, dim=12, layers=2, heads=2))


def tied_gpt():
    return GPT(GPTConfig(vocab_size=33, seq_len=8, dim=12, layers=2, heads=2, tied=True))


def alibi_gpt():
    return GPT(GPTConfig(
        vocab_size=33, seq_len=8, dim=12, layers=2, heads=3, tied=True, bias=True, positions="alibi", embedding_norm=True
    ))  # fmt: skip


def hugging_face_gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, n_embd=12, n_layer=2, n_head=2, n_positions=16))


def hugging_face_vit():
    transformers = pytest.importorskip("transformers")
    return transformers.ViTModel(transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, image_size=8, patch_size=4,
    ))  # fmt: skip


def hugging_face_llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=31, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    ))  # fmt: skip


class Torch(nn.Module):
    """The layers of torch with their own ways to initialise."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([
            nn.Linear(5, 7), nn.Conv2d(3, 5, 3), nn.ConvTranspose1d(3, 4, 2), nn.Embedding(11, 5, padding_idx=3),
            nn.LSTM(5, 6, 2), nn.GRUCell(3, 4), nn.MultiheadAttention(8, 2), nn.BatchNorm2d(5), nn.GroupNorm(2, 6),
            nn.Bilinear(3, 4, 5), nn.PReLU(3), nn.TransformerEncoderLayer(8, 2, 11), nn.RMSNorm(7), nn.EmbeddingBag(9, 3),
        ])  # fmt: skip


BUILDERS = [Stack, Language, Torch, gpt, tied_gpt, alibi_gpt]
HUGGING_FACE = [hugging_face_gpt2, hugging_face_llama, hugging_face_vit]
named = {"ids": lambda f: f.__name__}


def assert_slices_equal(model, base):
    """Parameters cut, buffers whole; names, ties and requires_grad alike."""
    assert list(model.state_dict()) == list(base.state_dict())
    whole = dict(base.named_parameters())
    assert [n for n, _ in model.named_parameters()] == list(whole)  # ties: each name once
    for name, param in model.named_parameters():
        flat = whole[name].detach().reshape(-1)[param._home.start : param._home.stop]
        assert param.requires_grad == whole[name].requires_grad and param.shape == whole[name].shape
        same(param.to_local(), flat, name, 0.0)
    for name, buffer in base.named_buffers():
        same(model.get_buffer(name), buffer, name, 0.0)


@pytest.mark.parametrize("build", BUILDERS + HUGGING_FACE, **named)
def test_b16_born_sharded_equals_one_process_bit_for_bit(build):
    base = seeded(build)
    after = torch.rand(())
    for rank in range(3):
        comm = FakeComm(rank, 3)
        with zs.init(stage=3, comm=comm):
            model = seeded(build)
            same(torch.rand(()), after, "the generator goes on as in one process", 0.0)
            held = sum(p.to_local().numel() for p in model.parameters())
        assert held < 0.5 * sum(p.numel() for p in model.parameters()) + 64
        assert_slices_equal(model, base)


@pytest.mark.parametrize("build", BUILDERS, **named)
def test_built_on_meta_equals_one_process_bit_for_bit(build):
    base = seeded(build)
    with torch.device("meta"):
        metas = [build() for _ in range(3)]
    for rank, model in enumerate(metas):
        torch.manual_seed(0)
        zs.shard(model, None, stage=3, comm=FakeComm(rank, 3))
        assert_slices_equal(model, base)


@pytest.mark.parametrize(
    "options", [{"stage": 3}, {"stage": 3, "map_shared": False}, {"stage": 3, "precision": "bf16"}, {"stage": 1}], ids=str
)
@pytest.mark.parametrize("build", [Stack, Language], **named)
def test_born_sharded_models_train_like_others(options, build):
    """Constant values here (threads share the generator): the cut at birth and that of the units differ."""
    batches = normal_batches(2, 2, 4, 7)

    def fill(model):
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-0.3, 0.4, p.numel()).view(p.shape) * (1 + number % 3))
        return model

    def run(rank, born):
        if born:
            with zs.init(**options):
                model = fill(build())
        else:
            model = fill(build())
        model, optimizer = zs.shard(model, adamw(model.parameters()), **options)
        for ranks in batches:
            if build is Stack:
                square(model, ranks[rank]).backward()
            else:
                model(torch.arange(6).view(2, 3) + rank, torch.arange(6).view(2, 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zs.full_state_dict(model, masters=True)

    wanted = run_threads(2, run, False)[0]
    for state in run_threads(2, run, True):
        for name, value in wanted.items():
            same(state[name], value, name, 0.0)


def test_meta_model_that_nothing_initialises_is_refused_by_name():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.linear = nn.Linear(3, 3)

    with torch.device("meta"):
        model = Bare()
    with pytest.raises(zs.ShardedAccessError, match="nothing initialises scale .*reset_parameters"):
        zs.shard(model, None, stage=3)


def test_init_and_shard_of_different_worlds_are_told_apart():
    with zs.init(stage=3, comm=FakeComm(1, 4)):
        model = Stack()
    assert sum(p.to_local().numel() for p in model.parameters()) < sum(p.numel() for p in model.parameters()) / 2
    with zs.init(stage=2, comm=FakeComm(1, 4)):
        assert type(nn.Linear(2, 2).weight) is nn.Parameter


# -- streamed weights --------------------------------------------------------------------------------------------


def stored(folder, model, files: int = 1, dtype=None, drop=(), change=None):
    """The model's state in `files` safetensors files with an index, as Hugging Face writes it."""
    state = {
        n: (t.to(dtype) if dtype and t.is_floating_point() else t).contiguous().clone()
        for n, t in model.state_dict().items()
        if n not in drop
    }
    state |= change or {}
    names = list(state)
    index = {}
    for number in range(files):
        file = "model.safetensors" if files == 1 else f"model-{number:05d}-of-{files:05d}.safetensors"
        part = {n: state[n] for n in names[number::files]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def on_meta(build):
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"stage": 3, "map_shared": False}], ids=str)
def test_c13_weights_stream_from_safetensors(tmp_path, files, options):
    base = seeded(Torch)
    base.layers[7].running_mean.normal_()
    folder = stored(tmp_path, base, files)

    def run(rank, model):
        model, _ = zs.shard(model, None, weights=folder, **options)
        return zs.full_state_dict(model)

    metas = [on_meta(Torch) for _ in range(3)]
    for state in run_threads(3, lambda rank: run(rank, metas[rank])):
        for name, value in base.state_dict().items():
            same(state[name], value, name, 0.0)
    if files == 1:  # the file itself, and a model that has values already
        folder = folder / "model.safetensors"
        (state,) = run_threads(1, run, seeded(Torch, seed=9))
        for name, value in base.state_dict().items():
            same(state[name], value, name, 0.0)


def test_weights_are_converted_and_masters_take_the_exact_values(tmp_path):
    base = seeded(Stack)
    exact = stored(tmp_path, base)
    (tmp_path / "low").mkdir()
    low = stored(tmp_path / "low", base, dtype=torch.bfloat16)

    def run(rank, folder, model):
        model, _ = zs.shard(model, adamw(model.parameters()), weights=folder, stage=3, precision="bf16")
        return zs.full_state_dict(model), zs.full_state_dict(model, masters=True)

    for folder, rounded in ((exact, False), (low, True)):
        metas = [on_meta(Stack) for _ in range(2)]
        for state, masters in run_threads(2, lambda rank: run(rank, folder, metas[rank])):
            for name, value in base.state_dict().items():
                same(state[name], value.bfloat16(), name, 0.0)
                same(masters[name], value.bfloat16().float() if rounded else value, name, 0.0)


def test_tied_weights_need_one_of_their_names(tmp_path):
    base = seeded(tied_gpt)
    for drop in ("head.weight", "embedding.weight"):
        folder = tmp_path / drop
        folder.mkdir()
        stored(folder, base, drop=(drop,))
        metas = [on_meta(tied_gpt) for _ in range(2)]

        def run(rank):
            model, _ = zs.shard(metas[rank], None, weights=folder, stage=3)
            assert model.head.weight is model.embedding.weight
            return zs.full_state_dict(model)

        for state in run_threads(2, run):
            for name, value in base.state_dict().items():
                same(state[name], value, name, 0.0)


@pytest.mark.parametrize("fault", ["missing", "renamed", "shape", "nowhere", "truncated"])
def test_b10_weights_that_do_not_fit_are_refused_before_anything_changes(tmp_path, fault):
    base = seeded(Stack)
    kind, message = zs.ModelMismatch, ""
    if fault == "missing":
        stored(tmp_path, base, drop=("blocks.1.up.bias", "last.weight"))
        message = r"2 problems.*missing .*: blocks.1.up.bias \(.*missing .*: last.weight \("
    elif fault == "renamed":
        stored(tmp_path, base, drop=("last.weight",), change={"last.wieght": torch.zeros(3, 7)})
        message = r"last.weight \(3, 7\) Did you mean 'last.wieght'"
    elif fault == "shape":
        stored(tmp_path, base, change={"last.bias": torch.zeros(4)})
        message = r"last.bias: saved \(4,\), wanted \(3,\)"
    elif fault == "nowhere":
        kind, message = FileNotFoundError, "expected a .safetensors file or a folder"
    else:
        file = stored(tmp_path, base) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-40])
        kind, message = OSError, "model.safetensors.*truncated"

    def run(rank):
        model = models[rank]
        kinds = {n: type(p) for n, p in model.named_parameters()}
        with pytest.raises(kind, match=message):
            zs.shard(model, None, weights=tmp_path if fault != "nowhere" else tmp_path / "none", stage=3)
        assert kinds == {n: type(p) for n, p in model.named_parameters()}
        zs.shard(model, None, stage=3)

    models = [seeded(Stack) for _ in range(2)]
    run_threads(2, run)


def test_a_buffer_that_is_initialised_leaves_streamed_weights_alone(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.own = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.arange(3.0), persistent=False)

        def reset_parameters(self):
            self.own.fill_(1.0)
            self.table.copy_(torch.arange(3.0))

    base = seeded(Net)
    base.own.data.fill_(7.0)
    folder = stored(tmp_path, base)
    metas = [on_meta(Net) for _ in range(2)]

    def run(rank):
        model, _ = zs.shard(metas[rank], None, weights=folder, stage=3)
        return zs.full_state_dict(model), model.table.tolist()

    for state, table in run_threads(2, run):
        assert table == [0, 1, 2]
        for name, value in base.state_dict().items():
            same(state[name], value, name, 0.0)


def test_reset_parameters_after_sharding_acts_on_the_logical_tensors():
    def reset(model):
        torch.manual_seed(4)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model

    base = reset(seeded(Block, 7))
    for rank in range(3):
        model, _ = zs.shard(seeded(Block, 7), None, stage=3, comm=FakeComm(rank, 3))
        assert_slices_equal(reset(model), base)


def test_a_parameter_smaller_than_the_world_comes_to_its_unit():
    """Cut at birth as in its unit for one rank, otherwise for another: all gather it, or none."""

    def run(rank):
        with zs.init(stage=3):
            model = torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 8))
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.fill_(number + 1.0)
        zs.shard(model, None, stage=3)
        return [p.unique().tolist() for p in zs.full_state_dict(model).values()]

    assert run_threads(2, run) == [[[float(number + 1)] for number in range(6)]] * 2


def test_an_initialisation_reads_whole_values():
    """Under torch.no_grad() while the model is made: all ranks do the same. Slices are written as ever; afterwards it is refused."""
    values = torch.arange(12.0).view(3, 4)

    def run(rank):
        with zs.init(stage=3):
            layer = nn.Linear(4, 3)
            layer.weight.full_tensor()  # which cuts it
            with torch.no_grad():
                layer.weight.copy_(values)
                found = [
                    layer.weight @ torch.ones(4),
                    torch.linalg.matrix_norm(layer.weight),
                    layer.weight.full_tensor(),
                    layer.weight.sum(0),
                ]
                layer.weight.add_(1.0)
                with pytest.raises(zs.ShardedWriteError):
                    layer.weight.t_()
            with pytest.raises(zs.ShardedAccessError, match="Linear.weight"):
                layer.weight @ torch.ones(4)  # a gradient would be lost
        with torch.no_grad(), pytest.raises(zs.ShardedAccessError, match="Linear.weight"):
            layer.weight @ torch.ones(4)
        return [*found, layer.weight.full_tensor()]

    wanted = [values @ torch.ones(4), torch.linalg.matrix_norm(values), values, values.sum(0), values + 1]
    for found in run_threads(2, run):
        for one, other in zip(found, wanted, strict=True):
            same(one.detach(), other, "computed while it is made", 1e-6)


def test_what_is_made_of_a_gathered_parameter_is_cut_afterwards():
    """Ties stay ties, and it is rank 0's."""

    def run(rank):
        with zs.init(stage=3):
            model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
            with torch.no_grad():
                model[0].weight.fill_(2.0)
            with zs.gathered(model[0].weight):
                model[0].scale = model[1].scale = nn.Parameter(model[0].weight.detach() * (1 + rank))
                assert model[0].scale.sum() == 24 * (1 + rank)
            model[1].later = nn.Parameter(torch.ones(4))
        assert model[0].scale is model[1].scale and model[1].later.to_local().numel() == 2
        return model[0].scale.to_local().tolist()

    assert run_threads(2, run) == [[2.0] * 6] * 2
