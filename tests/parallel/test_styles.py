"""Styles of tensor parallelism: two ranks compute what one process computes, send what the formula says, and refuse what can not be."""

import copy
from collections import Counter

import pytest
import torch
from tensor_parallel_cells import CELLS, bert, gpt, gpt2, llama, loss_of, mixtral, qwen3, t5
from torch import nn

import zeroshard as zs
from zeroshard import ConfigError, ZeroshardError
from zeroshard.comm.launch import run_processes
from zeroshard.parallel.styles import ParallelStyles, divides, styles_for
from zeroshard.parallel.tensor_parallel import apply
from zeroshard.planner.models.gpt import GPT, GPTConfig
from zeroshard.testing import run_threads

TOLERANCE = 1e-5
LAYERS = 2


@pytest.fixture(scope="module")
def outcomes():
    import tensor_parallel_cells

    return run_processes(tensor_parallel_cells.on_rank, 2)


@pytest.mark.processes
@pytest.mark.parametrize("cell", CELLS)
def test_loss_and_gradients_are_those_of_one_process(outcomes, cell):
    for outcome in outcomes:
        assert not isinstance(outcome[cell], str), outcome[cell]
        loss, gradient, where = outcome[cell]
        assert loss <= TOLERANCE and gradient <= TOLERANCE, f"{cell}: loss {loss}, gradient {gradient} of {where}"


@pytest.mark.processes
@pytest.mark.parametrize("model", ["llama", "gpt2", "gpt"])
def test_what_is_sent(outcomes, model):
    """Megatron's count: an all-reduce after each of the two halves of a block, and one in front of it in backward."""
    forward, both = outcomes[0][f"sent by {model}"]
    ends = {"all_gather_into_tensor": 1}  # logits
    assert forward == {"all_reduce": 2 * LAYERS + 1, **ends}  # and the embedding
    assert both == {"all_reduce": 4 * LAYERS + 2, **ends}  # and the head's input
    forward, both = outcomes[0][f"sent by {model} sequence"]
    halves = {"reduce_scatter_tensor": 2 * LAYERS, "all_gather_into_tensor": 2 * LAYERS}
    ends, both_ends = {"all_gather_into_tensor": 2}, {"all_gather_into_tensor": 3}  # the stack's end, then its beginning
    assert Counter(forward) == Counter(halves) + Counter(ends) + Counter(all_reduce=1)
    assert Counter(both) == Counter(halves) + Counter(halves) + Counter(both_ends) + Counter(all_reduce=2)


# ----------------------------------------------------------------------------------- styles, without processes


