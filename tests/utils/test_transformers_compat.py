"""Each name of Transformers that is no interface of it: the installed release has it; without it, what needs it is refused by name.

What is recognised by its behaviour goes on under another name.
"""

import copy
import functools
import inspect

import pytest
import torch
from private_names import renamed
from sequence_kit import assert_equals_one_process, batches, model_of, transformers
from torch import nn
from transformers import masking_utils
from transformers.integrations import moe
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

import zeroshard as zs
from zeroshard.activations import router_loss
from zeroshard.engine.runtime import runtime_of
from zeroshard.integrations.deepspeed.ds_config import DeepSpeedConfig
from zeroshard.integrations.deepspeed.shard_options import cast_buffers
from zeroshard.parallel.styles import styles_for
from zeroshard.planner.dry_run import plan
from zeroshard.planner.model_source import group_experts
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.testing import run_threads
from zeroshard.utils import transformers_compat
from zeroshard.utils.releases import KNOWN

PACKED = torch.cat([torch.arange(5), torch.arange(9), torch.arange(2)]).repeat(2, 1)
REFUSED = rf"transformers {transformers.__version__} has no {{}}.*pip install 'transformers{KNOWN['transformers']}'"
SP = {"sp": 2}


def refused(feature: str, name: str):
    return pytest.raises(zs.ConfigError, match=f"{feature}.*{REFUSED.format(name)}")


def on_two_ranks(kind: str, batch: dict | None, **options) -> None:
    """A forward over an axis sp, on each of two ranks."""
    models = [copy.deepcopy(model_of(kind)) for _ in range(2)]

    def on_rank(rank: int) -> None:
        model, _ = zs.shard(models[rank], None, mesh=SP, **options)
        if batch is not None:
            model(**zs.shard_sequence(batch, model))

    run_threads(2, on_rank, timeout_s=60)


@pytest.fixture
def masks(monkeypatch):
    """Transformers' module of masks as it is imported: nothing in it is replaced yet."""
    for name, value in vars(masking_utils).items():
        if isinstance(value, functools.partial):
            monkeypatch.setattr(masking_utils, name, value.__wrapped__)
    transformers_compat._asks_for_packed.cache_clear()
    yield masking_utils
    transformers_compat._asks_for_packed.cache_clear()


@pytest.fixture(autouse=True)
def _registries(monkeypatch):
    """What a test registers lasts as long as the test."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for registry in (AttentionInterface, AttentionMaskInterface, moe.ExpertsInterface):
        monkeypatch.setattr(registry, "_global_mapping", dict(registry._global_mapping))


# -- each name -------------------------------------------------------------------------------------------------------


def has_attention(patch, masks, name="_attn_implementation", owner=transformers.PretrainedConfig):
    assert transformers_compat.attention_of(model_of("llama").config) == "sdpa"
    patch.delattr(owner, name)
    models = [copy.deepcopy(model_of("llama")) for _ in range(2)]

    def on_rank(rank: int) -> None:
        with refused("sequence parallelism", name):
            zs.shard(models[rank], None, mesh=SP)
        zs.close(zs.shard(models[rank], None, stage=3)[0])

    run_threads(2, on_rank, timeout_s=60)


def has_eager_attention(patch, masks):
    attention = model_of("eager").model.layers[0].self_attn
    assert transformers_compat.eager_attention(attention) is modeling_llama.eager_attention_forward
    patch.delattr(modeling_llama, "eager_attention_forward")
    with refused("attn_implementation='eager'", "eager_attention_forward beside LlamaAttention"):
        transformers_compat.eager_attention(attention)


def has_masks(patch, masks):
    """A release whose masks find packed sequences by themselves."""
    find = masks.find_packed_sequence_indices
    patch.setattr(masks, "find_packed_sequence_indices", lambda position_ids, more=None: find(position_ids))
    (batch,) = batches(steps=1)
    with refused("sp: LlamaForCausalLM: the batch has packed sequences", "function of masking_utils, find_packed_sequence"):
        on_two_ranks("llama", batch | {"position_ids": PACKED})
    with refused("a plan of LlamaForCausalLM", "function of masking_utils, find_packed_sequence_indices"):
        plan(functools.partial(copy.deepcopy, model_of("llama")), ranks=2, batch=(2, 8))
    assert_equals_one_process(model_of("llama"), batches(steps=1), SP, stage=2)
    plan(functools.partial(GPT, GPTConfig(vocab_size=16, seq_len=8, dim=8, layers=1, heads=1)), ranks=2, batch=(2, 8))


def has_balancing_loss(patch, masks):
    """A release with another argument, as a helper of the program's has that gets the same logits."""
    loss = inspect.unwrap(modeling_mixtral.load_balancing_loss_func)
    patch.setattr(
        modeling_mixtral, "load_balancing_loss_func", lambda gate_logits, *args, norm=1, **kw: loss(gate_logits, *args, **kw)
    )
    on_two_ranks("mixtral", batches(steps=1)[0] | {"output_router_logits": True})
    models = [copy.deepcopy(model_of("mixtral")) for _ in range(2)]

    def on_rank(rank: int) -> None:
        models[rank].config.output_router_logits = True
        model, _ = zs.shard(models[rank], None, mesh=SP)
        assert any("router's loss: the mean of the ranks' own losses" in note for note in runtime_of(model).schedule.notes)

    run_threads(2, on_rank, timeout_s=60)


