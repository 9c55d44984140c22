"""Sequence parallelism (an axis "sp"): models of Transformers equal one process; masks, bytes, memory, and what is refused."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from helpers import seeding
from mesh_kit import on_ranks
from sequence_kit import (
    HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    Block,
    Plain,
    adam,
    assert_equals_one_process,
    batches,
    compare,
    model_of,
    one_process,
    trained,
    transformers,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads


@pytest.mark.parametrize("mesh", [{"sp": 2}, {"sp": 4}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "eager", "qwen3", "gpt2", "mixtral", "gpt_oss"])
def test_models_equal_one_process(kind, mesh):
    """At sp=4 the two key and value heads are repeated."""
    assert_equals_one_process(model_of(kind), batches(), mesh, stage=3)


@pytest.mark.parametrize("stage", range(4))
def test_dp_beside_sp_equals_one_process_at_every_stage(stage):
    assert_equals_one_process(model_of("llama"), batches(rows=4), {"dp": 2, "sp": 2}, stage=stage, micro=2)


PACKED = torch.cat([torch.arange(5), torch.arange(9), torch.arange(2)]).repeat(2, 1)
LEFT = torch.ones(2, 16, dtype=torch.long)
LEFT[0, :6] = 0
PROMPT = batches(tokens=16)
for each in PROMPT:
    each["labels"][:, :9] = -100  # the first rank along sp has no label at all


@pytest.mark.parametrize("kind", ["llama", "eager", "mistral"])
@pytest.mark.parametrize(
    "data",
    [batches(tokens=15), batches(position_ids=PACKED), batches(tokens=15, position_ids=PACKED[:, :15]), PROMPT, batches(attention_mask=LEFT)],
    ids=["odd length", "packed", "packed and odd", "labels of one rank only", "padding"],
)  # fmt: skip
def test_masks_are_those_of_whole_sequences(kind, data):
    """Mistral's window of 5 tokens reaches over the border between ranks."""
    assert_equals_one_process(model_of(kind), data[:3], {"sp": 2}, stage=2)


RIGHT = LEFT.flip(1)


@pytest.mark.parametrize(
    "kind, more", [("gpt_oss", {"position_ids": PACKED}), ("opt", {"position_ids": PACKED}), ("opt", {"attention_mask": RIGHT})]
)
def test_models_that_do_not_look_for_packed_sequences_attend_over_them_as_in_one_process(kind, more):
    data = batches(steps=3, **more)
    for batch in data if "attention_mask" in more else []:
        batch["labels"][RIGHT == 0] = -100
    assert_equals_one_process(model_of(kind), data, {"sp": 2}, stage=2)


def test_attention_functions_may_be_called_by_names():
    assert_equals_one_process(model_of("afmoe"), batches(steps=1), {"sp": 2}, stage=3)


def test_accumulated_micro_batches_and_checkpointed_blocks_equal_one_process():
    """Recomputation exchanges once more, inside backward. Reentrant checkpoints run the blocks without gradients first."""
    model = copy.deepcopy(model_of("mixtral"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equals_one_process(model.train(), batches(rows=4), {"dp": 2, "sp": 2}, stage=1, micro=2, held=True)
    model = copy.deepcopy(model_of("llama"))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    assert_equals_one_process(model.train(), batches(), {"sp": 2}, stage=3)


def test_lora_equals_one_process():
    peft = pytest.importorskip("peft")
    with seeding(1):
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
        model = peft.get_peft_model(copy.deepcopy(model_of("llama")), lora)
    assert_equals_one_process(model, batches(), {"sp": 2}, stage=3)


def test_bert_labels_stand_for_their_own_tokens():
    """A model that is not causal; 15 tokens over 2 ranks, so that the added one must be masked."""
    model, data = model_of("bert"), batches(tokens=15, steps=3)
    models = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int):
        model, optimizer = zs.shard(models[rank], adam(models[rank]), mesh={"sp": 2}, stage=2)
        losses = []
        for whole in data:
            batch = zs.shard_sequence(whole, model, shift_labels=False)
            count = (batch["labels"] != -100).sum()
            loss = model(**batch).loss
            zs.backward(model, loss, weight=count)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss * count).item() / 30)  # labels of the whole batch
        return losses, zs.full_state_dict(model)

    compare(run_threads(2, on_rank), one_process(model, data))


def test_bf16_equals_one_rank():
    """bf16 rounds sums over the tokens of each rank: losses are equal to 3 digits. The number of labels is not rounded."""
    assert zs.shard_sequence(batches(tokens=276, steps=1)[0], {"sp": 1})["num_items_in_batch"] == 550
    data, runs = batches(rows=2), []
    for mesh in ({"sp": 1}, {"sp": 2}):
        models = [copy.deepcopy(model_of("llama")) for _ in range(mesh["sp"])]
        run = functools.partial(trained, data=data, mesh=mesh, stage=3, precision="bf16")
        results = run_threads(mesh["sp"], lambda rank, run=run, models=models: run(rank, models[rank]))
        runs.append([sum(each) for each in zip(*(result[0] for result in results), strict=True)])
    assert runs[1] == pytest.approx(runs[0], rel=2e-3)


