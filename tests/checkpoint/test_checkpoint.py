"""zs.save and zs.load: whatever saved and whatever loads, the values are the same bits; and a run goes on as if never stopped."""

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_kit import (
    OPTIMIZERS,
    TIED,
    UNTIED,
    VOCAB,
    assert_equal,
    build,
    read_checkpoint,
    snapshot,
    train,
    write_checkpoint,
)
from helpers import Branches, seeded, token_batches
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from offloading import emptied, offload, tiers

import zeroshard as zs
from zeroshard.testing import run_threads

BATCHES = [step[0] for step in token_batches(8, 1, 8, VOCAB)]
SLOW = os.environ.get("ZEROSHARD_SLOW") == "1"


# -- any world, any stage, any tier --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Side:
    """How a run is cut that saves, or loads. places: of parameter, gradient, optimizer."""

    world: int
    stage: int = 3
    precision: str = "fp32"
    places: tuple[str, str, str] = ("none", "none", "none")
    units: str = "auto"
    model: str = "tied"

    def options(self, disk: str) -> dict:
        parameter, gradient, optimizer = self.places
        allowed = (
            parameter if self.stage == 3 else "none",
            gradient if self.stage >= 2 else "none",
            optimizer if self.stage else "none",
        )
        if allowed[1] != "none" and allowed[2] == "none":
            allowed = (allowed[0], "none", "none")  # gradients off the device need an optimizer there
        offloads = tiers(disk, *allowed) if set(allowed) != {"none"} else {}
        scale = {"initial_loss_scale": 256.0, "loss_scale_window": 2} if self.precision == "fp16" else {}
        return {"stage": self.stage, "precision": self.precision, "units": self.units, **scale, **offloads}


places = st.tuples(*[st.sampled_from(["none", "none", "cpu", "nvme"])] * 3)
sides = st.builds(
    Side, st.integers(1, 8), st.integers(0, 3), st.sampled_from(["fp32", "fp32", "bf16", "fp16"]), places,
    st.sampled_from(["auto", "model", "leaf"]),
)  # fmt: skip
families = st.sampled_from([TIED, TIED, UNTIED, ("odd",)])


DRAWN = settings(  # anew in every run: a failure prints how to draw it again
    max_examples=100 if SLOW else 4, derandomize=False, print_blob=True, suppress_health_check=list(HealthCheck),
    phases=list(Phase) if SLOW else [Phase.explicit, Phase.generate],
)  # fmt: skip


@DRAWN
@given(left=sides, right=sides, family=families, pick=st.tuples(*[st.integers(0, 1)] * 2), optimizer=st.sampled_from(list(OPTIMIZERS)),
       asynchronous=st.booleans(), groups=st.integers(1, 2))  # fmt: skip
@example(Side(4, 3), Side(3, 1), TIED, (0, 1), "adamw", False, 2)
@example(Side(8, 3, "bf16"), Side(1, 0), TIED, (0, 1), "momentum", True, 1)
@example(
    Side(3, 3, "fp16", ("nvme", "nvme", "nvme")),
    Side(5, 2, "bf16", ("none", "none", "cpu"), "leaf"),
    ("odd",),
    (0, 0),
    "lion",
    True,
    2,
)
@example(Side(1, 0), Side(2, 3, "fp32", ("cpu", "cpu", "nvme"), "model"), UNTIED, (0, 1), "foreach", False, 1)
@example(Side(5, 1, "bf16"), Side(7, 2), ("odd",), (0, 0), "adagrad", False, 2)
@example(Side(2, 2, "fp32", ("none", "cpu", "nvme")), Side(6, 3), UNTIED, (1, 0), "fused", True, 1)
@pytest.mark.limit(3000 if SLOW else 120)
def test_b09_every_round_trip_is_equal_in_bits(left, right, family, pick, optimizer, asynchronous, groups):
    """Masters, buffers, states, step counts, options of groups. Examples that cover every choice, and some drawn at random: a hundred with ZEROSHARD_SLOW=1."""
    left, right = (
        dataclasses.replace(s, model=family[min(p, len(family) - 1)]) for s, p in zip((left, right), pick, strict=True)
    )
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as swap, emptied(Path(swap)) as disk:
        common = {"optimizer": optimizer, "groups": groups}
        saved = write_checkpoint(
            Path(root),
            left.world,
            left.model,
            BATCHES[: 1 + SLOW],
            save_asynchronous=asynchronous,
            save_trained_only=False,
            **common,
            **left.options(disk),
        )
        for got in read_checkpoint(Path(root), right.world, right.model, **common, **right.options(disk)):
            assert_equal(got, saved, f"{left} -> {right}")


