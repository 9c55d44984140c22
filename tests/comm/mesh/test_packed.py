"""Packed gathers and reductions (qwZ, qgZ) on real ranks: all ranks keep the same values, in bits, near those of plain ones."""

import copy
import functools
import math
import os

import pytest
import torch
from helpers import OddGPT, adamw, differences, flat, seeded, token_batches
from mesh_kit import NETWORKS, on_ranks, options_of

import zeroshard as zs
from zeroshard.engine.ledger import RESIDUALS
from zeroshard.engine.runtime import runtime_of
from zeroshard.utils.compression import Compression

WORLD, SIZE = 4, 2
SLOW = os.environ.get("ZEROSHARD_SLOW") == "1"
MODEL = seeded(lambda: OddGPT(dim=16, layers=2))
DATA = token_batches(6, 1, WORLD)
PACKED = {"min_numel": 0, "exempt": ("*norm*",), "block": 32, "force": True}
CELLS = {  # kind, stage, codec of weights, codec of gradients
    "qwZ 1": ("plain", 1, "int8", None),
    "qwZ 2": ("plain", 2, "int8", None),
    "qwZ 3": ("plain", 3, "fp8", None),
    "qgZ 0": ("plain", 0, None, "int8"),
    "qgZ 1": ("plain", 1, None, "int4"),
    "qgZ 2": ("plain", 2, None, "int8"),
    "qgZ 3": ("plain", 3, None, "int8"),
    "both 3": ("plain", 3, "int8", "int8"),
    "all": ("hpz", 3, "int8", "int8"),
    "all 4 bits": ("hpz", 3, "int4", "int4"),
    "states": ("states", 2, "int8", "int8"),
    "groups": ("groups", 3, "int8", "int8"),
    "groups 1": ("groups", 1, "int8", "int8"),
    "groups 0": ("groups", 0, None, "int8"),
    "low rank": ("plain", 3, None, "low_rank"),
    "low rank hpz": ("hpz", 3, None, "low_rank"),
    "low rank groups": ("groups", 1, None, "low_rank"),
    "top k": ("hpz", 3, None, "top_k"),
}


def options(cell, **more):
    kind, stage, weights, gradients = CELLS[cell]
    packed = {**PACKED, **more}
    found = {"stage": stage, **options_of(kind, SIZE)}
    if weights is not None:
        found["zero_quantized_weights"] = Compression(weights, **packed)
    if gradients is not None:
        found["zero_quantized_gradients"] = Compression(gradients, ratio=0.25, **packed)
    return found


def run(rank, cell_options, steps=DATA, **more):
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, adamw(model.parameters()), **cell_options, **more)
    losses, kept = [], []
    for micros in steps:
        loss = model(*micros[0][rank])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        kept.append(zs.full_state_dict(model, masters=True))
    runtime, report = runtime_of(model), zs.report(model)
    with torch.no_grad():  # what ranks compute with
        seen = model(*DATA[0][0][0]).item()
    local = {name: value.clone() for name, value in model.state_dict().items()} if cell_options.get("stage") in (0, 1, 2) else {}
    residuals = runtime.tiers.ledger.now[RESIDUALS]
    zs.close(model)
    left = {name: nbytes for name, nbytes in runtime.tiers.ledger.now.items() if nbytes}
    return losses, kept, seen, local, report, residuals, left


@functools.cache
def plain_losses():
    return [each[0] for each in on_ranks(WORLD, "shared", lambda rank, more: run(rank, {"stage": 3}))]


@pytest.mark.parametrize("cell, network", [
    (cell, network) for number, cell in enumerate(CELLS) for place, network in enumerate(NETWORKS) if number % 3 == place or SLOW
])  # fmt: skip
def test_ranks_agree_and_stay_near_plain_ones(cell, network):
    """Each codec and kind on one of the networks (ZEROSHARD_SLOW=1: on all)."""
    results = on_ranks(WORLD, network, lambda rank, more: run(rank, options(cell), **more))
    losses, kept, seen, local, report, _, left = results[0]
    for others in results[1:]:
        assert others[2] == seen and not differences(others[1][-1], kept[-1]) and not differences(others[3], local)
    assert left == {}
    plain = plain_losses()
    tolerance = 0.1 if "4" in str(CELLS[cell]) or "low" in cell or "top" in cell else 0.02
    for rank in range(WORLD):
        for got, one in zip(results[rank][0], plain[rank], strict=True):
            assert math.isfinite(got) and abs(got - one) < tolerance * one
    assert losses != plain[0]  # something was packed
    if "low" not in cell:
        assert report.compression_errors and all(0 <= error < 0.9 for error in report.compression_errors.values())


