"""The dynamic loss scale step by step: when it is halved, when doubled, and what overflows in between use up.

The sequences with a delay of 1 are those of DeepSpeed's DynamicLossScaler (0.19.8): worked out by hand, and 300 random ones compared once.
"""

import pytest

import zeroshard as zs
from zeroshard.zero.mixed_precision import LossScaler

# name: (options, steps (x: an overflow), the scale after each)
SEQUENCES = {
    "plain": ({}, "....x..x", [256, 512, 512, 1024, 512, 512, 1024, 512]),
    "delay": ({"loss_scale_delay": 1}, ".......", [256, 256, 512, 512, 1024, 1024, 2048]),
    "delay after each overflow": ({"loss_scale_delay": 1}, "x..x...", [128, 128, 128, 64, 64, 64, 128]),
    "hysteresis": (
        {"loss_scale_delay": 1, "loss_scale_hysteresis": 2}, "xxxx.x...xx", [256, 128, 64, 32, 32, 16, 16, 16, 32, 32, 16],
    ),
    "consecutive": (
        {"loss_scale_delay": 1, "loss_scale_hysteresis": 2, "consecutive_hysteresis": True, "loss_scale_window": 3},
        "x.x.x.xx.xx", [256, 256, 256, 256, 256, 256, 256, 128, 128, 128, 64],
    ),
    "an overflow that is let pass delays": (
        {"loss_scale_delay": 1, "loss_scale_hysteresis": 3, "loss_scale_window": 3},
        "xxx....x.xxx", [256, 256, 128, 128, 128, 128, 256, 256, 256, 256, 128, 64],
    ),
    "minimum": ({"loss_scale_delay": 1, "min_loss_scale": 64.0}, "xxxxx...", [128, 64, 64, 64, 64, 64, 64, 128]),
}  # fmt: skip


def scaler_of(options):
    return LossScaler(zs.Config(precision="fp16", **{"initial_loss_scale": 256.0, "loss_scale_window": 2, **options}))


def scales(scaler, steps):
    found = []
    for step in steps:
        scaler.update(overflow=step == "x")
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_scale_after_each_step(name):
    options, steps, expected = SEQUENCES[name]
    assert scales(scaler_of(options), steps) == expected


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_checkpoint_between_two_steps_changes_nothing(name):
    options, steps, expected = SEQUENCES[name]
    for cut in range(len(steps)):
        first, second = scaler_of(options), scaler_of(options)
        scales(first, steps[:cut])
        second.load(first.state())
        assert scales(second, steps[cut:]) == expected[cut:]


def test_a_fixed_scale_stays():
    scaler = scaler_of({"loss_scale": 8.0, "loss_scale_hysteresis": 2})
    assert scales(scaler, "x.x....") == [8.0] * 7
