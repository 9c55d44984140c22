"""zs.export: what `from_pretrained` and torch.load read, in the memory of a chunk, complete or not there at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys

import pytest
import torch
from checkpoint_kit import write_checkpoint
from helpers import OddGPT, adamw, differences, seeded, token_batches
from residence import Peak
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint.export import _Exporting
from zeroshard.cli import main
from zeroshard.comm.launch import run_processes
from zeroshard.testing import run_threads

transformers = pytest.importorskip("transformers")


def gpt2():
    config = transformers.GPT2Config(n_layer=2, n_embd=12, n_head=2, vocab_size=37, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=41,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def odd():
    return OddGPT(tied=True)


def save(rank, make, root, steps=1, extra=None, freeze=(), **options):
    """Train a model a little and save it; its whole values."""
    model = seeded(make)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(word in name for word in freeze))
    model, optimizer = zs.shard(model, adamw([p for p in model.parameters() if p.requires_grad]), **options)
    for step in range(steps if make is odd else 0):
        model(*token_batches(steps, 1, 3)[step][0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    zs.save(root, model, optimizer, extra=extra)
    return zs.full_state_dict(model, masters=True)


def saved(root, make, world=2, extra=None, **options):
    return run_threads(world, lambda rank: save(rank, make, root, extra=extra, **{"stage": 3, **options}))[0]


# -- Hugging Face --------------------------------------------------------------------------------------------------


def test_a_tied_gpt2_loads_with_plain_from_pretrained(tmp_path):
    state = saved(tmp_path / "run", gpt2, extra={"hf_config": gpt2().config.to_dict()})
    done = zs.export(tmp_path / "run", tmp_path / "out")
    assert done.files == ("config.json", "model.safetensors") and done.ties == {"lm_head.weight": "transformer.wte.weight"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt" and "lm_head.weight" not in file.keys()  # noqa: SIM118
    model, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not differences(dict(model.state_dict()), state)
    tokens = torch.arange(12).view(2, 6)
    expected = gpt2()
    expected.load_state_dict(state)
    assert torch.equal(model(tokens).logits, expected.eval()(tokens).logits)


class Policy(nn.Module):
    """A model with a wrapper around it and something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = gpt2()
        self.value = nn.Linear(12, 1)


def test_a_wrapped_model_is_exported_without_its_wrapper(tmp_path):
    state = saved(tmp_path / "run", Policy, freeze=())
    zs.export(tmp_path / "run", tmp_path / "out", prefix="policy.", config=gpt2().config.to_dict())
    model, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not differences({f"policy.{name}": value for name, value in model.state_dict().items()},
                           {name: value for name, value in state.items() if name.startswith("policy.")})  # fmt: skip
    with pytest.raises(zs.ConfigError, match="no name begins with 'actor.'; the first names: policy.transformer"):
        zs.export(tmp_path / "run", tmp_path / "other", prefix="actor.")


def test_a_llama_in_several_files_loads_with_plain_from_pretrained(tmp_path):
    state = saved(tmp_path / "run", llama)
    done = zs.export(tmp_path / "run", tmp_path / "out", max_shard_nbytes=8000, config=llama().config.to_dict())
    shards = [file for file in done.files if file.endswith(".safetensors")]
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == state.keys() and set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    for shard in shards:
        assert sum(value.nbytes for value in load_file(tmp_path / "out" / shard).values()) <= 8000
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not differences(dict(model.state_dict()), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_chosen_and_the_configuration_says_so(dtype, tmp_path):
    state = saved(tmp_path / "run", llama, precision="bf16")  # masters, in fp32, are what is stored
    config = {**llama().config.to_dict(), "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    zs.export(tmp_path / "run", tmp_path / "out", dtype=dtype, config=tmp_path / "config.json")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert not differences(got, {name: value.to(dtype) for name, value in state.items()})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    if dtype is not torch.float64:
        assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").dtype is dtype


def test_a_configuration_may_be_an_object(tmp_path):
    """Given as it is; kept in a checkpoint it is refused, for its class would have to be run, and the way on is named."""
    config = gpt2().config
    zs.save(tmp_path / "run", zs.shard(odd(), None)[0], extra={"hf_config": config})
    with pytest.raises(zs.CheckpointError, match=r"extra\['hf_config'\] is an object of a class .* give config= .*to_dict\(\)"):
        zs.export(tmp_path / "run", tmp_path / "out")
    done = zs.export(tmp_path / "run", tmp_path / "out", config=config)
    assert "config.json" in done.files and json.loads((tmp_path / "out" / "config.json").read_text())["n_embd"] == 12


class Rare(nn.Module):
    """What safetensors has no place for: a name, a dtype."""

    def __init__(self, name, dtype=torch.float32) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.arange(3.0)))
        self.register_buffer("turn", torch.ones(2, dtype=dtype))


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Rare("__metadata__"), "can not hold a tensor called '__metadata__'; use format='torch'"),
    (lambda: Rare("a", torch.complex128), "turn is torch.complex128, which safetensors can not hold; use format='torch'"),
], ids=["name", "dtype"])  # fmt: skip
def test_what_safetensors_has_no_place_for_goes_to_torch(make, words, tmp_path):
    model, _ = zs.shard(make(), None)
    zs.save(tmp_path / "run", model)
    with pytest.raises(zs.ConfigError, match=words):
        zs.export(tmp_path / "run", tmp_path / "out")
    zs.export(tmp_path / "run", tmp_path / "out.pt", format="torch")
    assert not differences(torch.load(tmp_path / "out.pt"), make().state_dict()) and sorted(os.listdir(tmp_path)) == [
        "out.pt",
        "run",
    ]
    zs.close(model)


