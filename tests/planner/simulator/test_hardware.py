"""Hardware files, and how long single tasks take."""

import re
from dataclasses import replace

import pytest
from unit_hardware import BETWEEN, DEVICE, INSIDE, READ, UNIT, compute, move

from benchmarks.papers.throughput import of_2019
from zeroshard.errors import ConfigError
from zeroshard.planner.simulator import hardware as module
from zeroshard.planner.simulator.hardware import NAMES, Curve, Hardware, Link, resource_seconds, seconds
from zeroshard.planner.simulator.trace import AttentionWork, Resource, Task, Trace

UP = Resource.UP
ONE = Trace()
EXPECTED = {"v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "gh200-96gb", "cpu"}


def test_the_devices_that_are_planned_for_are_there():
    assert set(NAMES) >= EXPECTED
    assert Hardware.named("v100-32gb").devices_per_node == 16


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_file_is_read_back_as_it_was(name, tmp_path):
    found = Hardware.named(name)
    found.save(tmp_path / "mine.toml")
    assert Hardware.load(tmp_path / "mine.toml") == found == Hardware.named(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name):
    source = Hardware.named(name).source
    if "all" in source:
        return
    others = Hardware.named(source["others"].split(" ")[1]).source if "others" in source else {}
    table = module._tables()[name]
    numbers = [key for key in table if key not in ("device", "links", "source", "separate", "shared_cores", "shared_disk")]
    numbers += [key for key in table["device"] if key != "name"] + list(table["links"])
    of_node = {"devices_per_node", "host_memory_nbytes", "disk_nbytes", "memory_nbytes"}
    missing = [key for key in numbers if key not in source | others and not (key in of_node and "node" in source | others)]
    assert not missing


def test_efficiency_grows_with_the_size_of_matrices():
    curve = Curve((1e3, 1e5), (0.2, 0.6))
    assert [curve.at(flops) for flops in (1, 1e3, 1e5, 1e9)] == [0.2, 0.2, 0.6, 0.6]
    assert curve.at(1e4) == pytest.approx(0.4)
    for v100, hidden, measured in (
        (of_2019(Hardware.named("v100-32gb")).device, 8192, 62e12),  # ZeRO-Infinity, section 4.2, of 2,048 tokens
        (of_2019(Hardware.named("v100-32gb")).device, 65536, 78e12),
        (Hardware.named("v100-32gb").device, 8192, 95e12),  # libraries of 2022
    ):
        flops = 2 * 2048 * hidden * 4 * hidden
        assert v100.peak("fp16") * v100.efficiency.at(flops) == pytest.approx(measured, rel=0.01)


def test_a_kernel_takes_as_long_as_its_arithmetic_or_its_memory_and_launches_come_on_top():
    device = replace(UNIT.device, memory_bandwidth=10.0, kernel_latency_s=0.5)
    hardware = replace(UNIT, device=device)
    assert seconds(Task("forward", "", {DEVICE: 20.0}, flops=3.0, kernels=1), hardware, ONE) == 3.5
    assert seconds(Task("forward", "", {DEVICE: 50.0}, flops=3.0, kernels=1), hardware, ONE) == 5.5
    assert seconds(Task("step", "", {DEVICE: 50.0}, kernels=4), hardware, ONE) == 5 + 2


def test_kernels_one_after_the_other_take_the_sum_and_those_with_flops_are_counted_for_the_curve():
    device = replace(UNIT.device, memory_bandwidth=10.0, efficiency=Curve((1.0, 10.0), (0.1, 1.0)))
    hardware = replace(UNIT, device=device)
    assert seconds(Task("forward", "", {DEVICE: 20.0}, flops=20.0, kernels=20), hardware, ONE) == 200 + 2
    assert seconds(Task("forward", "", {DEVICE: 20.0}, flops=20.0, kernels=20, products=2), hardware, ONE) == 20 + 2


def test_the_ranks_of_a_node_share_its_cores():
    step = Task("host step", "step", {Resource.HOST: 0.0}, numel=5)
    assert seconds(step, UNIT, Trace(node_size=1)) == 5
    assert seconds(step, UNIT, Trace(node_size=4)) == 20


def test_a_device_alone_has_more_of_what_the_node_shares():
    hardware = replace(UNIT, links={UP: Link(3.0, 0.0, alone=10.0)})  # 4 devices a node: 12 bytes a second together
    assert [seconds(move("copy", 60, resource=UP), hardware, Trace(node_size=n)) for n in (1, 2, 4)] == [6, 10, 20]


def test_a_gather_over_nodes_crosses_to_each_node_once_and_an_exchange_of_different_bytes_does_not():
    """8 ranks on 2 nodes, a shard of 1 byte: 3 peers on the node, 4 beyond it; the links of 4 ranks share what comes in."""
    gather = Task("gather", "forward", {INSIDE: 3.0, BETWEEN: 4.0}, peers=8)
    assert resource_seconds(gather, UNIT, ONE) == {INSIDE: 7, BETWEEN: 1}
    assert resource_seconds(replace(gather, distinct=True), UNIT, ONE) == {INSIDE: 3, BETWEEN: 4}
    assert resource_seconds(Task("gather", "", {BETWEEN: 4.0}, peers=2), UNIT, ONE) == {BETWEEN: 4}


def test_hops_are_those_of_a_tree():
    hardware = replace(UNIT, links={INSIDE: Link(1.0, 0.5)})
    assert [seconds(move("gather", 1, peers=n), hardware, ONE) for n in (1, 2, 5, 1024)] == [1.5, 1.5, 2.5, 6]


def test_what_a_device_does_not_have_is_named():
    with pytest.raises(ConfigError, match="unit: no peak_flops for 'bf16' .known: fp32."):
        seconds(compute("forward", 1, dtype="bf16"), UNIT, ONE)
    with pytest.raises(ConfigError, match="gh200-96gb: a task needs the link 'inside'"):
        seconds(move("gather", 1), Hardware.named("gh200-96gb"), ONE)


def test_unknown_names_get_the_nearest():
    with pytest.raises(ConfigError, match="expected one of v100-32gb, .*got 'h100'.*Did you mean 'h100-80gb'"):
        Hardware.named("h100")
    with pytest.raises(ConfigError, match="nowhere.toml: can not be read.*zeroshard calibrate"):
        Hardware.named("/nowhere.toml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.replace("devices_per_node", "devices_a_node"),
            "unknown key 'devices_a_node'.*Did you mean 'devices_per_node'",
        ),
        (lambda t: t.replace("host_step_rate = 1.0\n", ""), "no 'host_step_rate'"),
        (lambda t: t.replace("host_step_rate = 1.0", "host_step_rate = -1"), "host_step_rate: expected a number above 0, got -1"),
        (
            lambda t: t.replace("host_step_rate = 1.0", 'host_step_rate = "1"'),
            "host_step_rate: expected a number above 0, got '1'",
        ),
        (lambda t: t.replace("fp32 = 1.0", "fp32 = 0"), "device: peak_flops.fp32: expected a number above 0, got 0"),
        (lambda t: t.replace("[links.read]", "[links.reed]"), "links: expected some of .*got 'reed'. Did you mean 'read'"),
        (lambda t: t.replace("fraction = [1.0]", "fraction = [1.5]"), "fractions above 0 and up to 1"),
        (lambda t: t.replace("fraction = [1.0]", "fraction = [0.5, 1.0]"), "as many fractions"),
        (lambda t: t.replace("[device.efficiency]", "[device.curve]"), "device: unknown key 'curve'"),
        (
            lambda t: re.sub("devices_per_node = .*", "devices_per_node = 2.5", t),
            "devices_per_node: expected a whole number, got 2.5",
        ),
        (
            lambda t: re.sub("\nfraction = .*", "\nfraction = 3", t),
            "device.efficiency: fraction: expected a list of numbers, got 3",
        ),
        (lambda t: re.sub("\nfraction = .*", "\nfraction = ['a']", t), "efficiency: expected lists of numbers"),
        (lambda t: t.replace("\nfp32 = ", "\nfp23 = "), "peak_flops: .*got 'fp23'. Did you mean 'fp32'"),
        (lambda t: re.sub("^name = .*", "name = 3", t), "name: expected a text, got 3"),
        (lambda t: "source = 3\n" + t.partition("\n[source]")[0], "source: expected a table, got 3"),
        (lambda t: t.replace("separate = true", 'separate = "no"'), "separate: expected true or false, got 'no'"),
        (lambda t: t.replace("[device]", "[device"), "not TOML"),
        (lambda t: "device = 5\n" + t[: t.index("[device]")] + t[t.index("[links") :], "device: expected a table, got 5"),
    ],
)
def test_mistakes_in_a_file_are_named(change, said, tmp_path):
    UNIT.save(tmp_path / "mine.toml")
    text = (tmp_path / "mine.toml").read_text()
    assert change(text) != text
    (tmp_path / "mine.toml").write_text(change(text))
    with pytest.raises(ConfigError, match=said):
        Hardware.load(tmp_path / "mine.toml")