# -- modules that call F.scaled_dot_product_attention ----------------------------------------------------------------


@pytest.mark.parametrize("network", ["shared", "tagged", "ordered"])
@pytest.mark.parametrize("kv, mask", [(4, "causal"), (1, "causal"), (4, "slopes")])
def test_any_module_attends_to_whole_sequences_over_every_network(kv, mask, network):
    with seeding(0):
        model = Plain(kv, mask)
    data, models = batches(rows=2, steps=3), [copy.deepcopy(model) for _ in range(4)]

    def on_rank(rank: int, options: dict):
        return trained(rank, models[rank], data, {"dp": 2, "sp": 2}, stage=3, **options)

    compare(on_ranks(4, network, on_rank), one_process(model, data))


def _on_processes(rank: int, size: int):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    sampler = zs.ShardedSampler(8, mesh=mesh, shuffle=False)
    with pytest.MonkeyPatch.context() as patch:
        found = {}
        for backend in ("shared", "dist"):
            patch.setenv("ZEROSHARD_COMM", backend)
            model = copy.deepcopy(model_of("llama"))
            found[backend] = trained(rank, model, batches(rows=2), {"dp": 2, "sp": 2}, on=mesh, stage=3)
            model = copy.deepcopy(model_of("llama", 6))  # two ranks exchange heads, and keys are gathered
            found[backend, 6] = trained(rank, model, batches(steps=2), {"sp": 4}, stage=3)
    return found, list(sampler), zs.shard_sequence(torch.arange(8).view(1, 8), mesh).flatten().tolist()


@pytest.mark.processes
def test_processes_over_shared_memory_and_gloo_equal_one_process():
    results = run_processes(_on_processes, 4)
    expected = one_process(model_of("llama"), batches(rows=2))
    gathered = one_process(model_of("llama", 6), batches(steps=2))
    for backend in ("shared", "dist"):
        compare([found[backend] for found, _, _ in results], expected)
        compare([found[backend, 6] for found, _, _ in results], gathered)
    assert [samples for _, samples, _ in results] == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2
    assert [tokens for _, _, tokens in results] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def _compiled_on_processes(rank: int, size: int):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = copy.deepcopy(model_of("llama", 3, 1, num_hidden_layers=1))  # keys are gathered: two ranks do not divide the heads
    model.compile(backend="eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROSHARD_COMM", "dist")
        return trained(rank, model, batches(steps=2), {"sp": 2}, stage=3)


@pytest.mark.processes
def test_compiled_models_over_gloo_equal_one_process():
    expected = one_process(model_of("llama", 3, 1, num_hidden_layers=1), batches(steps=2))
    compare(run_processes(_compiled_on_processes, 2), expected)


# -- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_are_those_of_the_formula(size):
    """2 (2 H + 2 K') D bytes a token and layer, of which (n - 1) / n go to other ranks; and 8 bytes a position to each of them."""
    (batch,) = batches(steps=1)
    models = [copy.deepcopy(model_of("llama")) for _ in range(size)]

    def on_rank(rank: int) -> int:
        model, _ = zs.shard(models[rank], None, mesh={"sp": size}, stage=3)
        loss = model(**zs.shard_sequence(batch, model)).loss
        loss.backward()
        assert "sequence parallelism: attention over" in str(zs.report(model))
        return runtime_of(model).tiers.ledger.traffic["all-to-all along sp"].nbytes

    tokens, kv = batch["input_ids"].numel() // size, max(2, size)
    activations = 4 * 2 * LAYERS * (2 * HEADS + 2 * kv) * (WIDTH // HEADS) * tokens * (size - 1) // size
    assert run_threads(size, on_rank) == [activations + 8 * tokens * (size - 1)] * size


@pytest.mark.parametrize("size", [2, 4])
def test_activations_of_a_rank_are_one_part_of_those_of_one_process(size):
    (batch,) = batches(tokens=64, steps=1)
    models = [copy.deepcopy(model_of("gpt2")) for _ in range(size)]

    def on_rank(rank: int) -> int:
        model, _ = zs.shard(models[rank], None, mesh={"sp": size}, stage=0)
        return saved_nbytes(model, zs.shard_sequence(batch, model))

    whole = saved_nbytes(copy.deepcopy(model_of("gpt2")), batch)
    for found in run_threads(size, on_rank):
        assert found == pytest.approx(whole / size, rel=0.05)


def saved_nbytes(model: nn.Module, batch: dict) -> int:
    """Bytes that autograd keeps from a forward to its backward, parameters and masks apart."""
    found = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter) and tensor.grad_fn is not None:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    return sum(found.values())


