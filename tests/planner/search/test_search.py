"""The search: what it chooses in cases that are decided by hand, what it refuses, and what it says."""

import dataclasses

import pytest

from zeroshard.config import Config, Tier
from zeroshard.errors import ConfigError
from zeroshard.memory.ledger import OPTIMIZER
from zeroshard.planner.models.gpt import GPTConfig
from zeroshard.planner.plan import Phase, Plan
from zeroshard.planner.search.layout import Layout
from zeroshard.planner.search.memory import memory_of
from zeroshard.planner.search.profile import Profile
from zeroshard.planner.search.schedule import trace_of
from zeroshard.planner.search.search import MARGIN, _limits, bound, search, timed
from zeroshard.planner.simulator.hardware import Hardware
from zeroshard.planner.simulator.simulate import simulate
from zeroshard.planner.simulator.trace import Trace

TINY = Profile.of_shape(GPTConfig(vocab_size=256, seq_len=256, dim=128, layers=3, heads=4), "tiny")
SEVEN = Profile.of_shape(GPTConfig(vocab_size=50257, seq_len=1024, dim=4096, layers=36, heads=32, bias=True, tied=True), "7.5B")
TRILLION = Profile.of_shape(
    GPTConfig(vocab_size=50257, seq_len=1024, dim=25600, layers=128, heads=256, bias=True, tied=True), "1T"
)
V100, A100, CPU = map(Hardware.named, ("v100-32gb", "a100-80gb", "cpu"))
ALONE = {"tp": 1, "pp": 1}


def test_a_tiny_model_needs_no_sharding():
    layout = search(TINY, A100, 8, 64).best.layout
    assert layout.stage <= 1 and (layout.pp, layout.tp, layout.checkpointing) == (1, 1, "none")
    assert {layout.optimizer, layout.gradient, layout.parameter} == {Tier.DEVICE}


def test_states_of_7_5b_are_sharded_over_64_devices_of_32_gb():
    """ZeRO, table 1: 120 GB a device without, 31.4 with stage 1, 16.6 with stage 2, 1.9 with stage 3 (gradients there in 16 bits)."""
    found = search(SEVEN, V100, 64, 512, precision="fp16", fixed={**ALONE, "checkpointing": "blocks"})
    assert found.best.layout.stage in (2, 3) and found.best.layout.optimizer is Tier.DEVICE
    assert found.best.nbytes() < V100.device.memory_nbytes * (1 - MARGIN)
    assert found.runner_up is not None and found.runner_up.step_s * 1.02 >= found.best.step_s
    assert str(found.best.layout) in found.reason and "The runner-up" in found.reason
    counts = found.considered
    assert counts["layouts"] > counts["fit"] > counts["simulated"] > 1


def test_a_trillion_parameters_on_one_dgx_2_rest_on_its_disks():
    """ZeRO-Infinity, figure 6: without other axes; blocks of 16 GB are gathered in parts."""
    found = search(TRILLION, V100, 16, 64, precision="fp16", fixed=ALONE)
    layout = found.best.layout
    assert (layout.stage, layout.optimizer, layout.parameter) == (3, Tier.DISK, Tier.DISK) and layout.max_unit_numel is not None
    assert "Without offloading it would need" in found.reason


def test_what_does_not_fit_is_said_with_what_is_missing():
    with pytest.raises(ConfigError, match=r"1T of 1.01e\+03B parameters does not fit 1 x v100-32gb.*on disk.*Use more devices"):
        search(TRILLION, V100, 1, 1, precision="fp16", fixed=ALONE)


def dry(*phases, separate=True):
    """A dry run whose rank holds in each phase so many bytes of the device and the host."""
    held = [{tier: {"": nbytes} for tier, nbytes in zip(Tier, each, strict=False)} for each in phases]
    named = tuple(map(Phase, ("forward", "backward"), held))
    return Plan("", 0, {}, Config(), 1, 1, 1, separate, named, (), Trace(), None, {})


def test_a_dry_run_that_refuses_brings_the_next():
    free = search(TINY, A100, 8, 64)
    found = search(TINY, A100, 8, 64, verify=lambda layout: dry([10**12 if layout == free.best.layout else 1]))
    assert found.best.layout != free.best.layout and found.considered["refused"] == 1
    with pytest.raises(ConfigError, match="none of the .* fastest layouts fits by its dry run"):
        search(TINY, A100, 8, 64, verify=lambda layout: dry([10**12]))