def has_experts(patch, masks, name="has_gate"):
    model = copy.deepcopy(model_of("mixtral"))
    experts = model.model.layers[0].mlp.experts
    assert transformers_compat.are_experts(experts) and not transformers_compat.are_experts(model.model.layers[0].mlp)
    delattr(experts, name)
    with refused("experts in tiles, or divided over an axis ep", f"{name} of MixtralExperts"):
        zs.tile(model, max_bytes=1 << 10)
    zs.close(zs.shard(model, None, stage=3)[0])


def has_dense_experts(patch, masks):
    """A model of experts whose layers are all dense."""
    config = copy.deepcopy(model_of("qwen3moe").config)
    config.mlp_only_layers = [0, 1]
    model = type(model_of("qwen3moe"))(config)
    group_experts(copy.deepcopy(model))
    patch.delattr(transformers.PreTrainedModel, "_can_set_experts_implementation")
    with pytest.raises(zs.ConfigError, match="Qwen3MoeForCausalLM: its experts read the routing"):
        group_experts(copy.deepcopy(model))


def has_registry_of_experts(patch, masks):
    patch.delattr(moe, "ExpertsInterface")
    with refused("a plan of a model with experts", "integrations.moe.ExpertsInterface"):
        group_experts(copy.deepcopy(model_of("mixtral")))


def has_gate(patch, masks):
    model = copy.deepcopy(model_of("mixtral"))
    group_experts(model)
    patch.delattr(modeling_mixtral.MixtralExperts, "_apply_gate")
    with refused("a plan of a model with experts", "_apply_gate"):
        model(**batches(steps=1)[0])


def has_initialisation(patch, masks):
    whole = model_of("llama")
    with torch.device("meta"):
        models = [type(whole)(whole.config) for _ in range(2)]
    assert zs.full_state_dict(zs.shard(models[0], None)[0])["lm_head.weight"].std() > 0.01
    for cls in type(models[1]).__mro__:
        if "_init_weights" in vars(cls):
            patch.delattr(cls, "_init_weights")
    with refused("the values of a Transformers model that was made on the meta device", "_init_weights"):
        zs.shard(models[1], None)


def has_names_in_fp32(patch, masks, name="_keep_in_fp32_modules"):
    config = DeepSpeedConfig(
        {
            "train_batch_size": 1, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1},
            "data_types": {"buffer_dtype": "fp16", "keep_in_fp32_modules": "auto"},
        }
    )  # fmt: skip
    model = copy.deepcopy(model_of("llama"))
    setattr(model, name, ["rotary_emb"])
    cast_buffers(config, model)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    delattr(model, name)
    patch.delattr(transformers.PreTrainedModel, name)
    with refused("data_types.keep_in_fp32_modules: 'auto'", name):
        cast_buffers(config, model)


def has_plan_of_heads(patch, masks):
    """Without it the styles of the base model are there, and those of the vocabulary."""
    model = model_of("llama")
    expected = styles_for(model)
    for cls in type(model).__mro__:
        if "_tp_plan" in vars(cls):
            patch.delattr(cls, "_tp_plan")
    assert styles_for(model) == expected and expected.head == "lm_head"


