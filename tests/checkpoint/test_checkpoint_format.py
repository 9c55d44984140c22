"""docs/checkpoint-format.md, number by number. What is read here is read with json, xxhash and torch.load alone."""

import fcntl
import io
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from checkpoint_kit import MODELS, VOCAB, LowRank, assert_equal, build, snapshot, train, write_checkpoint
from helpers import seeded, token_batches
from torch.distributed.checkpoint import FileSystemReader

import zeroshard as zs
from zeroshard.checkpoint import dcp
from zeroshard.testing import run_threads

BATCHES = [step[0] for step in token_batches(3, 1, 4, VOCAB)]
MIX = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)


class Files:
    """A checkpoint, read as the specification says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = (path / "manifest.json").read_bytes()
        self.manifest = json.loads(self.text)
        self.tensors, self.objects = self.manifest["tensors"], self.manifest["objects"]
        self.content = [(path / file["name"]).read_bytes() for file in self.manifest["files"]]

    def tensor(self, name: str) -> torch.Tensor:
        entry = self.tensors[name]
        dtype = getattr(torch, entry["dtype"])
        whole = torch.zeros(entry["shape"], dtype=dtype)
        for file, data, _, _, offsets, sizes in entry["boxes"]:
            raw = bytearray(self.content[file][data : data + math.prod(sizes) * dtype.itemsize])
            values = torch.frombuffer(raw, dtype=dtype).view(sizes) if raw else torch.zeros(sizes, dtype=dtype)
            whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = values
        return whole

    def blob(self, file: int, offset: int, nbytes: int, weights_only: bool = True) -> object:
        return torch.load(io.BytesIO(self.content[file][offset : offset + nbytes]), weights_only=weights_only)

    def object(self, name: str) -> object:
        return self.blob(*self.objects[name])


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Of a model with parameters of every kind, in bf16 with masters, by three ranks; and what was saved."""
    root = tmp_path_factory.mktemp("odd")
    saved = write_checkpoint(
        root, 3, "odd", BATCHES, precision="bf16", save_name="x", save_trained_only=False, save_extra={"note": {"a": [1, 2]}}
    )
    return Files(root / "x"), saved


@pytest.fixture(scope="module")
def tiled(tmp_path_factory):
    """Of a model in tiles, by two ranks that gave different extras, in fp16 with loss scale."""
    root = tmp_path_factory.mktemp("tiled")

    def rank_run(rank: int) -> None:
        model, optimizer = build("tiles", groups=2, precision="fp16", initial_loss_scale=8.0)
        average = zs.ema(model)
        train(model, optimizer, rank, BATCHES)
        zs.save(root, model, optimizer, name="x", step=12, extra={"mine": rank, "ours": "same", "average": average})
        zs.close(model)

    run_threads(2, rank_run)
    return Files(root / "x")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    write_checkpoint(root, 3, seeded(LowRank), save_name="x")
    return Files(root / "x")


