"""PEFT in a plain loop: LoRA equals one process at every stage; adapters off, saved, merged."""

import pytest
import torch

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.testing import run_threads

# ./test installs these (requirements/test.txt); absent where the suite runs in an environment of other tools, as on a GPU machine
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
IDS = torch.randint(64, (4, 2, 16), generator=torch.Generator().manual_seed(1))


def lora():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return peft.get_peft_model(
        transformers.GPT2LMHeadModel(config),
        peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0),
    )


torch.manual_seed(5)
WEIGHTS = {name: value + 0.1 for name, value in lora().state_dict().items()}  # LoRA's B begins with zeros


def built():
    model = lora()
    model.load_state_dict(WEIGHTS)
    return model


def trained(model, optimizer, batches):
    for ids in batches:
        for part in ids:
            (model(input_ids=part, labels=part).loss / len(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def reference():
    model = built()
    trained(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), IDS[:2].view(2, 2, 1, 16))
    with torch.no_grad():
        loss = model(input_ids=IDS[2], labels=IDS[2]).loss.item()
        with model.disable_adapter():
            base = model(input_ids=IDS[2], labels=IDS[2]).loss.item()
    adapter = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
    return loss, base, adapter, model.merge_and_unload().state_dict()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lora_equals_one_process(stage, reference):
    def body(rank):
        model = built()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        model, optimizer = zs.shard(model, optimizer, stage=stage)
        trained(model, optimizer, IDS[:2].view(2, 2, 1, 16)[:, rank : rank + 1])
        with torch.no_grad():
            loss = model(input_ids=IDS[2], labels=IDS[2]).loss.item()
            with model.disable_adapter():
                base = model(input_ids=IDS[2], labels=IDS[2]).loss.item()
        adapter = peft.get_peft_model_state_dict(model, state_dict=zs.full_state_dict(model))
        return loss, base, adapter, zs.close(model).merge_and_unload().state_dict()

    for found in run_threads(2, body):
        assert found[:2] == pytest.approx(reference[:2], rel=1e-5)
        for mine, theirs in zip(found[2:], reference[2:], strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5)


# -- AdaLoRA: ranks of adapters from parameters and gradients -----------------------------------------------------------


def adalora():
    config = peft.AdaLoraConfig(
        init_r=4, target_r=2, tinit=0, tfinal=1, deltaT=1, total_step=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0,
    )  # fmt: skip
    model = peft.get_peft_model(lora().unload(), config)
    draw = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "ranknum" not in name:
                param.copy_(torch.randn(param.shape, generator=draw) * 0.2)
    return model


def allocated(model, optimizer, batches):
    for step, ids in enumerate(batches):
        for part in ids:
            (model(input_ids=part, labels=part).loss / len(ids)).backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()


MODES = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "map_shared": False, "offload_optimizer": "cpu"}]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_adalora_allocates_as_on_one_process(mode):
    """From scores of parameters and gradients, which it ranks over all layers."""
    plain, batches = adalora(), IDS.view(4, 2, 1, 16)
    allocated(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01), batches)
    wanted = plain.peft_config["default"].rank_pattern
    assert 0 < sum(map(sum, wanted.values())) < sum(map(len, wanted.values()))

    def body(rank):
        model = adalora()
        model, optimizer = zs.shard(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), **mode)
        allocated(model, optimizer, batches[:, rank : rank + 1])
        return model.peft_config["default"].rank_pattern, zs.full_state_dict(model)

    for pattern, state in run_threads(2, body):
        assert pattern == wanted
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


# -- the adapter of a reference model, switched on by set_adapter ------------------------------------------------------


def with_reference():
    model = lora()
    model.add_adapter("reference", peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0))
    model.set_adapter("default")
    draw = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=draw) * 0.2)
    return model


def distance(model, ids):
    """As TRL: the reference's logits come under no_grad, before the model's own backward."""
    mine = model(input_ids=ids).logits
    model.set_adapter("reference")
    with torch.no_grad():
        theirs = model(input_ids=ids).logits
    model.set_adapter("default")
    return (mine - theirs).square().mean()


@pytest.fixture(scope="module")
def distances():
    model = with_reference()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for ids in IDS:
        parts = [distance(model, part.view(1, 16)) for part in ids]
        (sum(parts) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([part.item() for part in parts])
    return losses, model.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("engine", [False, True], ids=["native", "engine"])
def test_a_reference_adapter_is_switched_on_under_no_grad(engine, stage, distances):
    def body(rank):
        model = with_reference()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        losses = []
        if engine:
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
            call, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            backward, step = call.backward, call.step
        else:
            call, optimizer = zs.shard(model, optimizer, stage=stage)
            backward = lambda loss: loss.backward()  # noqa: E731
            step = lambda: (optimizer.step(), optimizer.zero_grad())  # noqa: E731
        for ids in IDS:
            loss = distance(call, ids[rank : rank + 1])
            backward(loss)
            step()
            losses.append(loss.item())
        return losses, zs.full_state_dict(model)

    losses, weights = distances
    for rank, (mine, state) in enumerate(run_threads(2, body)):
        assert mine == pytest.approx([both[rank] for both in losses], rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