# -- what is refused -----------------------------------------------------------------------------------------------


def refused(world: int, body, match: str) -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises(zs.ConfigError, match=match):
            body(rank)
        return "refused"

    assert run_threads(world, on_rank) == ["refused"] * world


def test_models_that_do_not_fit_are_refused_before_any_change():
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=1, n_head=4)
    bloom = [transformers.BloomForCausalLM(config) for _ in range(2)]
    refused(
        2, lambda rank: zs.shard(bloom[rank], None, mesh={"sp": 2}), "does not take its attention from Transformers' registry"
    )
    assert all(not hasattr(model, "_zeroshard") for model in bloom)
    encoder = [nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True) for _ in range(2)]

    def encode(rank: int) -> None:
        wrapped = nn.Sequential(encoder[rank])
        wrapped.__class__ = type("Encoder", (nn.Sequential,), {"__module__": "program"})
        model, _ = zs.shard(wrapped, None, mesh={"sp": 2})
        model(torch.zeros(1, 4, WIDTH))

    refused(2, encode, "nn.MultiheadAttention computes its attention without leaving a place")


def test_ranks_that_give_different_meshes_are_told_before_any_change():
    models = [copy.deepcopy(model_of("llama")) for _ in range(4)]

    def on_rank(rank: int) -> None:
        mesh = {"sp": 2, "dp": 2} if rank < 2 else {"dp": 2, "sp": 2}
        with pytest.raises(zs.ModelMismatch, match=r"rank 0: mesh=\{'sp': 2, 'dp': 2\}.*rank 2: mesh=\{'dp': 2, 'sp': 2\}"):
            zs.shard(models[rank], None, mesh=mesh)
        assert not hasattr(models[rank], "_zeroshard")

    run_threads(4, on_rank, timeout_s=60)


TINY = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8, "vocab_size": VOCAB}
UNSUITED = {
    "LlamaForSequenceClassification": "computes its output from one token of a sequence, or from all",
    "LlamaForQuestionAnswering": "computes its output from one token of a sequence, or from all",
    "RobertaForMaskedLM": "counts the tokens that are no padding from its padding_idx on",
    "EsmForMaskedLM": "counts the tokens that are no padding from its padding_idx on",
    "MobileBertForMaskedLM": "has trigram_input, by which tokens read others outside of attention",
}


@pytest.mark.parametrize("kind", UNSUITED)
def test_models_whose_tokens_meet_outside_of_attention_are_refused(kind):
    options = TINY | {"pad_token_id": 1} | ({"embedding_size": 8} if "Mobile" in kind else {})
    with torch.device("meta"):
        models = [(cls := getattr(transformers, kind))(cls.config_class(**options)) for _ in range(2)]
    refused(2, lambda rank: zs.shard(models[rank], None, mesh={"sp": 2}), f"sp: {kind} {UNSUITED[kind]}.* over dp and tp")


def test_padding_before_tokens_is_refused_where_a_model_counts_positions_without_it():
    models, data = [copy.deepcopy(model_of("opt")) for _ in range(2)], batches(steps=1, attention_mask=LEFT)

    def run(rank: int) -> None:
        model, _ = zs.shard(models[rank], None, mesh={"sp": 2})
        model(**zs.shard_sequence(data[0], model))

    refused(2, run, "sp: OPTForCausalLM counts positions without padding, and there is padding before tokens: pad on the right")


@pytest.mark.parametrize("network", ["shared", "tagged"])
def test_ranks_with_unequally_many_tokens_are_refused(network):
    models = [[copy.deepcopy(model_of("llama")), Plain()] for _ in range(2)]

    def on_rank(rank: int, options: dict) -> None:
        own = torch.arange(8)[None] if rank == 0 else torch.arange(8, 15)[None]
        for each in models[rank]:
            model, _ = zs.shard(each, None, mesh={"sp": 2}, stage=2, **options)
            with pytest.raises(
                zs.ConfigError, match=r"of different shapes \(rank 0: \(1,.* 8.*, rank 1: \(1,.* 7.* by zs.shard_sequence"
            ):
                model(input_ids=own, labels=own, position_ids=own)

    on_ranks(2, network, on_rank)


