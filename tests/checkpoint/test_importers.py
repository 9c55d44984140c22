"""Checkpoints of other libraries load into shards: Hugging Face, torch.save, DeepSpeed ZeRO, FSDP2 and DCP.

Those of torch and transformers are written here by the libraries themselves; those of DeepSpeed are recorded in
tests/checkpoint/data/deepspeed, and written anew where it is installed.
"""

from __future__ import annotations

import math
import pickle
import shutil
import sys
from pathlib import Path

import foreign_names
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import MLP, OddGPT, adamw, differences, seeded, state_differences, token_batches, vector_batches
from offloading import tiers
from safetensors.torch import save_model
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint.importers.torch_file import StandIn, StridedTensor, open_torch_file
from zeroshard.comm.launch import run_processes
from zeroshard.testing import run_threads

DATA = Path(__file__).parent / "data" / "deepspeed"
sys.path.insert(0, str(DATA))
import make_deepspeed as recorded  # noqa: E402


def trained(make, batches, steps=2):
    """A model and optimizer of plain torch after some steps."""
    model = seeded(make)
    optimizer = adamw(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(*batches[step][0][0]).backward()
        optimizer.step()
    return model, optimizer


def named_states(model, optimizer):
    return {name: dict(optimizer.state[param]) for name, param in model.named_parameters() if param in optimizer.state}


def load(rank, path, make, groups=lambda model: model.parameters(), options=None, stage=3, **given):
    """Load into a fresh model; what it then holds: values, states, groups' options, what was found."""
    model = seeded(make, 9)
    optimizer = torch.optim.AdamW(groups(model), **(options or {"lr": 1.0}))
    model, optimizer = zs.shard(model, optimizer, stage=stage, **given)
    found = zs.load(path, model, optimizer)
    values, states = zs.full_state_dict(model, masters=True), zs.full_optimizer_state(model)
    groups_found = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    zs.close(model)
    return values, states, groups_found, found


GPT = trained(OddGPT, token_batches(2, 1, 1))


# -- torch.save ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_training_script_s_dictionary_loads_with_its_optimizer(stage, tmp_path):
    model, optimizer = GPT
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, tmp_path / "x.pt")
    for values, states, groups, found in run_threads(3, lambda rank: load(rank, tmp_path / "x.pt", OddGPT, stage=stage)):
        assert not differences(values, model.state_dict())
        assert not state_differences(states, named_states(model, optimizer))
        assert groups[0]["lr"] == 1e-2 and groups[0]["weight_decay"] == 0.1
        assert found.step == 2 and found.rng == "left"


TIERED = [  # param, gradient, optimizer, precision
    ("none", "none", "cpu", "fp32"), ("none", "cpu", "nvme", "fp32"), ("cpu", "none", "cpu", "bf16"), ("nvme", "nvme", "nvme", "fp32"),
]  # fmt: skip


@pytest.mark.parametrize("param, gradient, optimizer, precision", TIERED)
def test_states_of_a_training_script_go_to_where_they_are_to_rest(param, gradient, optimizer, precision, disk, tmp_path):
    """And training goes on from there as the script's would, to the bit, in fp32."""
    model, its = GPT
    torch.save({"model": model.state_dict(), "optimizer": its.state_dict(), "step": 2}, tmp_path / "x.pt")
    options = tiers(disk, param, gradient, optimizer, buffer_nbytes=1 << 16)

    def go_on(rank, **given):
        mine = seeded(OddGPT, 9)
        mine, stepper = zs.shard(mine, torch.optim.AdamW(mine.parameters(), lr=1.0), stage=3, precision=precision, **given)
        zs.load(tmp_path / "x.pt", mine, stepper)
        loaded = zs.full_state_dict(mine, masters=True), zs.full_optimizer_state(mine)
        mine(*token_batches(3, 1, 2)[2][0][rank]).backward()
        stepper.step()
        after = zs.full_state_dict(mine, masters=True), zs.full_optimizer_state(mine)
        zs.close(mine)
        return loaded, after

    plain = run_threads(2, go_on)
    for (loaded, after), (_, expected) in zip(run_threads(2, lambda rank: go_on(rank, **options)), plain, strict=True):
        assert not differences(loaded[0], model.state_dict()) and not state_differences(loaded[1], named_states(model, its))
        assert any(not torch.equal(value, loaded[0][name]) for name, value in after[0].items())
        if precision == "fp32":
            assert not differences(after[0], expected[0]) and not state_differences(after[1], expected[1])