# -- going on ------------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=9),
}
RUNS = {  # scheduler, then options of zs.shard; "disk" stands for a folder
    "fp32": ("lambda", {"stage": 3}),
    "fp16 loss scale": ("cosine", {"stage": 2, "precision": "fp16", "initial_loss_scale": 2.0**18, "loss_scale_window": 2}),
    "bf16, states on disk": ("one cycle", {"stage": 3, "precision": "bf16", "places": ("nvme", "cpu", "nvme")}),
    "delayed update": ("lambda", {"stage": 2, "places": ("none", "cpu", "cpu"), "delayed_update": 1}),
    "part of the states offloaded": ("cosine", {"stage": 3, "places": ("none", "none", "cpu"), "ratio": 0.5}),
}


def options_of(name: str, disk: str) -> dict:
    options = dict(RUNS[name][1])
    if "places" in options:
        ratio = {"ratio": options.pop("ratio")} if "ratio" in options else {}
        places = options.pop("places")
        options |= tiers(disk, *places) | ({"offload_optimizer": offload(places[2], disk, **ratio)} if ratio else {})
    return options


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_as_if_never_stopped(name, asynchronous, tmp_path):
    """Losses, weights, states, rates and loss scales after the load are those of the run that was not interrupted."""
    (tmp_path / "swap").mkdir()
    make = SCHEDULERS[RUNS[name][0]]

    def rank_run(rank: int, disk: str) -> tuple:
        model, optimizer = build("tied", groups=2, **options_of(name, disk))
        scheduler = make(optimizer)
        train(model, optimizer, rank, BATCHES[:3], scheduler.step)
        save = zs.save(tmp_path / "run", model, optimizer, extra={"scheduler": scheduler}, asynchronous=asynchronous)
        rest = train(model, optimizer, rank, BATCHES[3:7], scheduler.step)
        save.wait()
        ended = snapshot(model, optimizer), rest, optimizer.last_step.loss_scale, scheduler.get_last_lr()
        zs.close(model)
        model, optimizer = build("tied", seed=5, groups=2, **options_of(name, disk))
        scheduler = make(optimizer)
        loaded = zs.load(tmp_path / "run", model, optimizer, extra={"scheduler": scheduler})
        assert (loaded.path, loaded.rng) == (save.path, "restored")
        rest = train(model, optimizer, rank, BATCHES[3:7], scheduler.step)
        again = snapshot(model, optimizer), rest, optimizer.last_step.loss_scale, scheduler.get_last_lr()
        zs.close(model)
        return ended, again

    with emptied(tmp_path / "swap") as disk:
        for ended, again in run_threads(2, rank_run, disk):
            assert_equal(again[0], ended[0], name)
            assert again[1:] == ended[1:]


@pytest.mark.parametrize("places", [("none", "none", "none"), ("none", "cpu", "nvme")], ids=["device", "disk"])
def test_parameters_that_missed_steps_keep_their_own_counts(places, tmp_path):
    """A branch that took no part in a step is a step behind, before and after; and what never stepped has no state."""
    (tmp_path / "swap").mkdir()
    chosen = [(0, 1), (1,), (1,), (0, 1), (0, 1, 2)]
    values = torch.randn(5, 2, 3, 6, generator=torch.Generator().manual_seed(3))
    batches = [[(values[step, rank], chosen[step]) for rank in range(2)] for step in range(5)]
    base = seeded(Branches)

    def rank_run(rank: int, disk: str) -> tuple:
        model, optimizer = build(base, **tiers(disk, *places))
        train(model, optimizer, rank, batches[:3])
        zs.save(tmp_path / "run", model, optimizer)
        middle = snapshot(model, optimizer)
        train(model, optimizer, rank, batches[3:])
        ended = snapshot(model, optimizer)
        zs.close(model)
        model, optimizer = build(seeded_branches, **tiers(disk, *places))
        zs.load(tmp_path / "run", model, optimizer)
        loaded = snapshot(model, optimizer)
        train(model, optimizer, rank, batches[3:])
        again = snapshot(model, optimizer)
        zs.close(model)
        return middle, loaded, ended, again

    seeded_branches = seeded(Branches, 5)
    with emptied(tmp_path / "swap") as disk:
        for middle, loaded, ended, again in run_threads(2, rank_run, disk):
            counts = {name: state.get("step") for name, state in middle.states.items()}
            assert [counts["stem.weight"], counts["branches.0.0.weight"], counts["branches.2.0.weight"]] == [3, 1, None]
            assert_equal(loaded, middle, "loaded")
            assert_equal(again, ended, "after two more steps")