def test_complex_numbers_go_both_ways(tmp_path):
    """Rotary tables may be complex. A dtype that is chosen is for real numbers."""
    model, _ = zs.shard(Rare("a", torch.complex64), None, stage=3)
    turn = model.turn.copy_(torch.polar(torch.ones(2), torch.tensor([0.5, 2.0]))).clone()
    zs.save(tmp_path / "run", model)
    zs.export(tmp_path / "run", tmp_path / "out", dtype=torch.bfloat16)
    zs.save_safetensors(model, tmp_path / "own.safetensors")
    for path in (tmp_path / "out" / "model.safetensors", tmp_path / "own.safetensors"):
        assert torch.equal(load_file(path)["turn"], turn)
        model.turn.zero_()
        zs.load(path, model)
        assert torch.equal(model.turn, turn)
        other, _ = zs.shard(Rare("a", torch.complex64), None, weights=path)
        assert torch.equal(other.turn, turn)
        zs.close(other)
    zs.close(model)


class Within(nn.Module):
    """A model in another, tied and partly frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = odd()
        self.inner.blocks[0].requires_grad_(False)

    def forward(self, *args):
        return self.inner(*args)


def test_c10_a_wrapped_partly_frozen_tied_model_is_exported_whole(tmp_path):
    """The keys are exactly the model's: one of a tie is a tensor, the other is in the metadata, and both are loaded."""

    def rank_run(rank: int) -> dict:
        model = seeded(Within)
        model, optimizer = zs.shard(model, adamw([p for p in model.parameters() if p.requires_grad]), stage=3)
        model(*token_batches(1, 1, 2)[0][0][rank]).backward()
        optimizer.step()
        zs.save(tmp_path / "run", model, optimizer, trained_only=False)
        return zs.full_state_dict(model, masters=True)

    state = run_threads(2, rank_run)[0]
    assert state.keys() == Within().state_dict().keys()
    done = zs.export(tmp_path / "run", tmp_path / "out")
    assert done.ties == {"inner.head.weight": "inner.embedding.weight"}
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == state.keys() - done.ties.keys() and not differences(got, {n: state[n] for n in got})
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert done.ties.items() <= file.metadata().items()
    zs.export(tmp_path / "run", tmp_path / "inner", prefix="inner.")
    assert load_file(tmp_path / "inner" / "model.safetensors").keys() == odd().state_dict().keys() - {"head.weight"}
    zs.export(tmp_path / "run", tmp_path / "out.pt", format="torch")
    model = Within()
    model.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert not differences(model.state_dict(), state) and model.inner.head.weight is model.inner.embedding.weight


# -- torch ---------------------------------------------------------------------------------------------------------


def test_a_file_of_torch_save_loads_with_weights_only_and_keeps_ties(tmp_path):
    state = saved(tmp_path / "run", odd, world=3)
    done = zs.export(tmp_path / "run", tmp_path / "model.pt", format="torch")
    assert done.files == ("model.pt",) and done.nbytes == (tmp_path / "model.pt").stat().st_size
    for mmap in (False, True):
        got = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
        assert not differences(got, state)
        assert got["head.weight"].data_ptr() == got["embedding.weight"].data_ptr()
    odd().load_state_dict(got)
    zs.export(tmp_path / "run", tmp_path / "half.pt", format="torch", dtype=torch.bfloat16)
    assert torch.equal(torch.load(tmp_path / "half.pt")["norm.weight"], state["norm.weight"].bfloat16())