def test_a_link_of_a_rank_alone_is_not_slower_than_that_of_many():
    for name in NAMES:
        hardware = Hardware.named(name)
        for link in hardware.links.values():
            rates = [link.rate(n, hardware.devices_per_node) for n in range(1, hardware.devices_per_node + 1)]
            assert rates == sorted(rates, reverse=True)
            assert rates[-1] == link.bandwidth
    assert seconds(move("read", 16e9, resource=READ), Hardware.named("v100-32gb"), Trace(node_size=16)) == pytest.approx(
        10, rel=1e-3
    )


def test_attention_takes_the_time_of_its_own_curve():
    """FlashAttention-2 on an H100: 8K tokens at 0.335 of the peak, causal half of them at 0.301; products at 0.70."""
    h100 = Hardware.named("h100-80gb")
    flops, peak = 1e13, h100.device.peak("bf16")

    def seconds_of(causal):
        work = AttentionWork(flops, 8192, causal, 1)
        return seconds(
            Task("attention", "forward", {Resource.DEVICE: 0.0}, flops=flops, dtype="bf16", attention=work), h100, Trace()
        )

    assert seconds_of(False) == pytest.approx(flops / (0.335 * peak), rel=1e-3)
    assert seconds_of(True) == pytest.approx(0.5 * flops / (0.301 * peak), rel=1e-3)
    both = Task("both", "forward", {Resource.DEVICE: 0.0}, flops=3 * flops, products=4, kernels=5, dtype="bf16",
                attention=AttentionWork(flops, 8192, False, 1))  # fmt: skip
    products = 2 * flops / (0.70 * peak)
    assert seconds(both, h100, Trace()) == pytest.approx(products + seconds_of(False), rel=0.01)
