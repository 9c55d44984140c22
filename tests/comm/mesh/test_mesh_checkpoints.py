"""What is saved at one mesh is loaded at any other; groups that hold the same write once, secondary shards never."""

import copy

import pytest
import torch
from helpers import OddGPT, adamw, differences, seeded, token_batches
from mesh_kit import on_ranks, options_of
from safetensors.torch import load_file

import zeroshard as zs

MODEL = seeded(OddGPT)
DATA = token_batches(4, 1, 4)
PLACES = {  # world, network, options
    "groups": (4, "tagged", {"stage": 3, **options_of("groups", 2)}),
    "groups of 1": (4, "shared", {"stage": 2, **options_of("groups", 1)}),
    "hpz": (4, "tagged", {"stage": 3, **options_of("hpz", 2)}),
    "states": (4, "shared", {"stage": 3, **options_of("states", 2), "precision": "bf16"}),
    "plain": (2, "shared", {"stage": 1}),
}


def start(options, more):
    model = copy.deepcopy(MODEL)
    return zs.shard(model, adamw(model.parameters()), **options, **more)


def whole(model):
    states = zs.full_optimizer_state(model)
    flat = {f"{name}.{key}": torch.as_tensor(value) for name, entries in states.items() for key, value in entries.items()}
    return {**zs.full_state_dict(model, masters=True), **flat}


def saved(place, path):
    world_size, network, options = PLACES[place]

    def on_rank(rank, more):
        model, optimizer = start(options, more)
        for micros in DATA[:2]:
            model(*micros[0][rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        zs.save(path / "checkpoint", model, optimizer, step=2)
        zs.save_safetensors(model, path / "whole.safetensors")
        return whole(model)

    return on_ranks(world_size, network, on_rank)[0]


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_is_loaded_at_every_mesh(place, tmp_path):
    given = saved(place, tmp_path)
    for other, (world_size, network, options) in PLACES.items():

        def on_rank(rank, more, options=options):
            model, optimizer = start(options, more)
            zs.load(tmp_path / "checkpoint", model, optimizer)
            found = whole(model)
            model(*DATA[2][0][rank]).backward()
            optimizer.step()
            return found, zs.full_state_dict(model)

        results = on_ranks(world_size, network, on_rank)
        for found, after in results:
            if PLACES[other][2].get("precision") == PLACES[place][2].get("precision"):
                assert not differences(found, given), other
            assert not differences(after, results[0][1]), other
    exported = load_file(tmp_path / "whole.safetensors")
    assert all(torch.equal(exported[name], given[name].to(exported[name].dtype)) for name in exported)


def test_what_is_alike_is_written_once(tmp_path):
    """By sizes: two groups write no more than ranks that hold all of it once; each rank's file has some of its own."""
    totals = {}
    for place in ("groups", "hpz"):
        saved(place, tmp_path / place)
        files = [file for file in (tmp_path / place).rglob("*") if file.is_file() and file.name != "whole.safetensors"]
        totals[place] = sum(file.stat().st_size for file in files)
    assert totals["groups"] <= totals["hpz"], totals


@pytest.mark.parametrize("place", ["groups", "groups of 1"])
def test_what_a_checkpoint_of_groups_leaves_out_is_known_again(place, tmp_path):
    """Each group of ranks holds all of it: it counts once."""
    world_size, network, options = PLACES[place]

    def on_rank(rank, more):
        model = copy.deepcopy(MODEL)
        model.blocks[0].requires_grad_(False)
        model, optimizer = zs.shard(model, adamw([p for p in model.parameters() if p.requires_grad]), **options, **more)
        zs.save(tmp_path, model, optimizer, trained_only=True)
        return zs.load(tmp_path, model, optimizer).facts["trained_only"]

    assert all(on_ranks(world_size, network, on_rank))
