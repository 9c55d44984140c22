"""What users of DeepSpeed's interface do wrong is said on every rank, with the remedy, and leaves the model as it was."""

import copy
import pickle

import pytest
import torch
from torch import nn

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.integrations.deepspeed.ds_config import DeepSpeedConfig
from zeroshard.testing import run_threads

CONFIG = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 3}
}  # fmt: skip
INF, NAN = float("inf"), float("nan")


def initialize(model=None, **changes):
    given = {name: changes.pop(name) for name in ("lr_scheduler", "training_data") if name in changes}
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return deepspeed.initialize(model=model, config={**CONFIG, **changes}, **given)[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_micro_batch_size_per_gpu": NAN}, "train_micro_batch_size_per_gpu: expected a whole number, got nan"),
        ({"train_micro_batch_size_per_gpu": INF}, "train_micro_batch_size_per_gpu: expected a whole number, got inf"),
        ({"gradient_clipping": "1"}, "gradient_clipping: expected a number, got '1'"),
        ({"gradient_clipping": [1.0]}, "gradient_clipping: expected a number"),
        ({"gradient_clipping": NAN}, "gradient_clipping: expected a number, got nan"),
        ({"steps_per_print": "ten"}, "steps_per_print: expected a number"),
        ({"optimizer": {"type": 3}}, "optimizer.type: expected the name of a class, got 3"),
        ({"optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params: expected a mapping"),
        ({"scheduler": {"type": ["WarmupLR"]}}, "scheduler.type: expected the name of a class"),
        ({"checkpoint": {"parallel_write": "yes"}}, "checkpoint.parallel_write: expected a mapping"),
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, "initial_scale_power: expected a whole number from 0 to 1023"),
    ],
)
def test_a_value_of_another_kind_is_named(given, message):
    with pytest.raises((deepspeed.DeepSpeedConfigError, ValueError)) as error:
        DeepSpeedConfig({**CONFIG, **given}, world_size=1)
    assert message in str(error.value)


def test_what_is_no_configuration_file(tmp_path):
    with pytest.raises(ValueError, match="the path of a configuration file that exists"):
        DeepSpeedConfig(str(tmp_path), world_size=1)


def test_a_section_without_a_type_is_noted():
    notes = DeepSpeedConfig({**CONFIG, "optimizer": {"params": {"lr": 1.0}}}, world_size=1).notes
    assert any("optimizer has no type" in note for note in notes)
    assert not any("type" in note for note in DeepSpeedConfig({**CONFIG, "optimizer": {}}, world_size=1).notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "optimizer.params of adamw: .*learning_rate"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, "optimizer.params of adamw"),
        ({"scheduler": {"type": "Warmup", "params": {}}}, "scheduler.type"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "total_num_steps"),
        ({"lr_scheduler": 3}, "lr_scheduler: expected a scheduler"),
        ({"training_data": 3}, "Training data must be a torch Dataset"),
        ({"csv_monitor": {"enabled": True, "output_path": "/proc/absent"}}, "/proc/absent"),
    ],
)
def test_what_can_not_be_built_leaves_the_model_as_it_was(given, message):
    model = nn.Linear(4, 1)
    with pytest.raises(Exception, match=message):
        initialize(model, **given)
    assert "_zeroshard" not in model.__dict__ and type(model.weight) is nn.Parameter
    initialize(model).destroy()


def test_what_is_no_model():
    with pytest.raises(TypeError, match="expected a torch.nn.Module, got function"):
        deepspeed.initialize(model=lambda x: x, config=CONFIG)


def test_a_folder_that_rank_0_can_not_write_is_said_on_every_rank():
    def run(rank):
        model = nn.Linear(4, 1)
        with pytest.raises(deepspeed.DeepSpeedConfigError, match="a monitor: .*/proc/absent.*Name a folder"):
            initialize(model, csv_monitor={"enabled": True, "output_path": "/proc/absent"})
        return type(model.weight) is nn.Parameter

    assert run_threads(2, run) == [True, True]


@pytest.mark.parametrize(
    ("name", "of_rank"),
    [
        ("gradient_accumulation_steps", [1, 2]),
        ("scheduler", [{"type": "WarmupLR", "params": {"warmup_num_steps": steps}} for steps in (5, 6)]),
    ],
)
def test_ranks_with_other_configurations(name, of_rank):
    def run(rank):
        model = nn.Linear(4, 1)
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=f"{name}.* differs: rank 0: .*rank 1: .*the same configuration"):
            initialize(model, **{name: of_rank[rank]})
        return type(model.weight) is nn.Parameter

    assert run_threads(2, run) == [True, True]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_sharded_can_not_be_copied_or_pickled(stage):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    engine = initialize(model, zero_optimization={"stage": stage})
    for kind, what in {"Sequential": (engine, model), "FusedAdam": (engine.basic_optimizer,)}.items():
        for each in what:
            for copied in (copy.deepcopy, pickle.dumps):
                with pytest.raises(zs.ShardedAccessError, match=f"{kind} can not be copied or pickled.*zs.full_"):
                    copied(each)
    engine.destroy()
    x = torch.ones(2, 4)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x)) and torch.equal(copy.deepcopy(model)(x), model(x))
