"""Checkpoints that are damaged or of something else, and calls that not all ranks make (B03, B08, B10, B12, C10, C11).

The rule is the same throughout: every rank raises the same error, which names the thing and the way on, and the model, the
optimizer, its groups and the random generators are what they were.
"""

import errno
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_kit import (
    MODELS,
    VOCAB,
    Language,
    LowRank,
    assert_equal,
    build,
    read_checkpoint,
    snapshot,
    train,
    write_checkpoint,
)
from helpers import OddGPT, seeded, token_batches
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zeroshard as zs
from zeroshard import fsdp
from zeroshard.checkpoint import safetensors as weights
from zeroshard.engine.comm.control import misuse
from zeroshard.engine.ledger import GATHERED
from zeroshard.engine.runtime import runtime_of
from zeroshard.state.tensor_reader import StoredTensor
from zeroshard.testing import run_threads
from zeroshard.tiers.io.async_file import Syscalls

pytestmark = pytest.mark.limit(60)
BATCHES = [step[0] for step in token_batches(8, 1, 4, VOCAB)]


def refused(root: Path, kind: type, *, world: int = 2, model: str | nn.Module = "tied", **options) -> zs.CheckpointError:
    """Loading it raises this on every rank, with the same words; nothing changes, and the model trains on."""

    def rank_run(rank: int) -> zs.CheckpointError:
        module, optimizer = build(model, seed=5, **options)
        batches = BATCHES if isinstance(model, (str, OddGPT)) else [[(torch.ones(2, 33),)]] * 3
        train(module, optimizer, rank, batches[:1])
        before, generator = snapshot(module, optimizer), torch.get_rng_state()
        with pytest.raises(kind) as caught:
            zs.load(root, module, optimizer)
        assert torch.equal(torch.get_rng_state(), generator)
        assert_equal(snapshot(module, optimizer), before, "nothing may have changed")
        assert runtime_of(module).progress.steps == 1
        train(module, optimizer, rank, batches[1:2])
        zs.close(module)
        return caught.value

    errors = run_threads(world, rank_run)
    assert len({str(error) for error in errors}) == 1, errors
    return errors[0]


# -- B03: not all ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["save", "load"])
@pytest.mark.parametrize("meanwhile", ["trains", "evaluates", "exchanges"])
def test_b03_a_call_by_one_rank_only_is_named_on_every_rank(verb, meanwhile, tmp_path):
    """What is collective, who entered it, and who is missing."""

    def rank_run(rank: int) -> str:
        model, optimizer = build("tied", stage=3, map_shared=False, stall_timeout_s=8.0)
        zs.save(tmp_path, model, optimizer, name="x")
        with pytest.raises(zs.ZeroshardError) as caught:
            if rank == 0:
                getattr(zs, verb)(tmp_path, model, optimizer)
            elif meanwhile == "trains":
                train(model, optimizer, rank, BATCHES[:2])
            elif meanwhile == "evaluates":
                with torch.no_grad():
                    model(*BATCHES[0][rank])
                runtime_of(model).comm.fence_write()
            else:
                runtime_of(model).comm.exchange(b"", "something else")
        return str(caught.value)

    for text in run_threads(3, rank_run):
        assert f"zs.{verb}() is collective, that is, every rank must call it: entered by ranks [0], missing [1, 2]" in text, text


def test_b03_ranks_in_different_places_of_one_call_are_no_misuse():
    assert misuse({0: "zs.save: begin", 1: "zs.save: folder"}, 2) == "" and misuse({0: "step", 1: "forward"}, 2) == ""
    assert misuse({0: "step", 2: "zs.load: find"}, 3).endswith("zs.load() is collective, that is, every rank must call it: "
                                                               "entered by ranks [2], missing [0, 1].")  # fmt: skip


# -- B08: damage -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with two checkpoints of three ranks."""
    root = tmp_path_factory.mktemp("pair")
    for name in ("first", "second"):
        write_checkpoint(root, 3, "tied", BATCHES[:1], save_name=name, save_extra={"note": "x" * 100})
    return root


