"""Checkpoints of pipelines and experts that the real DeepSpeed wrote: training goes on as there, also with other stages, ep_size.

tests/support/deepspeed_proof.py records them (KEPT), beside the numbers that follow.
"""

import importlib
import json
import sys

import pytest
from deepspeed_proof import CHECKPOINTS, KEPT, PROGRAMS, RECORDED, differences
from engine_kit import install_in_child

import zeroshard.deepspeed as deepspeed
from zeroshard.checkpoint.stages import names_by_stage
from zeroshard.comm.launch import run_processes

CASES = [  # recorded cell, ZeRO stage that goes on, name of the cell, number of pipeline stages
    ("pipeline/0/4/tied", 0, "tied", 2), ("pipeline/0/4/tied", 0, "tied", 1), ("pipeline/1/4/tied", 1, "tied", 2),
    ("pipeline/1/4/tied", 3, "tied", 1), ("pipeline/1/4/one_stage", 2, "one_stage", 1), ("experts/0/2/ep2-k1", 0, "ep2-k1", 0),
    ("experts/0/2/ep2-k1", 1, "ep1-k1", 0), ("experts/1/2/ep2-k1", 1, "ep2-k1", 0), ("experts/1/2/ep2-k1", 2, "ep1-k1", 0),
]  # fmt: skip


def _go_on(rank, ranks):
    sys.path.insert(0, str(PROGRAMS))
    install_in_child()
    from common import RESUMED_AT, STEPS

    deepspeed.init_distributed("gloo")
    told = []
    for cell, stage, name, stages in CASES:
        program, _, accumulation, _ = cell.split("/")
        module, pipeline = importlib.import_module(program), {"stages": stages} if stages else {}
        engine = module.make(stage, int(accumulation), name, **pipeline)
        engine.load_checkpoint(str(CHECKPOINTS / cell.replace("/", "-")))
        if stages == 1 and name != "one_stage":  # both data-parallel ranks read what the one of two stages has read
            engine.grid.get_data_parallel_rank = lambda: 0
        told.append(module.train(engine, RESUMED_AT, STEPS, *[name] * bool(stages)))
        engine.destroy()
    return told


@pytest.mark.processes
def test_training_goes_on_from_deepspeeds_checkpoints():
    record = json.loads(RECORDED.read_text())["cells"]
    assert {cell for cell, *_ in CASES} == set(KEPT)
    for (cell, *how), told in zip(CASES, run_processes(_go_on, 2, timeout_s=300)[0], strict=True):
        assert not differences(told, record[cell]), (cell, how)


@pytest.mark.parametrize(
    "stages",
    [(("embed", "1", "2"), ("embed", "4")), (("embed", "1", "2", "embed"), ("4",)), (("embed", "1"), ("2", "embed", "4"))],
)
def test_numbers_of_stages_are_told_apart_by_how_many_there_are(stages):
    sizes = {"embed": ["embed.w"], "1": ["1.a", "1.b"], "2": ["2.a", "2.b"], "4": ["4.a", "4.b"]}
    tied_first = [sorted(dict.fromkeys(held), key=str.isdigit) for held in stages]
    wanted = {
        (stage, number): name
        for stage, held in enumerate(tied_first)
        for number, name in enumerate(name for layer in held for name in sizes[layer])
    }
    present = [{"params": [name for names in sizes.values() for name in names]}]
    assert names_by_stage(["embed", "1", "2", "embed", "4"], [{"params": list(wanted)}], present) == wanted
    assert names_by_stage(["embed", "1"], [{"params": [(0, 0)]}], [{"params": ["1.a", "1.b"]}]) == {}
