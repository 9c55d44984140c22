"""Calibration: a file that the planner reads, from a machine on which all ranks measure at once; accuracy is another matter."""

import pytest
import torch

from zeroshard.cli.arguments import UsageError
from zeroshard.cli.calibrate import main
from zeroshard.planner.simulator.calibrate import SMALL_NBYTES, Amount, Found, _hardware, calibrate, report
from zeroshard.planner.simulator.disk_bandwidth import REQUEST_NBYTES, Burst
from zeroshard.planner.simulator.hardware import Hardware, Link
from zeroshard.planner.simulator.simulate import simulate
from zeroshard.planner.simulator.trace import Resource, Task, Trace

TINY = Amount(sides=(8, 32), turn_s=0.01, numel=1 << 14, rounds=2)


@pytest.mark.processes
def test_a_calibrated_machine_gives_times_to_every_resource_of_a_rank(tmp_path):
    calibrate(2, str(tmp_path), TINY, "mine").save(tmp_path / "mine.toml")
    hardware = Hardware.load(tmp_path / "mine.toml")
    assert (hardware.name, hardware.devices_per_node, hardware.shared_cores, hardware.separate) == ("mine", 2, True, False)
    assert hardware.device.efficiency.flops == (2.0 * 8**3, 2.0 * 32**3)
    assert hardware.links.keys() == set(Resource) - {Resource.DEVICE, Resource.HOST, Resource.BETWEEN, Resource.CONTROL}
    trace = Trace(node_size=2)
    for resource in (*hardware.links, Resource.CONTROL):  # whose messages take the links of the network
        trace.add(Task(f"use {resource.value}", "forward", {resource: 1e6}, peers=2))
    trace.add(Task("forward", "forward", {Resource.DEVICE: 1e6}, flops=1e9, kernels=10, products=3))
    trace.add(Task("host step", "step", {Resource.HOST: 1e6}, numel=10_000))
    times = [end - begin for _, _, begin, end in simulate(trace, hardware).spans]
    assert all(1e-9 < each < 60 for each in times), times
    assert len(report(hardware)) == 4
    assert torch.distributed.is_initialized() is False


def test_ranks_are_averaged_and_the_node_is_all_of_them():
    flops = {"fp32": [1e9, 4e9], "bf16": [1e9, 2e9]}
    bursts = {"read": [Burst(0.0, 1.0, 100)], "write": [Burst(0.0, 2.0, 100), Burst(0.0, 4.0, 100), Burst(0.0, 1.0, 100)]}
    bursts |= {"both": [Burst(0.0, 3.0, 200)], "small read": [Burst(0.0, 2.0, 100)], "small write": [Burst(0.0, 2.0, 100)]}
    common = {"launch_s": 1e-5, "copied": 8e9, "hop_s": 1e-4, "stepped": 1e6, "bursts": bursts}
    ranks = [Found(flops, between=b, exchanged=b, **common) for b in (1e9, 3e9)]
    hardware = _hardware(ranks, 2, "/", Amount(sides=(10, 100)), "made up")
    assert hardware.device.peak_flops == {"fp32": 4e9, "bf16": 2e9}
    assert hardware.device.efficiency.fraction == (0.25, 1.0)
    assert hardware.device.memory_bandwidth == 2e9
    assert hardware.links[Resource.INSIDE] == Link(2e9, 1e-4)
    assert hardware.links[Resource.UP].bandwidth == 4e9  # what is read and written counts once
    read = hardware.links[Resource.READ]  # of each rank, while both read
    for nbytes, speed in ((REQUEST_NBYTES, 100), (SMALL_NBYTES, 50)):
        assert nbytes / (nbytes / read.bandwidth + read.latency_s) == pytest.approx(speed)
    assert hardware.links[Resource.WRITE] == Link(50, 0.0)  # the median; small ones are as fast
    assert hardware.shared_disk  # 300 bytes take as long at once as one after the other
    assert hardware.host_step_rate == 2e6
    alone = _hardware(ranks[:1], 1, None, Amount(sides=(10, 100)), "alone")
    assert alone.links.keys() == {Resource.UP, Resource.DOWN}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0"], "--ranks: expected at least 1, got 0"),
        (["--out", "/nowhere/hardware.toml"], "--out: expected the path of a file in a folder that exists"),
        (["--path", "/nowhere"], "--path: .*/nowhere does not exist"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_measured(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        main(arguments)
    assert not list(tmp_path.iterdir())