@pytest.mark.parametrize("wrap", [
    lambda state: state, lambda state: {"state_dict": state, "epoch": 3}, lambda state: {"model": {"module": state}},
    lambda state: {f"module.{name}": value for name, value in state.items()},
    lambda state: {f"module._orig_mod.model.{name}": value for name, value in state.items()},
    lambda state: {name.replace("blocks.0.", "blocks.0._orig_mod."): value for name, value in state.items()},
], ids=["plain", "nested", "twice", "module.", "three prefixes", "compiled blocks"])  # fmt: skip
def test_state_dicts_load_whatever_is_wrapped_around_them(wrap, tmp_path):
    path, expected = tmp_path / "model.bin", GPT[0].state_dict()
    torch.save(wrap(expected), path)

    def body(rank):
        model, _ = zs.shard(seeded(OddGPT, 9), None, stage=3)
        zs.load(path, model)
        born, _ = zs.shard(seeded(OddGPT, 8), None, stage=3, weights=path)
        return zs.full_state_dict(model), zs.full_state_dict(born)

    for values, born in run_threads(2, body):
        assert not differences(values, expected) and not differences(born, expected)


def test_the_files_of_a_hugging_face_index_are_one_checkpoint(tmp_path):
    import json

    state = GPT[0].state_dict()
    files = {name: f"pytorch_model-{number % 2 + 1:05d}-of-00002.bin" for number, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({name: value for name, value in state.items() if files[name] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))

    def body(rank):
        return zs.full_state_dict(zs.shard(seeded(OddGPT, 9), None, stage=3, weights=tmp_path)[0])

    assert not differences(run_threads(2, body)[0], state)
    (tmp_path / files["norm.bias"]).unlink()
    with pytest.raises(zs.CheckpointCorrupt, match="index.json names"):
        run_threads(2, body)


class Danger:
    """Would make a file if it were unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


class Settings:
    def __init__(self) -> None:
        self.rate = 0.5


def test_nothing_in_a_file_is_run_and_tensors_need_not_be_contiguous(tmp_path):
    path, matrix = tmp_path / "x.pt", torch.arange(12.0).view(3, 4)
    torch.save(
        {"model": {"weight": matrix.t(), "bias": matrix[1]}, "args": Settings(), "danger": Danger(tmp_path / "danger")}, path
    )
    found = open_torch_file(path)
    assert isinstance(found["args"], StandIn) and found["args"].rate == 0.5 and isinstance(found["danger"], StandIn)
    assert not (tmp_path / "danger").exists()
    assert isinstance(found["model"]["weight"], StridedTensor)
    model, _ = zs.shard(nn.Linear(3, 4), None, stage=0, weights=path)
    assert torch.equal(model.weight, matrix.t()) and torch.equal(model.bias, matrix[1])


def test_a_tie_of_the_model_must_hold_in_the_file(tmp_path):
    state = dict(GPT[0].state_dict())
    torch.save(state, tmp_path / "good.pt")
    state["head.weight"] = state["head.weight"] + 1
    torch.save(state, tmp_path / "bad.pt")
    state["head.weight"] = torch.zeros(3, 7)
    torch.save(state, tmp_path / "other.pt")
    state["head.weight"], state["embedding.weight"] = (torch.full((11, 7), math.nan) for _ in range(2))
    torch.save(state, tmp_path / "nan.pt")

    def body(rank):
        model, _ = zs.shard(seeded(OddGPT), None, stage=3)
        zs.load(tmp_path / "good.pt", model)
        with pytest.raises(zs.CheckpointMismatch, match="head.weight: saved with other values than embedding.weight"):
            zs.load(tmp_path / "bad.pt", model)
        with pytest.raises(
            zs.ModelMismatch, match="head.weight: saved with other values than embedding.weight, .*without the tie"
        ):
            zs.shard(seeded(OddGPT), None, stage=3, weights=tmp_path / "bad.pt")
        with pytest.raises(zs.ModelMismatch, match=r"head.weight: saved \(3, 7\), wanted \(11, 7\)"):
            zs.shard(seeded(OddGPT), None, stage=3, weights=tmp_path / "other.pt")
        for good in ("good.pt", "nan.pt"):
            zs.shard(seeded(OddGPT), None, stage=3, weights=tmp_path / good)

    run_threads(2, body)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_listed_whole_and_nothing_is_changed(tmp_path):
    state = GPT[0].state_dict()
    state["nrm.weight"] = state.pop("norm.weight")
    state["norm.bias"] = torch.zeros(3)
    torch.save(state, tmp_path / "x.pt")

    def body(rank):
        model = seeded(OddGPT, 9)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3)
        before = zs.full_state_dict(model)
        with pytest.raises(zs.CheckpointMismatch) as caught:
            zs.load(tmp_path / "x.pt", model, optimizer)
        assert not differences(zs.full_state_dict(model), before)
        return str(caught.value)

    texts = run_threads(2, body)
    assert texts[0] == texts[1]
    for words in ("missing (the model has it, the checkpoint not): norm.weight (7,) Did you mean 'nrm.weight'?",
                  "unexpected: nrm.weight (7,)", "norm.bias: saved (3,), wanted (7,)", "no optimizer states"):  # fmt: skip
        assert words in texts[0]


def test_states_of_another_optimizer_are_refused(tmp_path):
    model = GPT[0]
    saved = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).state_dict()
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "x.pt")
    with pytest.raises(zs.CheckpointMismatch, match="another kind, with momentum; wanted betas, eps"):
        run_threads(2, lambda rank: load(rank, tmp_path / "x.pt", OddGPT))
    biases = [p for p in model.parameters() if p.dim() == 1]
    torch.save({"model": model.state_dict(), "optimizer": adamw(biases).state_dict()}, tmp_path / "x.pt")
    with pytest.raises(zs.CheckpointMismatch, match="saved 8 parameters, wanted 15"):
        run_threads(2, lambda rank: load(rank, tmp_path / "x.pt", OddGPT))


@pytest.mark.parametrize(("content", "words"), [
    (b"not a checkpoint", "can not be read"), ([1, 2], "found a list"), ({"a": 1}, "keys a"),
])  # fmt: skip
def test_a_file_that_is_no_checkpoint_is_said_so_on_every_rank(content, words, tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)

    def body(rank):
        model, _ = zs.shard(seeded(OddGPT), None, stage=3)
        with pytest.raises(zs.CheckpointError, match=words):
            zs.load(path, model)
        with pytest.raises(zs.CheckpointNotFound):
            zs.load(tmp_path / "none", model)

    run_threads(2, body)


# -- safetensors, and our own --------------------------------------------------------------------------------------


def test_safetensors_and_checkpoints_of_ours_are_taken_by_load_and_by_shard(tmp_path):
    save_model(GPT[0], str(tmp_path / "model.safetensors"))
    expected = GPT[0].state_dict()

    def body(rank):
        model, _ = zs.shard(seeded(OddGPT, 9), None, stage=3)
        zs.load(tmp_path, model)
        zs.save(tmp_path / "ours", model)
        born, _ = zs.shard(seeded(OddGPT, 8), None, stage=1, weights=tmp_path / "ours", precision="bf16")
        return zs.full_state_dict(model), zs.full_state_dict(born)

    for values, born in run_threads(2, body):
        assert not differences(values, expected)
        assert not differences(born, {name: value.bfloat16() for name, value in expected.items()})


def test_what_transformers_saves_is_taken_with_or_without_its_prefix(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 31}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=True)
    whole = seeded(lambda: transformers.LlamaForCausalLM(config))
    whole.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    def body(rank):
        model, _ = zs.shard(seeded(lambda: transformers.LlamaForCausalLM(config), 9), None, stage=3)
        zs.load(tmp_path, model)
        base, _ = zs.shard(seeded(lambda: transformers.LlamaModel(config), 8), None, stage=3, weights=tmp_path)
        return zs.full_state_dict(model), zs.full_state_dict(base)

    for values, base in run_threads(2, body):
        assert not differences(values, whole.state_dict()) and not differences(base, whole.model.state_dict())


# -- FSDP2 ---------------------------------------------------------------------------------------------------------


def frozen_gain():
    model = MLP()
    model.gain.requires_grad_(False)  # FSDP2 does not shard scalars
    return model


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


def write_with_fsdp(rank, world, folder):
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = seeded(frozen_gain)
    for layer in model.layers:
        fully_shard(layer)
    optimizer = adamw(trainable(model))
    for step in vector_batches(2, 1, 2):
        model(*step[0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    values, states = get_state_dict(model, optimizer)
    dcp.save({"model": values, "optim": states}, checkpoint_id=folder / "named")
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder / "numbered")
    dcp.save({"app": {"model": values, "optim": states}}, checkpoint_id=folder / "app")
    dcp.save(model.state_dict(), checkpoint_id=folder / "alone")
    whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # noqa: E731
    found = {name: {k: whole(v) for k, v in state.items()} for name, state in states["state"].items()}
    return {name: whole(value).detach() for name, value in model.state_dict().items()}, found


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """A folder of checkpoints of FSDP2 on two ranks, and what they hold."""
    folder = tmp_path_factory.mktemp("fsdp")
    return folder, *run_processes(write_with_fsdp, 2, folder)[0]


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["named", "numbered", "app", "alone"])
def test_checkpoints_of_fsdp2_load_with_their_optimizer_states(layout, fsdp):
    folder, values, states = fsdp

    def body(rank):
        if layout == "alone":
            return zs.full_state_dict(zs.shard(seeded(frozen_gain, 9), None, stage=3, weights=folder / layout)[0]), states, None
        got, found, groups, _ = load(rank, folder / layout, frozen_gain, trainable)
        return got, found, groups

    for got, found, groups in run_threads(3, body):
        assert not differences(got, values) and not state_differences(found, states)
        assert groups is None or (groups[0]["lr"], groups[0]["betas"]) == (1e-2, (0.9, 0.999))


@pytest.mark.processes
def test_damaged_and_dangerous_folders_of_fsdp2_are_refused(fsdp, tmp_path):
    folder = shutil.copytree(fsdp[0] / "named", tmp_path / "x")

    def body(rank):
        model = seeded(frozen_gain)
        model, optimizer = zs.shard(model, adamw(trainable(model)), stage=3)
        with pytest.raises(zs.CheckpointError) as caught:
            zs.load(folder, model, optimizer)
        return str(caught.value)

    (folder / "__1_0.distcp").rename(folder / "away")
    assert "__1_0.distcp is damaged" in run_threads(2, body)[1]
    (folder / ".metadata").write_bytes(pickle.dumps(Danger(tmp_path / "danger")))
    assert "is not loaded" in run_threads(2, body)[0] and not (tmp_path / "danger").exists()
    (folder / ".metadata").write_bytes(b"\x80\x04")
    assert "damaged" in run_threads(2, body)[0]


# -- DeepSpeed -----------------------------------------------------------------------------------------------------


def check_deepspeed(folder, case, expected, disk):
    """Values bit for bit; states near those of plain torch: gradients of bf16 differ in the third digit."""
    whole, states = recorded.reference()
    exact = not case.endswith("bf16")

    def body(rank, stage, places):
        options = tiers(disk, *places, buffer_nbytes=1 << 16) if places else {}
        return load(rank, folder / case, recorded.Net, recorded.groups_of, recorded.OPTIONS | {"lr": 1.0}, stage=stage, **options)

    for world, stage, places in (
        (1, 3, ()),
        (3, 3, ()),
        (2, 1, ()),
        (2, 3, ("nvme", "none", "cpu")),
        (2, 2, ("none", "none", "nvme")),
    ):
        values, found, groups, result = run_threads(world, body, stage, places)[-1]
        for name in ("frozen.weight", "frozen.bias"):  # its own tool leaves them out at stage 1
            assert torch.equal(values[name], whole[name] if exact else whole[name].bfloat16().float())
            expected[name] = values[name]
        assert not differences(values, expected)
        assert result.step == recorded.STEPS
        assert [(group["lr"], group["betas"], group["weight_decay"]) for group in groups] == [
            (1e-2, (0.8, 0.95), 0.1), (1e-2, (0.8, 0.95), 0.0),
        ]  # fmt: skip
        for name, state in states.items():
            assert found[name]["step"] == recorded.STEPS
            for key in ("exp_avg", "exp_avg_sq"):
                got, wanted = found[name][key], state[key]
                if exact:
                    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-9)
                else:
                    assert torch.cosine_similarity(got.flatten(), wanted.flatten(), 0) > 0.99, (name, key)


@pytest.mark.parametrize("case", recorded.CASES)
def test_recorded_checkpoints_of_deepspeed_load_with_their_optimizer_states(case, disk):
    check_deepspeed(DATA, case, torch.load(DATA / f"{case}.pt"), disk)


@pytest.mark.processes
@pytest.mark.parametrize("case", recorded.CASES)
def test_checkpoints_written_by_deepspeed_load(case, disk, tmp_path):
    pytest.importorskip("deepspeed")  # not among the requirements of tests: it needs a compiler
    check_deepspeed(tmp_path, case, recorded.make(tmp_path / case, case), disk)


def test_deepspeed_checkpoints_with_ranks_missing_are_refused(tmp_path):
    folder = shutil.copytree(DATA / "stage2", tmp_path / "x")
    (folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()

    def body(rank):
        with pytest.raises(zs.CheckpointCorrupt, match="optimizer states of 2 ranks, found of 1"):
            zs.shard(recorded.Net(), None, stage=3, weights=folder)

    run_threads(2, body)


@pytest.mark.parametrize("case", ["stage2", "stage3"])
def test_files_without_an_entry_are_read_otherwise_or_refused(case, monkeypatch):
    """As a later DeepSpeed might write them: never other values or states, never an error of Python."""
    from zeroshard.checkpoint.importers import deepspeed

    plain, refused = deepspeed.open_torch_file, set()

    def without(item, name):
        if isinstance(item, dict):
            return {key: without(value, name) for key, value in item.items() if key != name}
        return [without(each, name) for each in item] if isinstance(item, list) else item

    def read():
        model = recorded.Net()
        optimizer = torch.optim.AdamW(recorded.groups_of(model), **recorded.OPTIONS)
        zs.shard(model, optimizer, stage=3)
        zs.load(DATA / case, model, optimizer)
        return zs.full_state_dict(model), zs.full_optimizer_state(model)

    expected = read()
    for name in sorted(foreign_names.ENTRIES | {"module", "optimizer_state_dict", "param_groups", "state"}):
        monkeypatch.setattr(deepspeed, "open_torch_file", lambda path: without(plain(path), name))
        try:
            torch.testing.assert_close(read(), expected, rtol=0, atol=0)
        except zs.CheckpointError:
            refused.add(name)
    of_stage = {
        "stage2": {"single_partition_of_fp32_groups", "base_optimizer_state"},
        "stage3": {"fp32_flat_groups", "frozen_param_shapes"},
    }
    assert refused >= {"module", "buffer_names", "param_shapes", "optimizer_state_dict", "param_groups", "state", *of_stage[case]}


def test_optimizers_that_count_steps_by_group_and_files_without_a_mapping_are_read(disk, tmp_path, monkeypatch):
    """As fused optimizers and older versions of DeepSpeed leave them."""
    from zeroshard.checkpoint.importers import deepspeed

    plain = deepspeed.open_torch_file

    def older(path):
        found = plain(path)
        saved = found.get("optimizer_state_dict", {})
        saved.pop("param_slice_mappings", None)
        for group in saved.get("base_optimizer_state", {}).get("param_groups", ()):
            group["step"] = 3
        for state in saved.get("base_optimizer_state", {}).get("state", {}).values():
            del state["step"]
        return found

    monkeypatch.setattr(deepspeed, "open_torch_file", older)
    check_deepspeed(DATA, "stage2", torch.load(DATA / "stage2.pt"), disk)
