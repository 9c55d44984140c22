"""Requests of the planner for a small model on hardware of any memory."""

from dataclasses import replace

from zeroshard.planner.model_source import source_of
from zeroshard.planner.request import Request
from zeroshard.planner.simulator.hardware import Hardware

MIB = 1 << 20


def hardware(nbytes, **fields):
    """An H100 with another memory, and nothing that its libraries take."""
    whole = Hardware.named("h100-80gb")
    return replace(whole, device=replace(whole.device, memory_nbytes=nbytes), **{"overhead_nbytes": 0, **fields})


def request(nbytes=1 << 30, **fields):
    axes = {"pp": 1, "dp": 4, "tp": 1} | fields.pop("axes", {})
    given = {"options": {"stage": 0, "precision": "bf16"}, "rows": 2, "seq": 64, **fields}
    return Request(source_of("quickstart"), hardware(nbytes), axes, **given)