@pytest.mark.parametrize("network", ["shared", "tagged"])
def test_warm_up_steps_are_plain_and_so_is_what_is_exempt(network):
    def on_rank(rank, more):
        return [
            run(rank, options(cell, warmup_steps=3), **more)[1] for cell in ("both 3", "all", "groups", "low rank", "qwZ 1")
        ] + [run(rank, {"stage": 3, **options_of(kind, SIZE)}, **more)[1] for kind in ("plain", "hpz", "groups")]

    for both, hpz, groups, low, weights, *plain in on_ranks(WORLD, network, on_rank):
        for got, one in ((both, plain[0]), (hpz, plain[1]), (groups, plain[2]), (low, plain[0]), (weights, plain[0])):
            assert not differences(got[1], one[1])
            assert differences(got[-1], one[-1])


def test_exempt_parameters_have_the_bits_of_plain_ones():
    """One step: gradients of the same values, of which only matrices were packed."""
    cells = options("qgZ 3"), {"stage": 3}
    results = on_ranks(WORLD, "tagged", lambda rank, more: [run(rank, found, DATA[:1], **more)[1] for found in cells])
    for (packed,), (plain,) in results:
        spared = [name for name in plain if "norm" in name or plain[name].dim() < 2]
        assert len(spared) > 5 and not differences({n: packed[n] for n in spared}, {n: plain[n] for n in spared})
        assert all(not torch.equal(packed[name], plain[name]) for name in plain if name not in spared)


def test_shared_memory_travels_plain_unless_forced():
    def on_rank(rank, more):
        found = options("all", force=False)
        return run(rank, found), run(rank, {"stage": 3, **options_of("hpz", SIZE)})

    for got, plain in on_ranks(WORLD, "shared", on_rank):
        assert not differences(got[1][-1], plain[1][-1])
        notes = " ".join(got[4].deviations)
        assert "gradients are sent unquantized between ranks that read each other's memory" in notes
        assert "parameters are sent unquantized between ranks that read each other's memory" in notes


def test_error_feedback_brings_sums_nearer_and_is_counted():
    """The sum over steps of what arrives: with feedback what is lost is bounded, and is in the ledger."""

    def on_rank(rank, more):
        found = []
        for feedback in (False, True, None):
            model = copy.deepcopy(MODEL)
            sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
            given = {"stage": 3} if feedback is None else options("qgZ 1", error_feedback=feedback)
            model, optimizer = zs.shard(model, sgd, **more, **{**given, "stage": 2})
            total: dict = {}
            for _ in range(12):
                model(*DATA[0][0][rank]).backward()
                for name, grad in zs.full_gradients(model).items():
                    total[name] = total.get(name, 0) + grad.clone()
                optimizer.step()
                optimizer.zero_grad()
            found.append((flat(total), runtime_of(model).tiers.ledger.now[RESIDUALS]))
            zs.close(model)
        return found

    for (without, none), (with_, held), (exact, _) in on_ranks(WORLD, "tagged", on_rank):
        assert (with_ - exact).norm() < 0.5 * (without - exact).norm()
        matrices = sum(p.numel() for name, p in MODEL.named_parameters() if p.dim() > 1)
        assert none == 0 and 4 * matrices <= held < 5 * matrices + 4096


@pytest.mark.parametrize("cell", ["both 3", "all", "groups", "qwZ 1"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision(cell, precision):
    """Packed from the masters; what overflows in fp16 is found, and skipped by all."""
    low = {"precision": precision, **({"initial_loss_scale": 2.0**8} if precision == "fp16" else {})}

    def on_rank(rank, more):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, adamw(model.parameters()), **options(cell), **low, **more)
        skipped = []
        for step, micros in enumerate(DATA[:4]):
            loss = model(*micros[0][rank])
            (loss * (1e9 if step == 1 and rank == 2 and precision == "fp16" else 1.0)).backward()
            optimizer.step()
            skipped.append(optimizer.last_step.skipped)
            optimizer.zero_grad()
        with torch.no_grad():
            seen = model(*DATA[0][0][0]).item()
        return skipped, seen, zs.full_state_dict(model, masters=True)

    results = on_ranks(WORLD, "tagged", on_rank)
    for skipped, seen, weights in results:
        assert skipped == [False, precision == "fp16", False, False] and seen == results[0][1]
        assert not differences(weights, results[0][2])