@pytest.fixture
def axis():
    """axis(n): the first rank's view of a mesh["tp"] of n ranks, in this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(ranks: int):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))["tp"]

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_model_brings_its_own_plan_and_one_without_any_is_refused():
    own = styles_for(llama())
    assert (
        own.by_name["model.layers.1.self_attn.q_proj"] == "colwise" and own.by_name["model.layers.0.mlp.down_proj"] == "rowwise"
    )
    assert own.by_name["model.embed_tokens"] == "embedding_rowwise" and own.by_name[own.head] == "colwise_gather_output"
    without = llama()
    without.config.base_model_tp_plan = None
    type(without)._tp_plan, kept = None, type(without)._tp_plan
    try:
        with pytest.raises(zs.ConfigError, match="no tensor-parallel styles for LlamaForCausalLM: give some"):
            styles_for(without)
        given = styles_for(without, {"model.layers.*.mlp.up_proj": "colwise"})
        assert given.by_name["model.layers.0.mlp.up_proj"] == "colwise"
    finally:
        type(without)._tp_plan = kept


@pytest.mark.parametrize("inner", [llama, mixtral])
def test_a_model_around_one_that_brings_a_plan_has_the_styles_of_its_layers(inner, axis):
    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.score = inner().model, nn.Linear(32, 1)

    wanted = {name.removeprefix("model."): style for name, style in styles_for(inner()).by_name.items() if "layers" in name}
    model = Reward()
    assert styles_for(model).by_name == {f"backbone.{name}": style for name, style in wanted.items()}
    assert styles_for(model, {"score": None}).by_name == styles_for(model).by_name
    (heads,) = (sentence for sentence in divides(model, 8) if "attention heads" in sentence)
    assert "tp=8 does not divide the 4 attention heads of Reward" in heads
    apply(model, axis(2))
    assert model.backbone.layers[0].self_attn.q_proj.weight._local_tensor.shape == (16, 32)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(inner(), peft.LoraConfig(target_modules=["embed_tokens"]))
    styles = styles_for(adapted).by_name
    assert {f"base_model.model.model.{name}": style for name, style in wanted.items()}.items() <= styles.items()


def test_tables_name_everything_that_is_large():
    """What a family's styles leave whole is small: norms, biases, positions, routers, poolers' maps."""
    known = {mixtral: ["gate"], gpt2: ["wpe"], bert: ["position", "token_type", "transform"], t5: [], gpt: ["position"]}
    for build, whole in known.items():
        model = build()
        styles = styles_for(model).by_name
        for name, param in model.named_parameters():
            owner = name.rpartition(".")[0]
            if param.ndim > 1 and name not in styles and owner not in styles:
                assert any(word in name for word in whole), name


def test_shards_heads_and_ties(axis):
    model = gpt2()
    model.lm_head.weight.note = "kept"
    apply(model, axis(4))
    assert model.transformer.wte.weight.note == "kept"
    attention = model.transformer.h[0].attn
    assert attention.c_attn.weight._local_tensor.shape == (32, 24) and attention.c_attn.weight.shape == (32, 96)
    assert (attention.num_heads, attention.split_size, attention.c_attn.nf) == (1, 8, 24)
    assert model.lm_head.weight is model.transformer.wte.weight and model.lm_head.weight._local_tensor.shape == (12, 32)
    assert not hasattr(model.transformer.h[0].ln_1.weight, "placements")


def test_a_plan_on_a_meta_model_needs_no_values(axis):
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, dim=64, heads=8, layers=1, positions="alibi"))
    apply(model, axis(4), sequence_parallel=True)
    assert model.blocks[0].attention.qkv.weight._local_tensor.shape == (48, 64) and model.blocks[0].attention.heads == 2


def test_what_stands_for_a_module_of_another_stage_is_passed_over(axis):
    model = llama()
    model.model.embed_tokens, model.lm_head = nn.Identity(), nn.Identity()
    del model.model.layers[0]
    mesh = axis(2)
    apply(model, mesh, sequence_parallel=True)
    ours = gpt()
    ours.embedding, ours.head = nn.Identity(), nn.Identity()
    assert styles_for(apply(ours, mesh)).head is None
    assert hasattr(model.model.layers[0].self_attn.q_proj.weight, "placements")
    assert not hasattr(model.model.norm.weight, "placements")


def test_a_copy_of_a_model_that_was_cut(axis):
    model = apply(qwen3(), axis(2), sequence_parallel=True)
    twin = copy.deepcopy(model)
    loss_of(twin).backward()
    assert twin.model.layers[0].self_attn.q_proj.weight.grad is not None
    assert model.model.layers[0].self_attn.q_proj.weight.grad is None


def test_a_plan_of_ones_own_goes_on_top(axis):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    styles = styles_for(model, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    apply(model, axis(2), styles)
    assert model[0].weight._local_tensor.shape == (6, 8) and model[2].weight._local_tensor.shape == (8, 6)
    assert "model.layers.0.mlp.up_proj" not in styles_for(llama(), {"model.layers.*.mlp.*_proj": None}).by_name


def test_one_rank_changes_nothing(axis):
    model = gpt()
    before = dict(model.named_parameters())
    apply(model, axis(1))
    assert all(param is before[name] for name, param in model.named_parameters())


# -------------------------------------------------------------------------------------------------- bad input


WRONG = {
    "tp=3 does not divide the 4 attention heads of LlamaForCausalLM: tp=2 does": (llama, 3, {}),
    "tp=4 does not divide the 2 key-value heads of LlamaForCausalLM: tp=2 does": (llama, 4, {}),
    "tp=8 does not divide the 4 attention heads of GPT2LMHeadModel: tp=4 does": (gpt2, 8, {}),
    "styles: 'model.layers.*.mlp.gate_prj' is no module or parameter of LlamaForCausalLM. Did you mean 'model.layers.": (
        llama, 2, {"styles": {"model.layers.*.mlp.gate_prj": "colwise"}}),
    "there is no style 'columnwise'. Did you mean 'colwise'?": (llama, 2, {"styles": {"lm_head": "columnwise"}}),
    "styles: 'nowhere' is no module or parameter": (llama, 2, {"styles": ParallelStyles({"nowhere": "colwise"})}),
    "model.norm is a LlamaRMSNorm: colwise cuts linear maps": (llama, 2, {"styles": {"model.norm": "colwise"}}),
    "lm_head is a Linear, for which embedding_rowwise is not served": (llama, 2, {"styles": {"lm_head": "embedding_rowwise"}}),
    "wte.weight is tied to that of lm_head, which these styles cut": (gpt2, 2, {"styles": {"transformer.wte": None}}),
    "there are no tensor-parallel styles for Sequential": (lambda: nn.Sequential(nn.Linear(8, 8)), 2, {}),
    "loss_parallel: no style cuts the head": (gpt, 2, {"styles": {"head": None, "embedding": None}, "loss_parallel": True}),
    "loss_parallel can not add a router's loss": (lambda: mixtral(output_router_logits=True), 2, {"loss_parallel": True}),
    "sequence_parallel: model.layers.0.self_attn.q_norm (Qwen3RMSNorm) is in a block and has no style": (
        qwen3, 2, {"styles": {"model.layers.*.self_attn.q_norm": None}, "sequence_parallel": True}),
    "sequence_parallel: no list of blocks": (
        lambda: nn.Sequential(nn.Linear(8, 8)), 2, {"styles": {"0": "colwise"}, "sequence_parallel": True}),
}  # fmt: skip


@pytest.mark.parametrize("sentence", WRONG)
def test_one_sentence_and_nothing_changed(axis, sentence):
    build, ranks, options = WRONG[sentence]
    model = build()
    before = dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(ConfigError) as caught:
        apply(model, axis(ranks), **options)
    assert sentence in str(caught.value), str(caught.value)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_vocabulary_that_does_not_fit_may_stay_whole(axis):
    model = GPT(GPTConfig(vocab_size=49, dim=32, heads=4, layers=1))
    [sentence] = divides(model, 2)
    assert "does not divide the 49 tokens of GPT: tp=1 does. Or leave them whole" in sentence and "pad them to 50." in sentence
    styles = styles_for(model, vocabulary=False)
    assert divides(model, 2, styles) == [] and styles.head is None
    apply(model, axis(2), styles)


def test_every_size_that_does_not_fit_is_told():
    model = llama()
    assert [sentence.split(" does not divide the ")[1].split(" of Llama")[0] for sentence in divides(model, 32)] == [
        "4 attention heads", "2 key-value heads", "40 features between the linear maps (intermediate size)", "48 tokens",
    ]  # fmt: skip
    assert divides(model, 2) == []


def test_models_that_are_cut_or_sharded_already(axis):
    mesh = axis(2)
    model = apply(gpt(), mesh)
    with pytest.raises(ZeroshardError, match="is a DTensor .* already: a model is cut over tp once"):
        apply(model, mesh)

    def on_rank(rank: int) -> None:
        sharded, _ = zs.shard(gpt(), None, stage=1)
        with pytest.raises(ZeroshardError, match="is sharded by zs.shard already"):
            apply(sharded, mesh)

    run_threads(1, on_rank)


def test_old_spellings_of_styles_are_refused_with_the_new_ones(axis):
    with pytest.raises(AttributeError, match="zs.styles_for"):
        zs.plan_for  # noqa: B018
    with pytest.raises(ConfigError, match="plan is now styles"):
        zs.parallelize(gpt(), axis(2), plan={"head": None})