def saver() -> tuple:
    return build("tied")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A model, its optimizer, and where they were saved."""
    model, optimizer = saver()
    yield model, optimizer, zs.save(tmp_path_factory.mktemp("one"), model, optimizer, name="x").path
    zs.close(model)


# -- the folder ----------------------------------------------------------------------------------------------------------


def test_must_1_a_manifest_makes_a_checkpoint(tmp_path):
    model, optimizer = saver()
    path = zs.save(tmp_path, model, optimizer, name="x").path
    path.rename(tmp_path / ".x")
    with pytest.raises(zs.CheckpointNotFound):
        zs.load(tmp_path, model, optimizer)
    (tmp_path / ".x").rename(tmp_path / "y")
    assert zs.load(tmp_path, model, optimizer).path == tmp_path / "y"
    (tmp_path / "y" / "manifest.json").rename(tmp_path / "y" / "manifest")
    with pytest.raises(zs.CheckpointNotFound):
        zs.load(tmp_path, model, optimizer)
    zs.close(model)


def test_must_2_everything_is_synced_before_the_rename(tmp_path, monkeypatch):
    """fsync of each file behind its last write, of the folder behind the last file, then the rename, then fsync of the root."""
    events: list[tuple[str, str]] = []
    nbytes: dict[str, int] = {}
    plain_sync, plain_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))
        nbytes[Path(events[-1][1]).name] = os.fstat(fd).st_size
        plain_sync(fd)

    def rename(source, target) -> None:
        events.append(("rename", str(target)))
        plain_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync), monkeypatch.setattr(os, "rename", rename)
    model, optimizer = saver()
    for save, extra in (("x", None), ("y", None), ("z", {"note": 1})):  # what DCP reads is as in the save before, and is not
        events.clear(), nbytes.clear()
        path = zs.save(tmp_path, model, optimizer, name=save, extra=extra).path
        named = events.index(("rename", str(path)))
        synced = [Path(name) for what, name in events[:named] if what == "sync"]
        names = [name.name for name in synced]
        for file in path.iterdir():
            assert any(file.name == name or name.startswith(f".{file.name}.") for name in names), f"{file.name} not in {names}"
            assert nbytes.get(file.name, file.stat().st_size) == file.stat().st_size, f"{file.name} was cut behind its fsync"
        folder = max(
            number for number, name in enumerate(synced) if name.name.startswith(f".{save}.") and name.parent == tmp_path
        )
        assert folder == len(synced) - 1 and ("sync", str(tmp_path)) in events[named:]
    zs.close(model)


def test_must_3_latest_names_the_newest(tmp_path):
    model, optimizer = saver()
    for name in ("b", "a"):
        zs.save(tmp_path, model, optimizer, name=name)
        assert (tmp_path / "latest").read_bytes() == f"{name}\n".encode()
    for content in (b"", b"c\n", None):
        (tmp_path / "latest").unlink() if content is None else (tmp_path / "latest").write_bytes(content)
        assert zs.load(tmp_path, model, optimizer).path == tmp_path / "a"
    (tmp_path / "latest").write_bytes(b"b\n")
    assert zs.load(tmp_path, model, optimizer).path == tmp_path / "b"
    zs.close(model)


def test_must_4_a_draft_is_locked_while_its_writer_lives(tmp_path, monkeypatch):
    seen = []
    plain = os.rename

    def rename(source, target) -> None:
        with open(Path(source) / "lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(Path(source).name)
        plain(source, target)

    model, optimizer = saver()
    for name, held in ((".a.123456.draft", True), (".b.123456.draft", False), (".c.123456.draft", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch() if held is not None else None
    with open(tmp_path / ".a.123456.draft" / "lock") as file, monkeypatch.context() as patch:
        fcntl.flock(file, fcntl.LOCK_EX)
        patch.setattr(os, "rename", rename)
        zs.save(tmp_path, model, optimizer, name="x")
    assert len(seen) == 1 and seen[0].startswith(".x.") and seen[0].endswith(".draft") and not (tmp_path / "x" / "lock").exists()
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".a.123456.draft"]
    zs.close(model)


def test_must_5_what_is_being_replaced_still_counts(tmp_path):
    model, optimizer = saver()
    zs.save(tmp_path, model, optimizer, name="x", step=3).path.rename(tmp_path / ".x.123456.old")
    assert zs.load(tmp_path, model, optimizer).step == 3 and zs.load(tmp_path, model, optimizer, name="x").step == 3
    zs.save(tmp_path, model, optimizer, name="y", step=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "x", "y"], "it has its name again"
    zs.close(model)


# -- manifest.json -------------------------------------------------------------------------------------------------------


def test_must_6_the_manifest_ends_with_its_own_checksum(odd):
    files, _ = odd
    text, _, tail = files.text.rpartition(b',"checksum":"')
    assert tail == f'{xxhash.xxh3_64_hexdigest(text)}"}}\n'.encode() and files.text.count(b"\n") == 1


def rewritten(path: Path, change) -> None:
    """The manifest with another content and the checksum that fits it."""
    body = json.loads((path / "manifest.json").read_bytes())
    body.pop("checksum")
    change(body)
    text = json.dumps(body, separators=(",", ":"))[:-1]
    (path / "manifest.json").write_text(f'{text},"checksum":"{xxhash.xxh3_64_hexdigest(text.encode())}"}}\n')


def test_must_7_the_version(odd, tmp_path):
    assert (odd[0].manifest["format"], odd[0].manifest["version"]) == ("zeroshard-checkpoint", 1)
    model, optimizer = saver()
    path = zs.save(tmp_path, model, optimizer, name="x").path
    rewritten(path, lambda body: body.update(of_tomorrow=[1]))
    assert zs.load(tmp_path, model, optimizer).path == path
    rewritten(path, lambda body: body.update(version=3))
    with pytest.raises(zs.CheckpointError, match="newer version of zeroshard"):
        zs.load(tmp_path, model, optimizer)
    zs.close(model)


NAME = "model.blocks.1.into.weight"
BEYOND = f"expected {NAME} within the .* bytes of rank-00000.distcp"


def boxes(body: dict) -> list:
    return body["tensors"][NAME]["boxes"]


def overlapping(body: dict) -> None:
    """Two halves of so many elements as the tensor, of which one lies a row too far on."""
    file, data, offset, nbytes, _, (rows, columns) = boxes(body)[0]
    body["tensors"][NAME]["boxes"] = [
        [file, data, offset, nbytes, [0, 0], [rows - 1, columns]], [file, data, offset, nbytes, [rows - 2, 0], [1, columns]]
    ]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "told"), [
    (lambda body: body.update(format="another"), zs.CheckpointError, "format: expected 'zeroshard-checkpoint', got 'another'"),
    (lambda body: body.update(version="1"), zs.CheckpointError, "does not follow the format of zs.save.*TypeError"),
    (lambda body: body.update(digest_nbytes=4096), zs.CheckpointError, "expected xxh3-64 of 1,048,576 bytes each, got .*4096"),
    (lambda body: body.update(digest="crc"), zs.CheckpointError, "expected xxh3-64 .* got .'crc'"),
    (lambda body: body.pop("step"), zs.CheckpointError, "manifest.json lacks step"),
    (lambda body: body.pop("ties"), zs.CheckpointError, "does not follow the format of zs.save.*KeyError: 'ties'"),
    (lambda body: body["tensors"][NAME].update(dtype="float3"), zs.CheckpointError, "AttributeError: .*float3"),
    (lambda body: body["files"][0].update(name="../x/rank-00000.distcp"), zs.CheckpointCorrupt, "names of files in its folder"),
    (lambda body: body["objects"]["zeroshard.state"].__setitem__(1, 10**9), zs.CheckpointCorrupt, "zeroshard.state within the"),
    (lambda body: boxes(body)[0].__setitem__(0, 7), zs.CheckpointCorrupt, "found file 7"),
    (lambda body: boxes(body)[0].__setitem__(1, 10**9), zs.CheckpointCorrupt, BEYOND),
    (lambda body: boxes(body)[0].__setitem__(1, -64), zs.CheckpointCorrupt, BEYOND),
    (lambda body: boxes(body)[0].__setitem__(3, 10**9), zs.CheckpointCorrupt, BEYOND),
    (lambda body: boxes(body)[0].__setitem__(4, [1, 0]), zs.CheckpointCorrupt, f"boxes of {NAME} within"),
    (lambda body: boxes(body).append(boxes(body)[0]), zs.CheckpointCorrupt, f"elements of {NAME}, found [0-9]"),
    (lambda body: boxes(body).clear(), zs.CheckpointCorrupt, f"elements of {NAME}, found 0"),
    (overlapping, zs.CheckpointCorrupt, f"every element of {NAME} once, found element"),
])  # fmt: skip
@pytest.mark.parametrize("verify", [True, "before", False])
def test_must_7_to_12_what_the_reader_refuses(change, error, told, verify, one, tmp_path):
    model, optimizer, saved = one
    path = Path(shutil.copytree(saved, tmp_path / "x"))
    rewritten(path, change)
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=told):
        zs.load(path, model, optimizer, verify=verify)
    assert_equal(snapshot(model, optimizer), before)


def test_must_8_the_facts(odd, tiled):
    facts = {
        key: odd[0].manifest[key] for key in ("step", "world_size", "stage", "precision", "optimizer", "trained_only", "per_rank")
    }
    assert facts == {
        "step": 3, "world_size": 3, "stage": 3, "precision": "bf16", "optimizer": "AdamW", "trained_only": False, "per_rank": [],
    }  # fmt: skip
    assert (odd[0].manifest["torch"], odd[0].manifest["zeroshard"]) == (torch.__version__, zs.__version__)
    assert odd[0].manifest["time"].endswith("Z") and tiled.manifest["per_rank"] == ["mine"]


def test_must_9_every_file_and_its_checksums(odd, tmp_path):
    write_checkpoint(tmp_path, 1, torch.nn.Linear(700, 700), save_name="x")  # of more than a block
    for files in (odd[0], Files(tmp_path / "x")):
        step = files.manifest["digest_nbytes"]
        assert {file["name"] for file in files.manifest["files"]} == {path.name for path in files.path.iterdir()} - {
            "manifest.json"
        }
        for file, content in zip(files.manifest["files"], files.content, strict=True):
            assert file["nbytes"] == len(content)
            assert file["digests"] == [xxhash.xxh3_64_hexdigest(content[at : at + step]) for at in range(0, len(content), step)]
    assert len(files.manifest["files"][0]["digests"]) > 1 and step == 1 << 20


def test_must_10_and_11_boxes_say_where_elements_lie(odd):
    files, saved = odd
    assert all(entry.keys() == {"dtype", "shape", "keys", "boxes"} for entry in files.tensors.values())
    for name, value in saved.weights.items():
        if isinstance(value, torch.Tensor) and f"model.{name}" in files.tensors:
            assert torch.equal(files.tensor(f"model.{name}"), value), name
            assert files.tensors[f"model.{name}"]["keys"] == ["model", name]
    assert files.tensors["optim.state.prime.exp_avg"]["keys"] == ["optim", "state", "prime", "exp_avg"]
    assert files.tensor("model.turned").shape == (7, 5) and files.tensor("model.seen").dtype == torch.int64


def test_must_12_boxes_cover_each_tensor_once(odd, tiled, adapters):
    cut = 0
    for files in (odd[0], tiled, adapters):
        for name, entry in files.tensors.items():
            count = torch.zeros(entry["shape"], dtype=torch.int64)
            for *_, offsets, sizes in entry["boxes"]:
                count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
            assert (count == 1).all() and entry["boxes"], name
            cut += len(entry["boxes"]) > 1
    assert cut > 20 and [box[4:] for box in odd[0].tensors["model.empty"]["boxes"]] == [[[0, 0], [0, 3]]]


def test_must_13_each_box_and_object_is_a_file_of_torch_save(odd, tiled):
    for files in (odd[0], tiled):
        for name, entry in files.tensors.items():
            whole = files.tensor(name)
            for file, data, offset, nbytes, offsets, sizes in entry["boxes"]:
                value = files.blob(file, offset, nbytes)
                assert offset < data < offset + nbytes and data % 64 == 0
                assert torch.equal(value, whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]), name
        for name in files.objects:
            files.object(name)


def test_must_14_dcp_reads_the_same(odd):
    files, _ = odd
    metadata = FileSystemReader(files.path).read_metadata()
    aliases = {f"model.{alias}": files.tensors[f"model.{first}"] for alias, first in files.manifest["ties"].items()}
    assert aliases and metadata.state_dict_metadata.keys() == files.tensors.keys() | aliases.keys() | files.objects.keys()
    for name, entry in {**files.tensors, **aliases}.items():
        found = metadata.state_dict_metadata[name]
        assert (list(found.size), found.properties.dtype) == (entry["shape"], getattr(torch, entry["dtype"]))
        assert [[list(c.offsets), list(c.sizes)] for c in found.chunks] == [box[4:] for box in entry["boxes"]]
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                file, _, offset, nbytes, offsets, _ = entry["boxes"][index.index]
                assert (files.manifest["files"][file]["name"], offset, nbytes) == (info.relative_path, info.offset, info.length)
                assert list(index.offset) == offsets


# -- names ---------------------------------------------------------------------------------------------------------------


def test_must_15_names_and_shapes_are_those_of_the_whole_model(tiled):
    whole = seeded(MODELS["tied"]).state_dict()
    found = {name.removeprefix("model."): entry["shape"] for name, entry in tiled.tensors.items() if name.startswith("model.")}
    assert found == {name: list(value.shape) for name, value in whole.items() if name != "head.weight"}


def test_must_16_masters_and_ties(odd, tiled):
    assert odd[0].tensors["model.prime"]["dtype"] == "float32" and odd[0].tensors["model.narrow.weight"]["dtype"] == "float32"
    for files in (odd[0], tiled):
        assert files.manifest["ties"] == {"head.weight": "embedding.weight"}
        assert "model.head.weight" not in files.tensors


def test_must_17_optimizer_states_and_groups(tiled, odd):
    shapes = {name: tuple(value.shape) for name, value in seeded(MODELS["tied"]).named_parameters()}
    for name, shape in shapes.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert tuple(tiled.tensors[f"optim.state.{name}.{key}"]["shape"]) == shape
        assert tiled.tensor(f"optim.state.{name}.step").item() == 3
    assert tiled.manifest["scalars"] == odd[0].manifest["scalars"] == ["step"]
    groups = tiled.object("optim.param_groups")
    assert [group["lr"] for group in groups] == [3e-3, 5e-3]
    assert sorted(name for group in groups for name in group["params"]) == sorted(shapes)
    for name, state in odd[1].states.items():
        assert torch.equal(odd[0].tensor(f"optim.state.{name}.exp_avg"), state["exp_avg"].float()), name


def test_must_17_a_manifest_that_does_not_name_scalars(tmp_path):
    """As earlier versions wrote it: shapes tell them."""
    model, optimizer = saver()
    train(model, optimizer, 0, BATCHES)
    path, before = zs.save(tmp_path, model, optimizer, name="x").path, snapshot(model, optimizer)
    rewritten(path, lambda body: body.pop("scalars"))
    train(model, optimizer, 0, BATCHES)
    zs.load(path, model, optimizer)
    assert_equal(snapshot(model, optimizer), before)
    zs.close(model)


def test_must_18_own_state_and_generators(odd, tiled):
    assert odd[0].object("zeroshard.state") == {"steps": 3, "scaler": None}
    assert tiled.object("zeroshard.state") == {"steps": 3, "scaler": {"scale": 8.0, "good_steps": 3}}
    for files, world in ((odd[0], 3), (tiled, 2)):
        ranks = [files.object(f"zeroshard.rng.{rank}") for rank in range(world)]
        assert all(state["torch"].dtype == torch.uint8 and state["python"] for state in ranks)
        assert f"zeroshard.rng.{world}" not in files.objects


def test_must_19_extras(odd, tiled):
    assert odd[0].object("extra.note") == {"a": [1, 2]}
    assert [tiled.object(f"extra.mine.{rank}") for rank in range(2)] == [0, 1] and tiled.object("extra.ours") == "same"
    assert "extra.mine" not in tiled.objects
    kept, shapes = tiled.object("extra.average"), {name: entry["shape"] for name, entry in tiled.tensors.items()}
    assert set(kept) == {"decay", "updates"}
    slices = {name.removeprefix("slices.average."): shape for name, shape in shapes.items() if name.startswith("slices.")}
    assert slices and all(shape == shapes[f"model.{name}"] for name, shape in slices.items())
    assert all(tiled.tensors[f"slices.average.{name}"]["keys"] == ["slices", "average", name] for name in slices)


def test_must_20_nothing_of_ours_needs_trust(odd, tiled, adapters):
    for files in (odd[0], tiled, adapters):
        assert all(files.blob(*entry, weights_only=True) is not None for entry in files.objects.values())


def identity(values: torch.Tensor) -> str:
    signed, total = {2: torch.int16, 4: torch.int32}[values.itemsize], 0
    wrap = lambda number: (number + 2**63) % 2**64 - 2**63  # noqa: E731
    for at, bits in enumerate(values.contiguous().view(-1).view(signed).tolist()):
        mixed = wrap((bits + 1) * MIX[0] + at * MIX[1])
        mixed = wrap((mixed ^ (mixed >> 29)) * MIX[2])
        total += mixed ^ (mixed >> 32)
    return f"{total % 2**64:016x}"


def test_must_21_what_is_left_out_is_known_by_its_identity(adapters):
    model = seeded(LowRank)
    frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
    assert adapters.manifest["trained_only"] and adapters.manifest["frozen"].keys() == frozen.keys()
    assert not any(f"model.{name}" in adapters.tensors for name in frozen)
    for name, param in frozen.items():
        values = [identity(param.detach().to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        assert adapters.manifest["frozen"][name] == ["torch.float32", list(param.shape), *values], name


def test_must_22_damage_is_found_before_anything_changes(tmp_path):
    """In detail: test_checkpoint_damage.py."""
    model, optimizer = saver()
    path = zs.save(tmp_path, model, optimizer, name="x").path / "rank-00000.distcp"
    content = bytearray(path.read_bytes())
    content[Files(path.parent).tensors["model.norm.weight"]["boxes"][0][1]] ^= 1
    path.write_bytes(content)
    train(model, optimizer, 0, BATCHES)
    before = snapshot(model, optimizer)
    with pytest.raises(zs.CheckpointCorrupt):
        zs.load(tmp_path, model, optimizer)
    assert_equal(snapshot(model, optimizer), before)
    zs.load(tmp_path, model, optimizer, verify=False)
    zs.close(model)


def test_the_listing_for_dcp_is_made_again_only_where_something_lies_elsewhere(tmp_path, monkeypatch):
    made = []
    plain = dcp.metadata_of
    monkeypatch.setattr(dcp, "metadata_of", lambda *args: made.append(plain(*args)) or made[-1])
    model, optimizer = build("tied")
    train(model, optimizer, 0, BATCHES[:1])
    paths = [zs.save(tmp_path, model, optimizer, name=name, extra={"note": "x" * size}).path
             for name, size in (("a", 10), ("b", 10), ("c", 10_000), ("d", 10))]  # fmt: skip
    assert len(made) == 3 and made[0] == made[2] != made[1]
    contents = [(path / ".metadata").read_bytes() for path in paths]
    assert contents == [made[0], made[0], made[1], made[2]]
    zs.load(tmp_path, model, optimizer, name="b")
    zs.close(model)
