"""stage="auto": the first choice that fits the memory that is there, the same on all ranks, and said."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zeroshard as zs
from zeroshard.assembly import auto_stage
from zeroshard.comm.fake import FakeComm
from zeroshard.engine.runtime import runtime_of
from zeroshard.errors import ConfigError
from zeroshard.testing import run_threads
from zeroshard.utils.host_memory import Limit

MIB = 1 << 20


def make():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)))  # 2 MiB in fp32
    return model, torch.optim.AdamW(model.parameters())


def train(rank, options):
    """Stage and tiers on one rank, after a step."""
    model, optimizer = make()
    model, optimizer = zs.shard(model, optimizer, stage="auto", **options)
    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    report = zs.report(model)
    return report.stage, sorted(tier for tier, held in report.elsewhere.items() if held)


def choose(monkeypatch, nbytes, ranks=2, **options):
    monkeypatch.setattr(auto_stage, "limits", lambda: [Limit("a test", nbytes, "")])
    return run_threads(ranks, train, options)


@pytest.mark.parametrize(("mib", "stage"), [(60, 1), (15, 2), (14.4, 3)])
def test_the_first_stage_that_fits(monkeypatch, capfd, mib, stage):
    """Of a rank's half two thirds: stage 1 takes 6.0 MiB (of 2 of parameters), stage 2 5.5, stage 3 5.3, mostly for buffers."""
    assert choose(monkeypatch, int(mib * MIB)) == [(stage, [])] * 2
    said = capfd.readouterr().err
    assert said.count("stage='auto'") == 1 and f"stage {stage} takes" in said


def test_states_in_8_bits_are_counted_as_such(monkeypatch):
    """Where fp32 states need stage 2 (above), 8 bits, a quarter of 2 MiB, fit at stage 1."""
    assert choose(monkeypatch, 15 * MIB, optimizer_states="int8") == [(1, [])] * 2


@pytest.mark.parametrize(("gib", "chosen"), [(20, (1, "none")), (1.2, (2, "none")), (0.7, (3, "none")), (0.68, (3, "nvme"))])
def test_large_models_on_imagined_ranks(monkeypatch, tmp_path, gib, chosen):
    """537 MB of parameters over 8 ranks of one host; a disk is used where a folder is given and nothing else fits."""
    monkeypatch.setattr(auto_stage, "limits", lambda: [Limit("a test", int(gib * 8 * 2**30), "")])
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096, bias=False)) for _ in range(8)))
        comm = FakeComm(0, 8, node_size=8)
        model, _ = zs.shard(model, torch.optim.AdamW(model.parameters()), stage="auto", comm=comm, offload_path=str(tmp_path))
        config = runtime_of(model).config
        zs.close(model, restore=False)
    assert (config.stage, config.offload_optimizer.device) == chosen


def test_one_rank_has_nothing_to_shard(monkeypatch):
    assert choose(monkeypatch, 1 << 30, ranks=1) == [(0, [])]


def test_activations_of_a_sample_count(monkeypatch, capfd):
    """1 MiB for a map and one for its ReLU, of a batch of 1,024: what fits without them does not with them."""
    batch = torch.zeros(1024, 256)
    assert choose(monkeypatch, 16 * MIB, sample=torch.zeros(1, 256))[0][0] == 1
    with pytest.raises(ConfigError, match="no stage fits"):
        choose(monkeypatch, 16 * MIB, sample=batch)
    assert "GiB of activations" in capfd.readouterr().err


class OfImages(nn.Linear):
    """A model of which one input is a list of tensors, as of torchvision's detectors."""

    def forward(self, images):
        return torch.stack([super(OfImages, self).forward(image) for image in images])


def test_a_list_is_one_input(capfd):
    model = OfImages(4, 4)
    zs.shard(model, torch.optim.AdamW(model.parameters()), stage="auto", sample=[torch.zeros(2, 4), torch.zeros(2, 4)])
    assert "GiB of activations" in capfd.readouterr().err


def test_nothing_fits_is_said_on_every_rank(monkeypatch):
    with pytest.raises(ConfigError, match="no stage fits.*stage 3.*offload_path="):
        choose(monkeypatch, MIB)


def test_what_it_would_choose_is_not_given(monkeypatch):
    model, optimizer = make()
    with pytest.raises(ConfigError, match="leave out offload_optimizer"):
        zs.shard(model, optimizer, stage="auto", offload_optimizer="cpu")
    with pytest.raises(ConfigError, match="give stage='auto'"):
        zs.shard(model, optimizer, stage=2, sample=torch.zeros(1, 256))
    with pytest.raises(ConfigError, match="forward of it failed on fake tensors"):
        choose(monkeypatch, 60 * MIB, sample=torch.zeros(1, 3))


def test_a_sample_of_another_shape_is_one_sentence(capfd):
    model = nn.Linear(4, 4)
    with pytest.raises(zs.ConfigError, match="sample: the model's forward of it failed"):
        zs.shard(model, torch.optim.AdamW(model.parameters()), stage="auto", sample=torch.zeros(2, 5))
    assert "Traceback" not in capfd.readouterr().err, "torch logs a page of its own"