NAMES = {
    "_attn_implementation": has_attention, "is_backend_compatible": functools.partial(has_attention, name="is_backend_compatible", owner=transformers.PreTrainedModel), "eager_attention_forward": has_eager_attention, "masking_utils": has_masks,
    "load_balancing_loss_func": has_balancing_loss, "integrations.moe": has_registry_of_experts, "_apply_gate": has_gate,
    "_can_set_experts_implementation": has_dense_experts,
    **{name: functools.partial(has_experts, name=name) for name in ("_is_expert_parallel", "has_gate", "has_bias", "is_transposed")},
    "_init_weights": has_initialisation, "_keep_in_fp32_modules": has_names_in_fp32,
    "_keep_in_fp32_modules_strict": functools.partial(has_names_in_fp32, name="_keep_in_fp32_modules_strict"),
    "_tp_plan": has_plan_of_heads,
}  # fmt: skip


@pytest.mark.parametrize("name", transformers_compat.NAMES)
def test_without_it_what_needs_it_is_refused_by_name_and_all_else_works(name, monkeypatch, masks):
    NAMES[name](monkeypatch, masks)


# -- what is recognised by its behaviour -----------------------------------------------------------------------------


def test_packed_sequences_are_found_under_another_name(monkeypatch, masks):
    """`renamed` also changes the functions of the module that call it."""
    renamed(monkeypatch, masks, "find_packed_sequence_indices", "indices_of_packed")
    assert_equals_one_process(model_of("mistral"), batches(steps=2, position_ids=PACKED), SP, stage=2)


def test_an_exported_model_sees_packed_sequences_after_another_was_sharded_over_sp(masks):
    on_two_ranks("llama", None)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = copy.deepcopy(model_of("llama", use_cache=False)).eval()

        def forward(self, ids, positions):
            return self.model(input_ids=ids, position_ids=positions).logits

    given = torch.arange(8)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with torch.no_grad():
        exported = torch.export.export(Logits(), given, strict=False).module()
        torch.testing.assert_close(exported(*given), Logits()(*given))


def test_the_routers_loss_is_found_under_another_name(monkeypatch):
    renamed(
        monkeypatch,
        modeling_mixtral,
        "load_balancing_loss_func",
        "balance",
        inspect.unwrap(modeling_mixtral.MixtralForCausalLM.forward),
    )
    model = copy.deepcopy(model_of("mixtral"))
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    assert [(file.__name__, name) for file, name in transformers_compat.balancing_losses(model)] == [
        (modeling_mixtral.__name__, "balance")
    ]
    assert_equals_one_process(model, batches(steps=2), SP, stage=2)
    assert not router_loss._running.values()


@pytest.mark.parametrize("argument", ["q_length", "mask_function"])
def test_arguments_of_masks_under_other_names_are_refused(argument, monkeypatch, masks):
    registry = transformers.AttentionMaskInterface()
    on_two_ranks("llama", None)  # the entries are wrapped from here on
    wrapped = registry["sdpa"]

    def later(**given):
        return wrapped(**{f"new_{name}" if name == argument else name: value for name, value in given.items()})

    later._zeroshard = True
    registry.register("sdpa", later)
    with refused("sequence parallelism", f"{argument} in calls of mask functions"):
        on_two_ranks("llama", batches(steps=1)[0])


def test_a_mask_that_is_left_out_where_it_must_be_made_is_refused(monkeypatch, masks):
    """A release whose mask functions do not know `allow_is_causal_skip`."""
    transformers.AttentionMaskInterface.register("sdpa", lambda **given: None)
    (batch,) = batches(steps=1)
    on_two_ranks("llama", batch)
    with refused("sequence parallelism", "allow_is_causal_skip of mask functions"):
        on_two_ranks("llama", batch | {"position_ids": PACKED})


def test_experts_of_the_programs_own_may_have_some_of_the_attributes():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.has_gate, self.has_bias = 4, True, False

    assert not transformers_compat.are_experts(Experts())


def test_a_switch_of_recomputation_is_seen_by_either_name(monkeypatch):
    model = copy.deepcopy(model_of("llama"))
    assert not transformers_compat.recomputes(model)
    model.model.gradient_checkpointing = True
    assert transformers_compat.recomputes(nn.Sequential(model))
    del model.model.gradient_checkpointing
    monkeypatch.setattr(type(model.model), "is_activation_checkpointing", True, raising=False)
    assert transformers_compat.recomputes(nn.Sequential(model))