def test_batches_that_ranks_see_differently_or_that_are_not_cut_are_refused():
    models = [copy.deepcopy(model_of("llama")) for _ in range(4)]
    (batch,) = batches(steps=1)

    def run(rank: int) -> None:
        model, _ = zs.shard(models[rank], None, mesh={"sp": 2})
        with pytest.raises(zs.ConfigError, match="the batch has no position_ids.* zs.shard_sequence"):
            model(**batch)
        for cache in (True, False):
            with pytest.raises(zs.ConfigError, match=r"generation needs the whole model and sequence: zs.close\(model\) first"):
                model.generate(batch["input_ids"], use_cache=cache, max_new_tokens=2)
        with pytest.raises(zs.ConfigError, match="expected a mapping with input_ids, or a tensor, got tuple"):
            zs.shard_sequence((batch["input_ids"], batch["labels"]), model)
        with pytest.raises(zs.ConfigError, match=r"attention_mask: expected shape \(2, 16\)"):
            zs.shard_sequence(batch | {"attention_mask": torch.ones(2, 1, 16, 16)}, model)
        zs.shard_sequence(batch if rank == 0 else batch | {"input_ids": batch["input_ids"] + 1}, model)

    refused(2, run, r"sp: ranks along it have different input_ids .*ShardedSampler\(len\(dataset\), mesh=mesh\)")
    refused(2, lambda rank: zs.shard(models[2 + rank], None, mesh={"dp": 3, "sp": 2}), "product is the number of ranks, 2")
    refused(2, lambda rank: zs.shard(models[2 + rank], None, mesh={"tp": 2}), "Axes that cut parameters need process groups")
    refused(2, lambda rank: zs.ShardedSampler(4, rank=0, world_size=1, mesh={"sp": 2}), "give one of them")


def test_a_loader_is_cut_and_a_closed_model_is_as_before(capsys):
    models = [copy.deepcopy(model_of("eager")) for _ in range(2)]
    data = batches(steps=2)

    def on_rank(rank: int):
        model, _ = zs.shard(models[rank], None, mesh={"sp": 2}, stage=3)
        loader = zs.SequenceLoader(data, model)
        with torch.no_grad():
            parts = [model(**batch).logits for batch in copy.copy(loader)]
        zs.close(model)
        with torch.no_grad():
            return len(loader), parts, [model(input_ids=batch["input_ids"]).logits for batch in data]

    (count, left, whole), (_, right, _) = run_threads(2, on_rank)
    assert count == 2 and models[0].config._attn_implementation == "eager"
    for pair in zip(left, right, whole, strict=True):
        torch.testing.assert_close(torch.cat(pair[:2], dim=1), pair[2])
    run_threads(2, lambda rank: zs.shard(nn.Linear(2, 2), None, mesh={"sp": 2})[0](torch.zeros(1, 2)))
    assert "each token is computed without those of other ranks" in capsys.readouterr().err


# -- forwards that end in another way --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "plain"])
def test_after_an_interrupted_forward_models_attend_as_before(kind):
    """torch runs no forward hooks after KeyboardInterrupt."""
    with seeding(0):
        model = Plain() if kind == "plain" else model_of(kind)
    models, (batch,) = [copy.deepcopy(model) for _ in range(2)], batches(steps=1)
    if kind == "llama":
        batch["attention_mask"] = LEFT
    with torch.no_grad():
        expected = model(**batch).loss if kind == "llama" else model(**batch)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def on_rank(rank: int) -> list[torch.Tensor]:
        model, _ = zs.shard(models[rank], None, mesh={"sp": 2}, stage=2)
        own = zs.shard_sequence(batch, model)
        first = model.blocks[1] if kind == "plain" else model.model.layers[1]
        handle = first.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**(own | {"attention_mask": None} if kind == "llama" else own))
        handle.remove()
        with torch.no_grad():
            sharded = model(**own)
            zs.close(model)
            whole = model(**batch)
        return [out.loss if kind == "llama" else out for out in (sharded, whole)]

    (left, _), (right, whole) = run_threads(2, on_rank, timeout_s=60)
    torch.testing.assert_close((left + right) / 2, expected)
    torch.testing.assert_close(whole, expected)


def test_after_a_pre_hook_that_raised_modules_attend_as_before():
    """torch runs forward hooks then, and no further pre-hooks."""
    with seeding(0):
        model = Block(4, "causal")
    failing, given = set(), torch.randn(1, 8, WIDTH)
    models, expected = [copy.deepcopy(model) for _ in range(2)], model(given)

    def on_rank(rank: int) -> torch.Tensor:
        def fail(*_: object) -> None:
            if rank in failing:
                failing.remove(rank)
                raise ValueError("the program's")

        models[rank].register_forward_pre_hook(fail)
        model, _ = zs.shard(models[rank], None, mesh={"sp": 2}, stage=2)
        model(given.chunk(2, dim=1)[rank])
        failing.add(rank)
        with pytest.raises(ValueError, match="the program's"):
            model(given.chunk(2, dim=1)[rank])
        return model(given.chunk(2, dim=1)[rank])

    torch.testing.assert_close(torch.cat(run_threads(2, on_rank, timeout_s=60), dim=1), expected)
