"""Ranks that write different values into a replicated parameter are told when they next meet; nobody else pays for it."""

import copy

import pytest
import torch
from helpers import MLP, OddGPT, seeded, token_batches
from safetensors.torch import load_file
from torch import nn

import zeroshard as zs
from zeroshard.guard import model_changes
from zeroshard.testing import run_threads

REPLICATED = (0, 1, 2)
(BATCHES,) = token_batches(1, 1, 4)[0]


def ready(rank, stage, base=None, world=2, **options):
    """A model with gradients for a step."""
    model = base or seeded(OddGPT)
    model, optimizer = zs.shard(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), stage=stage, **options
    )
    model(*BATCHES[rank]).backward()
    return model, optimizer


@pytest.mark.parametrize("stage", REPLICATED)
@pytest.mark.parametrize("when", ["step", "clip", "save"])
def test_ranks_that_write_different_values_are_told(stage, when, tmp_path):
    """The parameters and the ranks are named on every rank, nothing has changed, and who writes the same may go on."""

    def run(rank):
        model, optimizer = ready(rank, stage)
        with torch.no_grad():
            model.blocks[1].out.weight.add_(rank // 2)  # ranks 0 and 1 alike
            model.norm.bias.fill_(rank)
            model.head.weight.mul_(0.5)  # alike
        act = {
            "step": optimizer.step,
            "clip": lambda: zs.clip_grad_norm_(model, 1.0),
            "save": lambda: zs.save(str(tmp_path / "saved"), model, optimizer),
        }[when]
        before = copy.deepcopy([p.detach() for p in model.parameters()])
        for _ in range(2):  # also at the next attempt
            with pytest.raises(zs.ModelMismatch) as caught:
                act()
            text = str(caught.value)
            assert "blocks.1.out.weight (ranks 2 hold other values than rank 0), norm.bias (ranks 1, 2 hold" in text, text
            assert "zs.gathered(module, modifier_rank=0)" in text and "head" not in text and "embedding" not in text
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        with torch.no_grad():
            model.blocks[1].out.weight.fill_(0.1)
            model.norm.bias.fill_(0.2)
        act()
        optimizer.step()
        assert not optimizer.last_step.skipped
        return zs.full_state_dict(model)

    first, *others = run_threads(3, run)
    for other in others:
        assert all(torch.equal(value, first[name]) for name, value in other.items())


@pytest.mark.parametrize("stage", REPLICATED)
def test_one_rank_that_writes_alone(stage):
    def run(rank):
        model, optimizer = ready(rank, stage)
        if rank == 1:
            model.blocks[0].gain.data.add_(1)
        with pytest.raises(zs.ModelMismatch, match=r"blocks\.0\.gain \(ranks 1 hold"):
            optimizer.step()

    run_threads(2, run)


@pytest.mark.parametrize("stage", REPLICATED)
def test_a_rank_may_write_what_the_others_have(stage):
    """Broadcasts, by hand or by torch.distributed: some ranks' counters move, the values are the same."""

    def run(rank):
        model, optimizer = ready(rank, stage)
        if rank == 1:
            with torch.no_grad():
                model.head.weight.copy_(model.head.weight.clone())
        optimizer.step()
        return optimizer.last_step.skipped

    assert run_threads(2, run) == [False, False]


@pytest.mark.parametrize("stage", REPLICATED)
def test_a_frozen_parameter_counts_and_is_looked_at_once(stage, monkeypatch):
    looked = []
    checksum = model_changes._checksum
    monkeypatch.setattr(model_changes, "_checksum", lambda tensor: looked.append(1) or checksum(tensor))

    def run(rank):
        base = seeded(OddGPT)
        base.norm.requires_grad_(False)
        model, optimizer = ready(rank, stage, base)
        with torch.no_grad():
            model.norm.weight.fill_(2.0)
        optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            model(*BATCHES[rank]).backward()
            optimizer.step()
        with torch.no_grad():
            model.norm.weight.fill_(rank)
        optimizer.zero_grad()
        model(*BATCHES[rank]).backward()
        seen = len(looked)
        with pytest.raises(zs.ModelMismatch, match="norm.weight"):
            optimizer.step()
        return seen

    assert min(run_threads(2, run)) == 2  # one a rank, when the first came here


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"max_grad_norm": 0.1}, {"offload_optimizer": "cpu"}], ids=str)
@pytest.mark.parametrize("stage", REPLICATED)
def test_nothing_is_read_where_nothing_was_written(stage, options, monkeypatch, tmp_path):
    """Steps, loads, gathered writes and whatever else the library does itself are no writes."""
    if stage == 0 and "offload_optimizer" in options:
        pytest.skip("optimizer states are replicated")
    looked = []
    checksum = model_changes._checksum
    monkeypatch.setattr(model_changes, "_checksum", lambda tensor: looked.append(1) or checksum(tensor))

    def run(rank):
        model, optimizer = ready(rank, stage, **options)
        for _ in range(3):
            optimizer.step()
            optimizer.zero_grad()
            model(*BATCHES[rank]).backward()
        zs.save(str(tmp_path / "saved"), model, optimizer)
        with zs.gathered(model, write=True), torch.no_grad():
            model.norm.weight.fill_(1.5)
        optimizer.step()
        zs.load(str(tmp_path / "saved"), model, optimizer)
        optimizer.zero_grad()
        model(*BATCHES[rank]).backward()
        zs.clip_grad_norm_(model, 1.0)
        optimizer.step()

    run_threads(2, run)
    assert not looked


