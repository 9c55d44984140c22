"""`zs.init` around Transformers' real `from_pretrained`: several files, ties, buffers, dtypes; and attributes of parameters.

Compared rank by rank with a plain `from_pretrained` of one process, then by two processes that train what they loaded.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zoo import every_mode, run_threads, same, seeded

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.comm.launch import run_processes

transformers = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 31, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, n_embd=12, n_layer=2, n_head=2, n_positions=16))


def tied_llama():
    """Its rotary table is a buffer that no file holds."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **LLAMA))


def mixtral():
    """Experts are stored one by one, and are one parameter in the model."""
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=3, num_experts_per_tok=1, **LLAMA))


def bert():
    """A bias that is tied as well, and fitted when the head is."""
    config = transformers.BertConfig(
        vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """build -> its class and a folder with it, in several files."""
    found = {}

    def store(build):
        if build not in found:
            model, folder = seeded(build), tmp_path_factory.mktemp(build.__name__)
            model.save_pretrained(folder, max_shard_size="4KB")
            assert len(list(folder.glob("*.safetensors"))) > 2
            found[build] = type(model), folder
        return found[build]

    return store


def assert_slices(model, whole):
    """Every parameter is this rank's slice of `whole`'s, with the same ties; buffers are equal."""
    mine, theirs = (dict(each.named_parameters(remove_duplicate=False)) for each in (model, whole))
    assert list(mine) == list(theirs) and len(set(map(id, mine.values()))) == len(set(map(id, theirs.values())))
    for name, param in mine.items():
        flat = theirs[name].detach().reshape(-1)[param._home.start : param._home.stop]
        same(param.to_local(), flat, name, 0.0)
        assert param.requires_grad is theirs[name].requires_grad, name
    for name, buffer in whole.named_buffers():
        same(model.get_buffer(name), buffer, name, 0.0)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"torch_dtype": "auto"}], ids=str)
@pytest.mark.parametrize("build", [gpt2, tied_llama, mixtral, bert], ids=lambda f: f.__name__)
def test_what_is_loaded_under_init_is_what_is_in_the_files(stored, build, options):
    cls, folder = stored(build)
    whole = cls.from_pretrained(folder, **options)
    for rank in range(3):
        with zs.init(stage=3, comm=FakeComm(rank, 3)):
            model = cls.from_pretrained(folder, **options)
        assert_slices(model, whole)
        held = sum(param.to_local().numel() for param in model.parameters())
        assert held <= sum(param.numel() for param in whole.parameters()) / 3 + 3 * len(list(whole.parameters()))


def test_a_head_that_is_in_no_file_is_drawn_as_on_one_process(stored):
    _, folder = stored(gpt2)
    load = transformers.GPT2ForSequenceClassification.from_pretrained
    whole = seeded(load, folder)
    with zs.init(stage=3, comm=FakeComm(1, 2)):
        model = seeded(load, folder)
    assert_slices(model, whole)


def _train(rank: int, world_size: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """The state after a step by the name of the backend; '': of one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens, found = torch.arange(12).view(2, 6), {}
    load = transformers.LlamaForCausalLM.from_pretrained

    def step(model, optimizer):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    for comm in ("shared", "dist"):
        with zs.init(stage=3, comm=comm):
            model = load(folder)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, comm=comm)
        step(model, optimizer)
        found[comm] = zs.full_state_dict(model)
        zs.close(model)
    plain = load(folder)
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return found | {"": plain.state_dict()}


@pytest.mark.processes
def test_processes_train_what_they_loaded_under_init(stored):
    for found in run_processes(_train, 2, str(stored(tied_llama)[1])):
        for comm in ("shared", "dist"):
            assert list(found[comm]) == list(found[""])
            for name, value in found[""].items():
                same(found[comm][name], value, f"{comm}: {name}", 1e-6)


# -- attributes ------------------------------------------------------------------------------------------------


class Reading(nn.Linear):
    """Reads an attribute of its weight in the forward, and sets another."""

    def forward(self, x):
        self.seen, self.weight.found = self.weight.tag, "in a forward"
        return super().forward(x)


def tagged(module, tag):
    for param in module.parameters():
        param.tag, param._private = tag, [tag]
    return module


@every_mode
@pytest.mark.parametrize("born", ["whole", "sharded", "on meta"])
def test_attributes_stay_with_a_parameter(mode, born):
    def run(rank):
        if born == "sharded":
            with zs.init(stage=3):
                model = nn.Sequential(tagged(Reading(3, 3), "one"), nn.Linear(3, 2))
        else:
            with torch.device("meta" if born == "on meta" else "cpu"):
                model = nn.Sequential(tagged(Reading(3, 3), "one"), nn.Linear(3, 2))
        weight = model[0].weight
        model, _ = zs.shard(model, None, **mode)
        assert model[0].weight is weight and (weight.tag, weight._private) == ("one", ["one"])
        model(torch.ones(1, 3)).sum().backward()
        assert model[0].seen == "one" and weight.found == "in a forward"
        weight.tag = "two"  # at rest
        model(torch.ones(1, 3))
        assert model[0].seen == "two"
        with zs.gathered(model):
            assert (model[0].weight.tag, model[0].weight._private) == ("two", ["one"])
            model[0].weight.tag = "three"
        model(torch.ones(1, 3))
        assert model[0].seen == weight.tag == "three"
        with pytest.raises(AttributeError, match="unknown"):
            _ = weight.unknown
        del model[0].bias.tag
        assert not hasattr(model[0].bias, "tag")
        zs.close(model)
        assert model[0].weight is weight and type(weight) is nn.Parameter
        assert vars(weight) == {"tag": "three", "_private": ["one"], "found": "in a forward"}
        assert vars(model[0].bias) == {"_private": ["one"]} and vars(model[1].weight) == {}

    run_threads(2, run)


def test_one_parameter_that_is_registered_twice_under_init_stays_one():
    given = nn.Parameter(torch.arange(12.0).view(3, 4))
    expected = copy.deepcopy(given)
    with zs.init(stage=3, comm=FakeComm(1, 2)):
        first, second = nn.Linear(4, 3), nn.Linear(4, 3)
        first.weight = second.weight = given
    assert first.weight is second.weight is given
    same(given.to_local(), expected.detach().reshape(-1)[6:], "slice", 0.0)


@pytest.mark.parametrize(
    "value", [torch.arange(16.0).view(4, 4), torch.arange(8.0).view(2, 4), torch.arange(16.0).half().view(4, 4)]
)
def test_data_that_is_assigned_under_init_is_the_value(value):
    """`p.data = value`, whole or computed from the parameter: it was lost."""
    with zs.init(stage=3, comm=FakeComm(1, 2)):
        layer = nn.Linear(4, 4)
        layer.weight.data = value
        layer.weight.data = layer.weight.data * 2
    assert layer.weight.shape == value.shape and layer.weight.dtype == value.dtype
    zs.shard(layer, None, stage=3, comm=FakeComm(1, 2))
    home = layer.weight._home
    same(layer.weight.to_local(), (value * 2).reshape(-1)[home.start : home.stop], "slice", 0.0)