@pytest.fixture
def damaged(pair, tmp_path):
    """A copy of it to be damaged."""
    shutil.copytree(pair, tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    stamp = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


@pytest.mark.parametrize("where", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", ["rank-00000.distcp", "rank-00002.distcp", ".metadata", "manifest.json"])
def test_b08_one_flipped_bit_in_any_file_is_found(name, where, damaged):
    path = damaged / "second" / name
    flip(path, int(where * (path.stat().st_size - 1)))
    error = refused(damaged, zs.CheckpointCorrupt)
    assert error.file == str(path) and error.offset == 0  # all are shorter than a block of checksums
    assert "checksum" in error.expected and "checksum" in error.actual and error.expected != error.actual
    assert f"The complete checkpoint before it: {damaged / 'first'}" in str(error)
    assert read_checkpoint(damaged, load_name="first")


def test_b08_every_byte_counts(damaged):
    """Also those between tensors: a file is what was written or it is not."""
    path = damaged / "second" / "rank-00001.distcp"
    model, optimizer = build("tied")
    before = snapshot(model, optimizer)
    size = path.stat().st_size
    for at in range(0, size, size // 23):
        flip(path, at)
        with pytest.raises(zs.CheckpointCorrupt, match="rank-00001"):
            zs.load(damaged, model, optimizer)
        flip(path, at)
    assert_equal(snapshot(model, optimizer), before)
    zs.load(damaged, model, optimizer)
    zs.close(model)


def test_b08_offsets_are_those_of_the_block(tmp_path):
    model = nn.Linear(700, 700)
    write_checkpoint(tmp_path, 1, model, save_name="x")
    flip(tmp_path / "x" / "rank-00000.distcp", (1 << 20) + 77)
    with pytest.raises(zs.CheckpointCorrupt) as caught:
        read_checkpoint(tmp_path, 2, model)
    assert caught.value.offset == 1 << 20 and "There is none before it" in str(caught.value)


@pytest.mark.parametrize("how", ["truncated", "longer", "empty", "missing"])
@pytest.mark.parametrize("name", ["rank-00001.distcp", ".metadata"])
def test_b08_a_file_of_another_length_is_refused_without_reading(name, how, damaged):
    path = damaged / "second" / name
    size = path.stat().st_size
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, {"truncated": size - 1, "longer": size + 1, "empty": 0}[how])
    error = refused(damaged, zs.CheckpointCorrupt)
    assert error.file == str(path) and error.expected == f"{size:,} bytes"
    assert (
        error.actual
        == {"missing": "no file", "truncated": f"{size - 1:,} bytes", "longer": f"{size + 1:,} bytes", "empty": "0 bytes"}[how]
    )
    assert error.offset == {"missing": 0, "truncated": size - 1, "longer": size, "empty": 0}[how]
    assert str(damaged / "first") in str(error)


@pytest.mark.parametrize("how", ["truncated", "empty", "not ours"])
def test_b08_a_damaged_manifest_is_told(how, damaged):
    path = damaged / "second" / "manifest.json"
    content = {"truncated": path.read_bytes()[:-40], "empty": b"", "not ours": b"{}\n"}[how]
    path.write_bytes(content)
    error = refused(damaged, zs.CheckpointCorrupt)
    assert error.file == str(path)


def test_without_a_manifest_a_folder_is_no_checkpoint(damaged):
    (damaged / "second" / "manifest.json").unlink()
    model, optimizer = build("tied")
    assert zs.load(damaged, model, optimizer).path == damaged / "first"
    zs.close(model)


def test_unverified_loads_still_check_sizes(damaged):
    os.truncate(damaged / "second" / "rank-00001.distcp", 100)
    with pytest.raises(zs.CheckpointCorrupt, match="expected .* bytes, found 100 bytes"):
        read_checkpoint(damaged, load_verify=False)


# -- in the middle of reading ------------------------------------------------------------------------------------------


def failing_reads(monkeypatch: pytest.MonkeyPatch, rank: int, after: int) -> list[bool]:
    """The disk of one rank fails at its read number `after` of those behind all checks, as long as the answer is [True]."""
    armed, streaming, left = [True], threading.local(), [after]
    plain_stream, plain_parts = weights.stream, StoredTensor.parts

    def stream(*args) -> None:
        streaming.on = True
        plain_stream(*args)

    def parts(self, start, out):
        mine = threading.current_thread().name in (f"rank{rank}", "MainThread")
        if armed[0] and mine and getattr(streaming, "on", False) and out.numel():
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
        return plain_parts(self, start, out)

    monkeypatch.setattr(weights, "stream", stream)
    monkeypatch.setattr(StoredTensor, "parts", parts)
    return armed


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("after", [0, 4, 15])
def test_a_model_that_was_half_loaded_refuses_until_it_is_loaded(after, world, pair, monkeypatch):
    """The disk fails on the last rank after all checks: every rank says so, and none computes with a mixture."""
    expected = read_checkpoint(pair, world)[0]
    armed = failing_reads(monkeypatch, world - 1, after)

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied", seed=5)
        with pytest.raises(zs.CheckpointError, match=f"rank {world - 1}, reading .*: .*Input/output error"):
            zs.load(pair, model, optimizer, verify="before")
        runtime_of(model).comm.exchange(b"", "all have seen it")
        armed[0] = False
        for use in (lambda: model(*BATCHES[0][rank]), lambda: zs.save(pair, model, optimizer)):
            with pytest.raises(zs.CheckpointError, match="could not be loaded to its end.*load a checkpoint again"):
                use()
        zs.load(pair, model, optimizer)
        assert_equal(snapshot(model, optimizer), expected)
        train(model, optimizer, rank, BATCHES[1:2])
        zs.close(model)

    run_threads(world, rank_run)


@pytest.mark.parametrize("world", [1, 2])
def test_an_error_while_reading_on_the_way_changes_nothing(world, pair, monkeypatch):
    plain = Syscalls.preadv

    def preadv(self, file, buffers, offset):
        if file.path.endswith("rank-00001.distcp"):  # in the direct reads, after the small values have been read
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(self, file, buffers, offset)

    monkeypatch.setattr(Syscalls, "preadv", preadv)

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied", seed=5)
        before = snapshot(model, optimizer)
        with pytest.raises(zs.CheckpointError, match="Nothing was changed"):
            zs.load(pair, model, optimizer)
        assert_equal(snapshot(model, optimizer), before)
        train(model, optimizer, rank, BATCHES[1:2])
        zs.close(model)

    run_threads(world, rank_run)


# -- B10: something else -----------------------------------------------------------------------------------------------


class Other(OddGPT):
    """Not the model that was saved: a renamed part, a new one, one less, another width, another buffer."""

    def __init__(self) -> None:
        super().__init__(dim=7, layers=1, vocab_size=VOCAB, tied=False)
        self.final_norm = self.norm
        del self.norm
        self.head = nn.Linear(7, VOCAB + 1)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("fresh", torch.zeros(1))

    def forward(self, tokens, targets):
        self.norm = self.final_norm
        return super().forward(tokens, targets)


@pytest.mark.parametrize("world", [1, 3])
def test_b10_another_architecture_is_refused_with_every_difference(world, pair):
    model = seeded(Other)
    model.forward = None  # not used: `norm` would be registered twice
    text = ""

    def rank_run(rank: int) -> str:
        module, optimizer = build(model)
        before = snapshot(module, optimizer)
        with pytest.raises(zs.CheckpointMismatch) as caught:
            zs.load(pair, module, optimizer)
        assert_equal(snapshot(module, optimizer), before)
        zs.close(module)
        return str(caught.value)

    texts = run_threads(world, rank_run)
    assert len(set(texts)) == 1
    text = texts[0]
    for missing in (
        "final_norm.weight (7,) Did you mean 'norm.weight'?",
        "final_norm.bias (7,)",
        "head.bias (12,)",
        "fresh (1,) (buffer)",
    ):
        assert f"missing (the model has it, the checkpoint not): {missing}" in text, text
    unexpected = re.findall(r"unexpected: (\S+) (\(.*\))", text)
    block = {n for n in seeded(MODELS["tied"]).state_dict() if n.startswith("blocks.1.")}
    assert {name for name, _ in unexpected} == block | {"norm.weight", "norm.bias"}, text
    assert ("blocks.1.into.weight", "(31, 7)") in unexpected
    mismatched = set(re.findall(r"of another shape: (.*)", text))
    assert mismatched == {"head.weight: saved (11, 7), wanted (12, 7)", "seen: saved (), wanted (2,) (buffer)"}
    assert "nothing was changed" in text


def test_b10_another_optimizer_is_refused_and_the_model_alone_loads(pair):
    error = refused(pair, zs.CheckpointMismatch, optimizer="momentum")
    assert "optimizer: saved AdamW, wanted SGD: load it with optimizer=None" in str(error)
    error = refused(pair, zs.CheckpointMismatch, groups=2)
    assert "optimizer: saved 1 parameter groups, wanted 2" in str(error)


def test_b10_groups_with_other_members_are_refused(tmp_path):
    write_checkpoint(tmp_path, 2, "tied", groups=2)

    def rank_run(rank: int) -> None:
        model = seeded(MODELS["tied"])
        params = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:]}])
        model, optimizer = zs.shard(model, optimizer)
        with pytest.raises(zs.CheckpointMismatch, match="optimizer group 0: .* members differ, first"):
            zs.load(tmp_path, model, optimizer)
        zs.close(model)

    run_threads(1, rank_run)