class Notes:
    """Of a class that torch does not load by itself."""


class Noting(nn.Module):
    """Modules whose state dict has more than tensors."""

    def __init__(self, note=None) -> None:
        super().__init__()
        self.inner, self.plain = nn.Linear(2, 3), nn.Linear(3, 3)
        self.note = (
            note if note is not None else {"calls": 3, "amax": torch.arange(5.0), "scale": torch.ones(2, dtype=torch.uint16)}
        )

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state) -> None:
        self.note = state


def save_noting(root, note=None):
    model, _ = zs.shard(nn.Sequential(seeded(lambda: Noting(note))), None)
    zs.save(root, model)
    zs.close(model)
    return model.state_dict()


def test_what_modules_keep_besides_tensors_is_in_files_of_torch_save(tmp_path):
    state = save_noting(tmp_path / "run")
    zs.export(tmp_path / "run", tmp_path / "model.pt", format="torch")
    zs.export(tmp_path / "run", tmp_path / "part.pt", format="torch", prefix="0.")
    for mmap in (False, True):
        got = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
        assert got.keys() == state.keys() and got["0._extra_state"]["calls"] == 3
        assert torch.equal(got["0._extra_state"]["amax"], torch.arange(5.0)) and torch.equal(
            got["0.inner.weight"], state["0.inner.weight"]
        )
    torch.save(state, tmp_path / "plain.pt")
    assert torch.load(tmp_path / "plain.pt").keys() == got.keys()
    model = Noting({})
    model.load_state_dict(torch.load(tmp_path / "part.pt"), strict=True)
    assert model.note["calls"] == 3 and torch.equal(model.note["scale"], torch.ones(2, dtype=torch.uint16))


def test_what_an_export_can_not_hold_is_said(tmp_path, capfd):
    save_noting(tmp_path / "run")
    assert zs.export(tmp_path / "run", tmp_path / "out").tensors == 4
    assert "safetensors holds tensors only: left out 0._extra_state; format='torch'" in capfd.readouterr().err
    save_noting(tmp_path / "other", Notes())
    zs.export(tmp_path / "other", tmp_path / "other.pt", format="torch")
    assert "classes that torch does not load by itself: 0._extra_state; load it with strict=False" in capfd.readouterr().err
    assert "0._extra_state" not in torch.load(tmp_path / "other.pt")
    zs.export(tmp_path / "run", tmp_path / "quiet.pt", format="torch")
    assert not capfd.readouterr().err


def test_an_unreadable_checkpoint_is_one_line(tmp_path, capsys, monkeypatch):
    """A disk that fails, before and while it is written; a checkpoint that its run removes meanwhile."""
    saved(tmp_path / "run", odd)
    plain = os.preadv
    capsys.readouterr()
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
    for arguments in ([], ["--no-verify"]):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), *arguments]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "Input/output error" in said and os.listdir(tmp_path) == ["run"]
    monkeypatch.setattr(os, "preadv", plain)
    monkeypatch.setattr(zs.checkpoint.resolver, "check_digests", lambda folder, *_: [file.unlink() for file in folder.iterdir()])
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "a complete checkpoint, found none" in said and os.listdir(tmp_path) == ["run"]


def test_other_libraries_checkpoints_can_be_exported_too(tmp_path):
    state = seeded(odd).state_dict()
    torch.save({"model": state}, tmp_path / "x.pt")
    done = zs.export(tmp_path / "x.pt", tmp_path / "out")
    assert done.ties == {"head.weight": "embedding.weight"}
    state.pop("head.weight")
    assert not differences(load_file(tmp_path / "out" / "model.safetensors"), dict(state))


# -- what is left out, damage, refusals ----------------------------------------------------------------------------