def test_device_and_host_of_a_cpu_are_one_memory_in_a_dry_run_too():
    room = _limits(CPU, 2, MARGIN)[Tier.DEVICE]
    with pytest.raises(ConfigError, match="none of the .* fastest layouts fits by its dry run"):
        search(TINY, CPU, 2, 8, precision="fp32", verify=lambda layout: dry([0.6 * room, 0.6 * room], separate=False))
    assert search(TINY, CPU, 2, 8, precision="fp32", verify=lambda layout: dry([0.6 * room, 0.3 * room], separate=False))


def test_each_memory_is_told_at_its_own_fullest_moment():
    done = simulate(trace_of(TINY, Layout(dp=8)), A100)
    best = search(TINY, A100, 8, 64, verify=lambda layout: dry([5, 1], [3, 9]), simulated=lambda layout: done).best
    assert (best.nbytes(Tier.DEVICE), best.nbytes(Tier.HOST)) == (5, 9)


def test_slow_links_between_nodes_bring_secondary_shards_and_packing():
    """8 nodes of 8 joined by a hundredth of what A100s have: what crosses nodes decides (ZeRO++)."""
    between = dataclasses.replace(A100.links[next(r for r in A100.links if r.value == "between")], bandwidth=0.25e9, alone=None)
    slow = dataclasses.replace(A100, links={**A100.links, next(r for r in A100.links if r.value == "between"): between})
    given = {**ALONE, "stage": 3, "checkpointing": "blocks", "micro_batch": 2, "max_unit_numel": None}
    plain, lossy = search(SEVEN, slow, 64, 128, fixed=given), search(SEVEN, slow, 64, 128, fixed=given, lossy=True)
    assert plain.best.layout.hpz == 8 or plain.best.layout.shard_size == 8
    assert lossy.best.layout.quantized_gradients == "int4" and lossy.best.step_s < plain.best.step_s / 2


@pytest.mark.parametrize("layout", [
    Layout(dp=64, stage=3, micro_batch=2, micro_batches=16, node_size=16, checkpointing="blocks", precision="fp16"),
    Layout(dp=8, pp=4, tp=2, stage=1, micro_batch=1, micro_batches=24, node_size=16, precision="fp16"),
], ids=str)  # fmt: skip
def test_few_micro_batches_tell_of_many(layout):
    """`timed` simulates two short steps; the whole one takes as long."""
    whole = simulate(trace_of(SEVEN, layout), V100).step_s
    assert timed(SEVEN, layout, V100)[0] == pytest.approx(whole, rel=0.03)
    assert bound(SEVEN, layout, V100) <= whole * 1.05


def test_without_optimizer_on_the_device_there_is_none_there():
    held = memory_of(SEVEN, Layout(dp=4, stage=2, optimizer=Tier.HOST, gradient=Tier.HOST))
    assert OPTIMIZER not in held[Tier.DEVICE] and held[Tier.HOST][OPTIMIZER] > 0


def test_bad_input_is_a_sentence():
    with pytest.raises(ConfigError, match="devices: expected a whole number of at least 1, got 0"):
        search(TINY, A100, 0, 8)
    with pytest.raises(ConfigError, match="no layout of 8 devices divides a batch of 9.*tp=1.*the nearest: 8 or 16"):
        search(TINY, A100, 8, 9, fixed=ALONE)
    with pytest.raises(ConfigError, match="tp=3 does not divide the 4 heads of tiny; the nearest: tp=2"):
        search(TINY, A100, 6, 6, fixed={"tp": 3})
    with pytest.raises(ConfigError, match="got 'staeg'. Did you mean 'stage'"):
        search(TINY, A100, 8, 8, fixed={"staeg": 1})
    with pytest.raises(ConfigError, match="checkpointing: expected one of none, blocks.*Did you mean 'blocks'"):
        Layout(checkpointing="block")
    assert _limits(A100, 8, 0.0)[Tier.HOST] == A100.host_memory_nbytes / 8