# -- B12, C10, C11: frozen bases ---------------------------------------------------------------------------------------

ONES = [[(torch.randn(4, 33, generator=torch.Generator().manual_seed(rank)),) for rank in range(4)]] * 4


@pytest.fixture
def adapters(tmp_path):
    """A checkpoint of trained matrices over a frozen base, and what was saved."""
    model = seeded(LowRank)
    return model, tmp_path, write_checkpoint(tmp_path, 3, model, ONES[:2])


def with_other_adapters(model: nn.Module) -> nn.Module:
    other = seeded(LowRank, 9)
    other.base.load_state_dict(model.base.state_dict())
    return other


def test_c11_only_what_is_trained_is_saved(adapters):
    """Less than three times what the trained parameters and their two moments take; none of the base, and none empty."""
    model, root, saved = adapters
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    (path,) = root.glob("step-*")
    nbytes = sum(file.stat().st_size for file in path.glob("*.distcp"))
    states = sum(12 * param.numel() for param in trained.values())
    headers = 3 * len(trained) * 3 * 1100 + 3 * 20_000  # of each tensor's blob on each rank; of random generators and objects
    assert states < nbytes < 3 * states + headers
    from torch.distributed.checkpoint import FileSystemReader

    names = {
        n.removeprefix("model.") for n in FileSystemReader(path).read_metadata().state_dict_metadata if n.startswith("model.")
    }
    assert names == trained.keys()
    for got in read_checkpoint(root, 2, with_other_adapters(model)):
        assert_equal(got, saved)