@pytest.mark.parametrize("tensor", [
    torch.randn(()), torch.randn(3), torch.randn(64), torch.randn(65, 7), torch.randn(1000).bfloat16(), torch.randn(33).double(),
    torch.empty(0),
], ids=lambda t: f"{tuple(t.shape)}-{t.dtype}")  # fmt: skip
def test_every_element_counts(tensor):
    known = model_changes._checksum(tensor)
    assert model_changes._checksum(tensor.clone()) == known
    for index in range(tensor.numel()):
        other = tensor.clone().reshape(-1)
        other[index] += 1
        assert model_changes._checksum(other.view(tensor.shape)) != known


class Renormalises(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 2)

    def forward(self, tokens):
        return self.out(self.emb(tokens)).square().mean()


@pytest.mark.parametrize("stage", REPLICATED)
def test_a_forward_that_writes_what_its_batch_asks_for(stage):
    """Under DDP each rank would keep its own rows for good."""

    def run(rank):
        model = seeded(Renormalises)
        with torch.no_grad():
            model.emb.weight.mul_(10)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters()), stage=stage)
        model(torch.arange(3)).backward()
        optimizer.step()  # of the same tokens
        optimizer.zero_grad()
        model(torch.arange(3) + 3 * rank).backward()
        with pytest.raises(zs.ModelMismatch, match=r"emb\.weight \(ranks 1 .*max_norm"):
            optimizer.step()

    run_threads(2, run)


@pytest.mark.parametrize("masters", [True, "split"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_masters_follow_what_is_written_without_an_optimizer(stage, masters, tmp_path):
    """A model in bf16 that was sharded for inference: what reads masters finds the values that the program has written."""

    def written():
        model = seeded(MLP)
        zs.shard(model, stage=stage, precision="bf16", master_weights=masters)
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.fill_(number)
        return model

    def run(rank):
        read = {
            "dictionary": lambda model: zs.full_state_dict(model, masters=True),
            "stream": lambda model: {k: v for part in zs.stream_full_tensors(model, masters=True) for k, v in part.items()},
            "file": lambda model: [
                zs.save_safetensors(model, tmp_path / "file", dtype=torch.float32),
                load_file(tmp_path / "file"),
            ][1],
            "closed": lambda model: zs.close(model).state_dict(),
            "checkpoint": lambda model: [zs.save(tmp_path, model), restored(model)][1],
        }

        def restored(model):
            zs.close(model)
            fresh = seeded(MLP)
            zs.shard(fresh, stage=stage, precision="bf16")
            zs.load(tmp_path, fresh)
            return zs.full_state_dict(fresh, masters=True)

        names = [name for name, _ in seeded(MLP).named_parameters()]
        for how, look in read.items():
            found = look(written())
            assert [(found[name] == number).all().item() for number, name in enumerate(names)] == [True] * len(names), how

    run_threads(2, run)
