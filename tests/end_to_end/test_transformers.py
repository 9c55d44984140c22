"""Hugging Face models from small configurations, unchanged: gradients and parameters equal one process's; generate()."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from zoo import Case, check, every_mode, run_threads, same, seeded

import zeroshard as zs
from zeroshard.comm.launch import run_processes

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

SMALL = {"vocab_size": 31, "attn_implementation": "eager"}


def gpt2():
    config = transformers.GPT2Config(
        n_embd=12, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, **SMALL,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


LLAMA = {
    "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16, **SMALL,
}  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def mixtral():
    config = transformers.MixtralConfig(num_local_experts=3, num_experts_per_tok=1, output_router_logits=True, **LLAMA)
    return transformers.MixtralForCausalLM(config)


def t5():
    config = transformers.T5Config(
        d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, **SMALL
    )
    return transformers.T5ForConditionalGeneration(config)


def vit():
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3, attn_implementation="eager",
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def tokens(steps: int = 2, world: int = 2):
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randint(1, 31, (2, 6), generator=generator)  # noqa: E731
    return [[{"input_ids": (x := draw()), "labels": x} for _ in range(world)] for _ in range(steps)]


def images():
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randn(2, 3, 8, 8, generator=generator)  # noqa: E731
    return [[{"pixel_values": draw(), "labels": torch.tensor([0, 2])} for _ in range(2)] for _ in range(2)]


def loss(model, batch):
    return model(**batch).loss


@every_mode
@pytest.mark.parametrize("build", [gpt2, llama, mixtral, t5, vit], ids=lambda f: f.__name__)
def test_hugging_face_models(mode, build):
    # Adam magnifies rounding of gradients that cancel; what differs is at most that
    case = Case(seeded(build).train(), images() if build is vit else tokens(), loss, tolerance=1e-5)
    traces = check(case, **mode)
    assert traces[0].notes.units > 2


@every_mode
def test_gradient_checkpointing_of_transformers(mode):
    model = seeded(llama).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(Case(model, tokens(), loss, tolerance=1e-5), **mode)


@every_mode
def test_bf16_casts_through_model_outputs(mode):
    base = seeded(gpt2)  # here: threads share one generator

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=0.05), precision="bf16", **mode)
        losses = []
        for _ in range(10):
            out = model(**tokens()[0][0])
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(out.loss.item())
        return losses

    for losses in run_threads(2, run):
        assert losses[-1] < 0.5 * losses[0]


@every_mode
@pytest.mark.parametrize("how", ["directly", "gathered"])
def test_generate(mode, how):
    base, prompt = seeded(gpt2).eval(), torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = base.generate(prompt, **options)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(base), None, **mode)
        if how == "directly":
            return model.generate(prompt, **options), zs.report(model)
        with zs.gathered(model):
            return model.generate(prompt, **options), zs.report(model)

    for text, report in run_threads(2, run):
        assert torch.equal(text, wanted)
        if how == "gathered":
            assert report.peak["gathered units"] > 0  # the copies
        else:
            assert report.peak["gathered units"] == 0 or mode["stage"] == 3


def _speak(model, rank: int, **how):
    """Rank 0 ends after 2 tokens, rank 1 after 8."""
    torch.manual_seed(rank)
    prompt = torch.tensor([[5, 6, 7], [3, 2, 9]]) + rank
    return model.generate(input_ids=prompt, max_new_tokens=2 + 6 * rank, pad_token_id=0, eos_token_id=None, **how)


class _Earlier(transformers.LlamaForCausalLM):
    """A model of a release whose generate() does not take `synced_gpus` by name."""

    def generate(self, **kwargs):
        return super().generate(**kwargs, synced_gpus=False)


def _generate_on_processes(rank: int, size: int):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways, found = ({"do_sample": False}, {"do_sample": True, "temperature": 2.0}, {"num_beams": 3, "do_sample": False}), []
    for backend, adapted in itertools.product(("dist", "shared"), (False, True)):
        os.environ["ZEROSHARD_COMM"] = backend
        model = seeded(llama).eval()
        if adapted:
            lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
            model = peft.get_peft_model(model, lora).eval()
        whole = copy.deepcopy(model)
        zs.shard(model, None, stage=3)
        found += [torch.equal(_speak(model, rank, **how), _speak(whole, rank, **how)) for how in ways]
        with zs.gathered(model):  # a rank alone may generate
            found += [torch.equal(_speak(model, 0), _speak(whole, 0))] if rank == 0 else []
        assert "generate" not in vars(zs.close(model))
    return found


@pytest.mark.processes
def test_ranks_generate_texts_of_other_lengths_as_one_process_does():
    first, second = run_processes(_generate_on_processes, 2)
    assert all(first) and all(second) and len(first) == len(second) + 4 == 16


def _generate_where_others_do_not(rank: int, size: int) -> list[int]:
    """Rank 0 has data for one step more than rank 1; then ranks 0 and 1, one copy of the model, have a prompt more than 2 and 3."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.environ["ZEROSHARD_COMM"] = "dist"
    prompt, lengths = torch.tensor([[5, 6, 7]]), []
    model, _ = zs.shard(seeded(llama).eval(), None, stage=3)
    with zs.join(model):
        for step in range(1 if rank else 2):
            with torch.no_grad():
                model(prompt)
            if step:
                lengths.append(model.generate(prompt, max_new_tokens=3, pad_token_id=0, eos_token_id=None).shape[1])
    zs.close(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model, _ = zs.shard(seeded(llama).eval(), None, stage=3, mesh=mesh)
    for _ in range(2 if rank < 2 else 1):  # by position: synced_gpus is the sixth
        out = model.generate(prompt, None, None, None, None, None, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
        lengths.append(out.shape[1])
    return lengths


@pytest.mark.processes
def test_ranks_do_not_wait_for_those_that_do_not_generate():
    assert run_processes(_generate_where_others_do_not, 4) == [[6, 6, 6], [6, 6], [6], [6]]


def test_an_inner_model_without_sharded_parameters_is_copied():
    model, _ = zs.shard(seeded(llama), None, stage=2)
    tokens = torch.arange(6)[None]
    same(copy.deepcopy(model.model)(tokens).last_hidden_state, model.model(tokens).last_hidden_state, "copy", 0)


def _wait_in_vain(rank: int, size: int) -> str:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.environ["ZEROSHARD_COMM"] = "dist"
    model, _ = zs.shard(_Earlier(transformers.LlamaConfig(**LLAMA)).eval(), None, stage=3, stall_timeout_s=3)
    with pytest.raises(RuntimeError) as told:  # gloo's, on the rank that has ended
        _speak(model, rank)
        dist.barrier()
    return str(told.value)


@pytest.mark.processes
def test_where_transformers_can_not_be_told_the_error_names_the_argument_that_helps():
    _, told = run_processes(_wait_in_vain, 2)
    assert "where ranks end at other lengths, pass synced_gpus=True on all of them. no progress for 3 s" in told


@pytest.mark.parametrize("mode", [{"stage": 0}, {"stage": 2}, {"stage": 3}], ids=str)
def test_token_embeddings_are_resized_before_sharding(mode):
    """While it is sharded that is refused before anything is changed; with the size that it has it is done; closed, it is served."""
    base, batch = seeded(gpt2), tokens()[0][0]

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), **mode)
        for same_size in ((), (31,), (None, 31)):
            model.resize_token_embeddings(*same_size)
        for size in ((40,), (31, 8), (None, 8)):
            with pytest.raises(
                zs.ModelChanged, match=r"resize_token_embeddings.*31 rows.*before zs.shard\(\).*zs.close\(model\)"
            ):
                model.resize_token_embeddings(*size)
        model(**batch).loss.backward()
        optimizer.step()
        assert model.config.vocab_size == 31 and zs.full_state_dict(model)["lm_head.weight"].shape == (31, 12)
        if mode["stage"] < 3:  # as others resize
            with pytest.raises(zs.ModelChanged, match=r"transformer.wte.weight was resized from \(31, 12\) to \(40, 12\)"):
                model.transformer.wte.weight.data = torch.zeros(40, 12)
        zs.close(model)
        assert model.resize_token_embeddings(40).weight.shape == (40, 12)
        model, _ = zs.shard(model, None, **mode)
        model(**batch).loss.backward()
        assert "resize_token_embeddings" not in vars(zs.close(model))

    run_threads(2, run)


def test_generate_between_training_steps():
    base, batches = seeded(gpt2), tokens(3)

    def talk(model):
        model.eval()
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
        model.train()

    check(Case(base.train(), batches, loss, tolerance=1e-5, after=talk), stage=3, map_shared=False)


def test_state_dict_keys_and_weights_of_a_hugging_face_model(tmp_path):
    base = seeded(gpt2)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(base), None, stage=3)
        state = zs.full_state_dict(model)
        with zs.gathered(model):
            if rank == 0:
                model.save_pretrained(tmp_path)
        return state

    for state in run_threads(2, run):
        assert list(state) == list(base.state_dict())
        for name, value in base.state_dict().items():
            same(state[name], value, name, 0.0)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for name, value in base.state_dict().items():
        same(loaded.state_dict()[name], value, name, 0.0)