def test_c11_a_merge_gathers_one_block_at_a_time(tmp_path):
    """Base and trained matrices become one, layer by layer; the export of that holds what one process computes."""
    model = seeded(LowRank)
    with torch.no_grad():  # as after some training
        for up in model.up:
            up.weight.normal_(generator=torch.Generator().manual_seed(3))
    merged = {f"{n}.weight": (model.base[n].weight + model.up[n].weight @ model.down[n].weight).detach() for n in range(3)}
    biases = {f"{n}.bias": model.base[n].bias.detach().clone() for n in range(3)}

    def body(rank):
        mine = seeded(LowRank)
        mine.load_state_dict(model.state_dict())
        mine, _ = zs.shard(mine, None, stage=3, units="leaf")
        block = sum(
            4 * unit.groups[0].layout.numel for unit in runtime_of(mine).units if unit.name in ("base.0", "down.0", "up.0")
        )
        ledger = runtime_of(mine).tiers.ledger
        ledger.peak.clear()
        for base, down, up in zip(mine.base, mine.down, mine.up, strict=True):
            with zs.gathered(down), zs.gathered(up):
                update = up.weight @ down.weight
            with torch.no_grad(), zs.gathered(base, write=True):
                base.weight += update
        peak = ledger.peak[GATHERED]
        zs.save(tmp_path / "merged", mine, trained_only=False)
        zs.close(mine)
        return peak, block

    for peak, block in run_threads(4, body):
        assert 0 < peak <= 2 * block, (peak, block)  # a unit as it is gathered, and the copy of it that may be written
    zs.export(tmp_path / "merged", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in (merged | biases).items():
        assert torch.equal(found[f"base.{name}"], value), name


@pytest.mark.parametrize("world", [1, 2, 4])
def test_b12_another_base_is_refused(world, adapters):
    model, root, _ = adapters
    other = with_other_adapters(model)
    with torch.no_grad():
        other.base[1].weight[3, 4] += 1e-6
    error = refused(root, zs.BaseModelMismatch, world=world, model=other)
    saved, mine = re.search(r"base\.1\.weight: saved ([0-9a-f]{16}), this model ([0-9a-f]{16})", str(error)).groups()
    assert saved != mine and "1 of 6 parameters that it leaves out differ" in str(error)


def test_b12_rows_that_changed_places_are_another_base(adapters):
    model, root, _ = adapters
    other = with_other_adapters(model)
    with torch.no_grad():
        other.base[0].weight.copy_(model.base[0].weight.flip(0))
    assert "base.0.weight" in str(refused(root, zs.BaseModelMismatch, model=other))


@pytest.mark.parametrize("tiled", ["when saved", "when loaded"])
def test_b12_the_same_base_in_other_tiles_is_told_as_that(tiled, tmp_path):
    model = seeded(LowRank)
    saved, loaded = model, with_other_adapters(model)
    zs.tile(saved if tiled == "when saved" else loaded, max_bytes=1200)
    write_checkpoint(tmp_path, 2, saved, save_name="x")
    with pytest.raises(
        zs.BaseModelMismatch, match=r"base\.0\.weight.*: saved in other tiles: zs.tile this model as that one was"
    ):
        read_checkpoint(tmp_path, 2, loaded)


@pytest.mark.parametrize(
    "saved, loaded", [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp16"), ("fp16", "fp32"), ("bf16", "bf16")]
)
def test_b12_the_same_base_in_another_precision_is_known(saved, loaded, tmp_path):
    """And another one is not: a difference that survives the rounding."""
    model = seeded(LowRank)
    expected = write_checkpoint(tmp_path, 2, model, save_name="x", precision=saved)
    for got in read_checkpoint(tmp_path, 3, with_other_adapters(model), precision=loaded):
        trained = {name: value for name, value in got.weights.items() if not name.startswith("base")}
        assert all(torch.equal(value, expected.weights[name]) for name, value in trained.items())
    other = with_other_adapters(model)
    with torch.no_grad():
        other.base[2].bias[5] += 0.5
    with pytest.raises(zs.BaseModelMismatch, match=r"base\.2\.bias"):
        read_checkpoint(tmp_path, 2, other, precision=loaded)


def test_b12_frozen_masters_are_compared_and_not_what_they_are_rounded_to(tmp_path):
    """Under fully_shard with a policy frozen parameters have masters too: a change below bfloat16's precision is another base."""

    def made(change: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        with torch.no_grad():
            model[0].weight.mul_(1 + change)
        fsdp.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
        model(torch.ones(2, 8)).float().sum().backward()
        optimizer.step()
        return model, optimizer

    zs.save(tmp_path, *made(), name="x")
    zs.load(tmp_path, *made())
    for change in (1e-6, 0.1):
        with pytest.raises(zs.BaseModelMismatch, match=r"0\.weight: saved"):
            zs.load(tmp_path, *made(change))
    model, optimizer = made(1e-6)
    whole = made()[0][0].weight.full_tensor()
    with torch.no_grad():
        model[0].weight.copy_(whole)  # a write since the last step counts
    zs.load(tmp_path, model, optimizer)


def test_trained_only_is_a_choice(tmp_path):
    model = seeded(LowRank)
    saved = write_checkpoint(tmp_path, 2, model, ONES[:1], save_trained_only=False)
    for got in read_checkpoint(tmp_path, 3, seeded(LowRank, 9)):
        assert_equal(got, saved)


class Wrapper(nn.Module):
    """A module around another, as libraries do: all names get a prefix."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.inner(*args)


def tied_and_frozen(seed: int = 0) -> nn.Module:
    model = seeded(lambda: OddGPT(dim=7, layers=3, vocab_size=VOCAB, tied=True), seed)
    model.blocks[0].requires_grad_(False)
    return Wrapper(model)


@pytest.mark.parametrize("world", [2, 1])
def test_c10_a_tied_and_partly_frozen_model_within_another_module(world, tmp_path):
    """Saved by four: the keys are exact, the tie is one tensor, what is frozen has the same bits."""
    saved = write_checkpoint(tmp_path, 4, tied_and_frozen(), BATCHES[:2], save_trained_only=False, save_name="x")
    model = tied_and_frozen(5)
    results = read_checkpoint(tmp_path, world, model)
    for got in results:
        assert_equal(got, saved)
        assert got.weights.keys() == model.state_dict().keys()
        assert torch.equal(got.weights["inner.head.weight"], got.weights["inner.embedding.weight"])
    frozen = tied_and_frozen().inner.blocks[0].state_dict()
    assert all(torch.equal(saved.weights[f"inner.blocks.0.{name}"], value) for name, value in frozen.items())


@pytest.mark.parametrize("kind", ["tied", "tiles"])
def test_c10_a_tie_that_is_not_tied_any_more_loads_both(kind, tmp_path):
    """Under each of its names."""
    saved = write_checkpoint(tmp_path, 2, kind, BATCHES[:1])

    def rank_run(rank: int) -> dict:
        model, _ = zs.shard(Language(tied=False), None)
        zs.load(tmp_path, model)
        weights = zs.full_state_dict(model)
        zs.close(model)
        return weights

    for loaded in run_threads(3, rank_run):
        assert torch.equal(loaded["head.weight"], saved.weights["head.weight"])
        assert torch.equal(loaded["embedding.weight"], saved.weights["head.weight"])