def test_trained_parameters_alone_are_exported_as_they_are_and_it_says_so(tmp_path, capfd):
    state = saved(tmp_path / "run", odd, freeze=("embedding", "into", "out."))
    done = zs.export(tmp_path / "run", tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert done.trained_only and got.keys() < state.keys() and not [name for name in got if "into" in name]
    assert not differences(got, {name: state[name] for name in got})
    assert "trained parameters only (7 were left out)" in capfd.readouterr().err


def damage(root):
    file = next(root.glob("*/rank-00001.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    saved(tmp_path / "run", odd)
    damage(tmp_path / "run")
    with pytest.raises(zs.CheckpointCorrupt, match="rank-00001.distcp is damaged at byte 0"):
        zs.export(tmp_path / "run", tmp_path / "out")
    assert os.listdir(tmp_path) == ["run"]
    zs.export(tmp_path / "run", tmp_path / "out", verify=False)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev", "fsync"])
def test_a_disk_that_refuses_leaves_nothing(format, call, tmp_path, monkeypatch):
    saved(tmp_path / "run", odd)

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(zs.CheckpointWriteError, match="ENOSPC"):
        zs.export(tmp_path / "run", tmp_path / "out", format=format)
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(("options", "words"), [
    ({"dtype": torch.int8}, "floating-point"), ({"format": "onnx"}, "one of safetensors, torch, got 'onnx'"),
    ({"max_shard_nbytes": 0}, "at least 1"), ({"config": "nowhere.json"}, "expected a dictionary, or a config.json"),
    ({"config": {}, "format": "torch"}, "can not hold it"), ({"config": {"x": {1, 2}}}, "what JSON can hold"),
], ids=str)  # fmt: skip
def test_mistakes_are_named(options, words, tmp_path):
    with pytest.raises(zs.ConfigError, match=words):
        zs.export(tmp_path, tmp_path / "out", **options)


def test_nothing_is_overwritten_and_nothing_is_found_where_there_is_nothing(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(zs.CheckpointNotFound):
        zs.export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(zs.CheckpointError, match="exists; name another"):
        zs.export(tmp_path / "run", tmp_path / "out")


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_exports_and_says_what_it_wrote(tmp_path, capsys):
    saved(tmp_path / "run", odd)
    out = str(tmp_path / "out")
    assert main(["export", str(tmp_path / "run"), out, "--dtype", "bf16", "--name", "step-00000001"]) == 0
    printed = capsys.readouterr().out
    assert "model.safetensors" in printed and "parameters" in printed
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert main(["export", str(tmp_path / "run"), out]) == 2
    assert "exists; name another" in capsys.readouterr().err
    damage(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "x.pt"), "--format", "torch"]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "x.pt"), "--format", "torch", "--no-verify"]) == 0
    assert torch.load(tmp_path / "x.pt")
    for arguments, words in ((["--dtyp", "bf16"], "did you mean --dtype"), (["--max-shard-gb", "0"], "positive number")):
        assert main(["export", "a", "b", *arguments]) == 2
        assert words in capsys.readouterr().err


# -- memory --------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(24 << 20))  # 96 MiB
        self.other = nn.Linear(1024, 1024)


def save_wide(rank, folder):
    zs.save(folder / "run", zs.shard(seeded(Wide), None, stage=3)[0])
    zs.save(folder / "small", zs.shard(nn.Linear(4, 4), None, stage=3)[0])


def export_in_little_memory(rank, world, folder):
    for format in ("safetensors", "torch"):
        zs.export(folder / "small", folder / f"small-{format}", format=format)
    with Peak() as peak:
        for format in ("safetensors", "torch"):
            zs.export(folder / "run", folder / format, format=format, dtype=torch.bfloat16)
    return peak.added_nbytes


@pytest.mark.processes
# the peak of resident memory can be started anew on Linux alone; elsewhere it would hold that of the imports
# no other way to see resident memory; the export itself is tested above
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_exporting_takes_the_memory_of_some_chunks(tmp_path):
    run_threads(1, save_wide, tmp_path)
    (added,) = run_processes(export_in_little_memory, 1, tmp_path)
    # 4 MiB in bf16, 8 MiB as they are read, 4 MiB while checksums are compared; the allocator may keep as much again
    assert added < 36 << 20, f"{added / 2**20:.0f} MiB to export 100 MiB twice"
    tables = [torch.load(tmp_path / "torch"), load_file(tmp_path / "safetensors" / "model.safetensors")]
    assert torch.equal(tables[0]["table"], tables[1]["table"])


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_the_next_is_exported_where_a_run_removes_one_meanwhile(format, tmp_path, monkeypatch):
    for name, step in (("a", 1), ("b", 2)):
        write_checkpoint(tmp_path / "run", 1, "tied", save_name=name, save_step=step)
    plain = _Exporting.ranges

    def pruned(*args):
        shutil.rmtree(tmp_path / "run" / "b", ignore_errors=True)
        return plain(*args)

    monkeypatch.setattr(_Exporting, "ranges", pruned)
    made = zs.export(tmp_path / "run", tmp_path / "out", format=format)
    assert made.tensors > 10 and sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
