"""zs.inspect_checkpoint and `zeroshard inspect`: the facts of a checkpoint, and whether its checksums hold."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch
import xxhash
from helpers import OddGPT, adamw, seeded, token_batches

import zeroshard as zs
from zeroshard.checkpoint import inspect, resolver
from zeroshard.cli import main
from zeroshard.testing import run_threads

NUMEL = sum(param.numel() for param in OddGPT().parameters())


def save_twice(rank, root, freeze=()):
    model = seeded(OddGPT)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(word in name for word in freeze))
    model, optimizer = zs.shard(model, adamw([p for p in model.parameters() if p.requires_grad]), stage=2, precision="bf16")
    for step in range(2):
        model(*token_batches(2, 1, 2)[step][0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        zs.save(root, model, optimizer, extra={"seen": 4 * step, "rank": rank})


@pytest.fixture
def run(tmp_path):
    run_threads(2, save_twice, tmp_path / "run")
    return tmp_path / "run"


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_the_facts_of_every_checkpoint_of_a_folder(run):
    first, second = zs.inspect_checkpoint(run)
    assert (first.step, second.step) == (1, 2) and first.checksums == second.checksums == "hold"
    assert (second.numel, second.kind, second.trained_only, second.extras) == (NUMEL, "zeroshard", False, ("rank", "seen"))
    assert second.kinds["parameters"] == 4 * NUMEL  # masters, in fp32
    assert second.kinds["optimizer states"] == 2 * 4 * NUMEL + 4 * second.tensors  # a step each
    assert second.ties == {"head.weight": "embedding.weight"} and second.optimizer_tensors == 3 * second.tensors
    facts = {"world_size": 2, "stage": 2, "precision": "bf16", "optimizer": "AdamW", "torch": torch.__version__}
    assert facts.items() <= second.facts.items()
    folder = run / "step-00000002"
    assert second.files == {name: (folder / name).stat().st_size for name in os.listdir(folder) if name in second.files}
    assert sum(second.kinds.values()) == second.nbytes
    assert zs.inspect_checkpoint(folder) == zs.inspect_checkpoint(run, name="step-00000002") == [second]
    with pytest.raises(zs.CheckpointNotFound, match="step-00000001, step-00000002"):
        zs.inspect_checkpoint(run, name="step-3")


def test_trained_parameters_alone(tmp_path):
    run_threads(2, save_twice, tmp_path, ("into", "out."))
    found = zs.inspect_checkpoint(tmp_path)[-1]
    assert found.trained_only and found.left_out == 6 and found.numel < NUMEL


def test_damage_is_told_with_a_code_and_the_place(run, capsys):
    flip(run / "step-00000001" / "rank-00000.distcp", 700)
    first, second = zs.inspect_checkpoint(run)
    assert first.checksums == "damaged" and "rank-00000.distcp is damaged at byte 0" in first.damage and not second.damage
    assert zs.inspect_checkpoint(run, verify=False)[0].checksums == "not verified"
    assert main(["inspect", str(run)]) == 1
    assert "rank-00000.distcp is damaged at byte 0" in capsys.readouterr().err
    assert main(["inspect", str(run), "--name", "step-00000002"]) == 0
    assert main(["inspect", str(run), "--no-verify"]) == 0
    flip(run / "step-00000002" / "manifest.json", 99)
    assert "manifest.json is damaged" in zs.inspect_checkpoint(run / "step-00000002")[0].damage
    assert main(["inspect", str(run / "step-00000002")]) == 1


def test_what_can_not_be_read_is_told_of_that_checkpoint_alone(run, capsys, monkeypatch):
    """A failing disk, files nobody may read, and a version of tomorrow: the others are listed, and the code says so."""
    first, second = run / "step-00000001", run / "step-00000002"

    def refuse(path, *arguments, **options):
        if path == first / "rank-00001.distcp":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, *arguments, **options)

    def preadv(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(resolver, "open", refuse, raising=False)
        found = zs.inspect_checkpoint(run)
        assert [one.checksums for one in found] == ["unreadable", "hold"] and "Permission denied" in found[0].damage
        assert found[0].numel == NUMEL and "rank-00001.distcp" in found[0].damage
        patch.setattr(os, "preadv", preadv)
        assert main(["inspect", str(second)]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "could not be read at byte 0: EIO: Input/output error" in said
    text = (second / "manifest.json").read_text().rpartition(',"checksum":"')[0].replace('"version":1,', '"version":99,')
    (second / "manifest.json").write_text(f'{text},"checksum":"{xxhash.xxh3_64_hexdigest(text.encode())}"}}\n')
    found = zs.inspect_checkpoint(run)
    assert [one.checksums for one in found] == ["hold", "unreadable"] and "newer version" in found[1].damage
    assert main(["inspect", str(run)]) == 1


@pytest.mark.parametrize("kind", ["no step", "no ties", "version", "dtype", "files", "sizes", "a list"])
def test_a_manifest_that_says_other_things_than_it_must_is_told_of_that_checkpoint_alone(run, capsys, kind):
    """Its checksum is right: who wrote it meant it."""
    path = run / "step-00000002" / "manifest.json"
    body = json.loads(path.read_text())
    del body["checksum"]
    if kind.startswith("no "):
        del body[kind.removeprefix("no ")]
    elif kind == "version":
        body["version"] = "1"
    elif kind == "dtype":
        body["tensors"]["model.embedding.weight"]["dtype"] = "float33"
    elif kind == "files":
        body["files"] = None
    elif kind == "sizes":
        body["files"][0]["nbytes"] = "9"
    text = json.dumps(body, separators=(",", ":"))[:-1] if kind != "a list" else "[1"
    path.write_text(f'{text},"checksum":"{xxhash.xxh3_64_hexdigest(text.encode())}"}}\n')
    first, second = zs.inspect_checkpoint(run)
    assert first.checksums == "hold" and second.checksums in ("unreadable", "damaged") and "manifest.json" in second.damage
    assert second.path == str(path.parent) and second.files["rank-00000.distcp"] > 0
    assert main(["inspect", str(run), "--json"]) == 1
    said = capsys.readouterr()
    assert [one["step"] for one in json.loads(said.out)] == [1, second.step] and "manifest.json" in said.err
    assert main(["inspect", str(run)]) == 1


def test_what_a_run_removes_meanwhile_is_left_out(run, capsys, monkeypatch):
    plain_check = inspect.check_digests

    def removed_while_read(folder, manifest):
        if folder.name == "step-00000001":
            shutil.rmtree(folder)
        return plain_check(folder, manifest)

    monkeypatch.setattr(inspect, "check_digests", removed_while_read)
    assert [one.step for one in zs.inspect_checkpoint(run)] == [2]
    monkeypatch.setattr(inspect, "check_sizes", lambda folder, manifest: shutil.rmtree(folder))
    assert main(["inspect", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "expected a folder with a complete checkpoint" in said


def test_the_command_prints_tables_or_json(run, capsys):
    assert main(["inspect", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "step-00000001" in printed and "step-00000002" in printed and f"{NUMEL:,}" in printed and "hold" in printed
    assert main(["inspect", str(run), "--name", "step-00000002"]) == 0
    printed = capsys.readouterr().out
    for word in ("AdamW", "bf16", "world size", "extras", "rank, seen", "head.weight = embedding.weight", "rank-00001.distcp"):
        assert word in printed, word
    assert main(["inspect", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in found] == [1, 2] and found[1]["numel"] == NUMEL and found[1]["stage"] == 2
    assert main(["inspect", str(run / "nothing")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["inspect", str(run), "--jsn"]) == 2
    assert "did you mean --json" in capsys.readouterr().err


def test_checkpoints_of_other_libraries(tmp_path, capsys):
    model = seeded(OddGPT)
    torch.save({"model": model.state_dict(), "optimizer": adamw(model.parameters()).state_dict(), "step": 5}, tmp_path / "x.pt")
    (found,) = zs.inspect_checkpoint(tmp_path / "x.pt")
    assert (found.kind, found.step, found.numel, found.checksums) == ("torch", 5, NUMEL, "the format has none")
    assert main(["inspect", str(tmp_path / "x.pt")]) == 0
    assert "the format has none" in capsys.readouterr().out
