"""Every numeric option, given 0, -1, NaN, inf and values of other types: it has the meaning that its docstring states, or it is refused by a
sentence that names it. No value trains differently without a word.
"""

import dataclasses
import math

import pytest
import torch
from helpers import MLP, seeded, vector_batches
from torch import nn

import zeroshard as zs
from benchmarks.command import main as bench
from zeroshard.cli.arguments import UsageError
from zeroshard.cli.export import main as export
from zeroshard.cli.options import TrainOptions, parse_train

nan, inf = math.nan, math.inf
GIVEN = {"0": 0, "-1": -1, "nan": nan, "inf": inf, "half": 0.5, "text": "8", "bool": True, "list": [8]}
ALWAYS = {"-1", "nan", "text", "bool", "list"}  # what no numeric option takes
BATCH = vector_batches(1, 1, 1)[0][0][0]

# option -> which of GIVEN are taken, beside a usual value
CONFIG = {
    "max_grad_norm": {"0", "inf", "half"},  # 0: never
    "stall_timeout_s": {"half"},
    "max_unit_numel": {"0", "inf"}, "max_live_parameters": {"0", "inf"}, "prefetch_nbytes": {"0", "inf"}, "prefetch_bucket_size": {"0", "inf"},
    "param_persistence_threshold": {"0", "inf"}, "model_persistence_threshold": {"0", "inf"},
    "min_unit_numel": {"0"},
    "delayed_update": {"0"},
    "loss_scale": {"half"}, "initial_loss_scale": {"half"}, "min_loss_scale": {"half"},
    "loss_scale_window": set(), "loss_scale_hysteresis": set(), "max_skipped_steps": {"inf"}, "loss_scale_delay": {"0"},
    "stage": {"0"}, "shard_size": set(), "mics_shard_size": set(), "zero_hpz_partition_size": set(),
}  # fmt: skip
OFFLOAD = {"ratio": {"0", "half"}, "buffer_count": set(), "buffer_nbytes": set()}
OTHERS = {
    "save step": {"0"}, "save keep_last": set(), "save keep_every": set(),
    "tile max_bytes": set(), "tile budget_bytes": set(),
    "activations prefetch": {"0"}, "activations arena_nbytes": {"0"}, "activations min_numel": {"0"},
    "clip_grad_norm_ max_norm": {"0", "inf", "half"}, "backward weight": {"0", "half"},
    "sampler numel": set(), "sampler seed": {"0", "-1"}, "sampler rank": {"0"}, "sampler world_size": set(),
    "export max_shard_nbytes": set(), "forecast accumulate": set(), "tiled_cross_entropy label_smoothing": {"0", "half"},
}  # fmt: skip


def rows(table, *, but=()):
    """(option, given, whether it is taken): the subtests of a table."""
    return [(name, given, given in taken) for name, taken in table.items() for given in GIVEN if given not in but]


def check(act, name, taken):
    if taken:
        return act()
    with pytest.raises(zs.ConfigError) as caught:
        act()
    assert all(word in str(caught.value) for word in (name, "expected ", "got ")), caught.value
    return None


def test_the_table_has_every_numeric_field():
    """A new option needs a row here."""
    for cls, table in ((zs.Config, CONFIG), (zs.Offload, OFFLOAD)):
        numeric = {f.name for f in dataclasses.fields(cls) if "int" in str(f.type) or "float" in str(f.type)}
        assert numeric == table.keys()
    for table in (CONFIG, OFFLOAD, OTHERS):
        assert not any(taken & (ALWAYS - {"-1"}) for taken in table.values())


def test_config(subtests):
    options = {"offload_optimizer": "cpu", "stage": 2, "precision": "fp16"}
    for name, given, taken in rows(CONFIG):
        with subtests.test(option=name, given=given):
            check(
                lambda: zs.Config(**options | {name: GIVEN[given]} if name != "stage" else {"stage": GIVEN[given]}), name, taken
            )


@pytest.mark.parametrize("name", CONFIG)
def test_shard(name, subtests):
    """What is taken trains."""
    offload = {"offload_optimizer": "cpu"} if name == "delayed_update" else {}
    precision = {"precision": "fp16"} if "scale" in name else {}

    def act(given):
        model = seeded(MLP)
        model, optimizer = zs.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), **{"stage": 2, **offload, **precision, name: GIVEN[given]}
        )
        before = zs.full_state_dict(model)
        for _ in range(2):
            model(*BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not optimizer.last_step.skipped
        zs.close(model)
        assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())

    for given in GIVEN:
        with subtests.test(given=given):
            check(lambda: act(given), name, given in CONFIG[name])


def test_offload(subtests):
    for name, given, taken in rows(OFFLOAD):
        with subtests.test(option=name, given=given):
            check(lambda: zs.Offload("cpu", **{name: GIVEN[given]}), name, taken)
            check(lambda: zs.Config(offload_optimizer={"device": "cpu", name: GIVEN[given]}), name, taken)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_max_grad_norm_of_0_never_clips(stage):
    """As in DeepSpeed and Trainer. zs.clip_grad_norm_(model, 0) makes zeros, as torch's function does."""

    def trained(**options):
        model = seeded(MLP)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, **options)
        model(*BATCH).backward()
        optimizer.step()
        assert optimizer.last_step.clip_coefficient == 1.0 and optimizer.last_step.grad_norm > 0
        return zs.full_state_dict(model)

    plain = trained()
    for zero in (0, 0.0):
        assert all(torch.equal(value, plain[name]) for name, value in trained(max_grad_norm=zero).items())
    assert zs.Config(max_grad_norm=0).max_grad_norm is None
    assert zs.Config.build(zs.Config(max_grad_norm=1.0), max_grad_norm=0).max_grad_norm is None
    model = seeded(MLP)
    model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model(*BATCH).backward()
    assert zs.clip_grad_norm_(model, 0) > 0
    assert all(not grad.any() for grad in zs.full_gradients(model).values())


def test_numbers_as_others_write_them():
    """DeepSpeed's 5e8 in JSON is a float; numpy's are numbers."""
    import numpy

    config = zs.Config(
        prefetch_bucket_size=5e8, max_live_parameters=1e9, max_grad_norm=numpy.float32(0.5), min_unit_numel=numpy.int64(3)
    )
    assert config.prefetch_limit_nbytes == 2e9
    for name in (
        "prefetch_nbytes",
        "max_live_parameters",
        "max_unit_numel",
        "min_unit_numel",
        "delayed_update",
        "prefetch_bucket_size",
    ):
        with pytest.raises(zs.ConfigError, match=f"{name}: expected a whole number"):
            zs.Config(offload_optimizer="cpu", **{name: 0.5})
    for seconds in (2e6 + 1, 1e300):
        with pytest.raises(zs.ConfigError, match="stall_timeout_s: expected a number of seconds above 0, at most 2,000,000, got"):
            zs.Config(stall_timeout_s=seconds)


def other(name, value, path):
    """Call the verb with the option."""
    verb, option = name.split()
    model = seeded(MLP)
    if verb == "tile":
        return zs.tile(nn.Sequential(nn.Linear(64, 64)), **{option: value})
    if verb == "activations":
        return zs.checkpoint_activations(model, blocks=("Linear",), **{option: value})
    if verb == "sampler":
        given = {"numel": 8, **({"rank": 0, "world_size": 1} if option in ("rank", "world_size") else {}), option: value}
        return list(zs.ShardedSampler(**given))
    if verb == "tiled_cross_entropy":
        return zs.tiled_cross_entropy(torch.ones(2, 3), nn.Linear(3, 4), torch.zeros(2, dtype=torch.long), label_smoothing=value)
    model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    loss = model(*BATCH)
    if verb == "backward":
        return zs.backward(model, loss, weight=value)
    loss.backward()
    if verb == "clip_grad_norm_":
        return zs.clip_grad_norm_(model, value)
    if verb == "forecast":
        return zs.forecast(model, lambda: model(*BATCH), accumulate=value)
    saved = zs.save(
        path / "saved",
        model,
        optimizer,
        **({} if verb == "export" else {option: value, **({"keep_last": 1} if option == "keep_every" else {})}),
    )
    if verb == "export":
        return zs.export(saved.path, path / "out", max_shard_nbytes=value)
    return saved


@pytest.mark.parametrize("name", OTHERS)
def test_other_verbs(name, tmp_path, subtests):
    for given in GIVEN:
        path, taken = tmp_path / given, given in OTHERS[name]
        path.mkdir()
        with subtests.test(given=given):
            check(lambda: other(name, GIVEN[given], path), name.split()[1], taken)
            assert taken or name.startswith("export") or not any(path.glob("saved/*"))


# -- the command line --------------------------------------------------------------------------------------------------

TRAIN = {  # beside what its parser refuses: texts, and fractions for whole numbers
    "max_grad_norm": {"0", "inf", "half"}, "time_limit": {"inf", "half"}, "lr": {"half"}, "weight_decay": {"0", "half"},
    "ngram_rows": {"0"}, "experts": {"0"}, "sample_bytes": {"0"}, "seed": {"0"}, "save_every": {"0"}, "stage": {"0"},
    "offload_ratio": {"0", "half"}, "delayed_update": {"0"}, "max_live_parameters": {"0"}, "prefetch_bucket_size": {"0"},
    **dict.fromkeys(("ranks", "layers", "dim", "heads", "steps", "seq", "global_batch", "accumulate", "eval_every", "eval_bytes", "threads", "keep_last",
                     "buffer_count", "buffer_mib", "tile_max_bytes", "shard_size", "hpz"), frozenset()),
}  # fmt: skip
ON_THE_LINE = {"0": "0", "-1": "-1", "nan": "nan", "inf": "inf", "half": "0.5", "text": "eight"}


def test_the_table_has_every_numeric_option_of_train():
    described = [f for cls in TrainOptions.__mro__ if dataclasses.is_dataclass(cls) for f in dataclasses.fields(cls)]
    assert {f.name for f in described if f.metadata.get("type", str.lower) is not str.lower} == TRAIN.keys()


@pytest.mark.parametrize("name", TRAIN)
def test_train(name, subtests):
    for _, given, taken in rows({name: TRAIN[name]}, but=("bool", "list")):
        line = [f"--{name.replace('_', '-')}={ON_THE_LINE[given]}"]
        line += (
            ["--offload-optimizer", "cpu"] if name in ("offload_ratio", "delayed_update", "buffer_count", "buffer_mib") else []
        )
        with subtests.test(given=given):
            if taken:
                parse_train(line)
            else:
                with pytest.raises(UsageError, match=name.replace("_", ".").replace("buffer.mib", "buffer.(mib|nbytes)")):
                    parse_train(line)


@pytest.mark.parametrize(
    "name", ["steps", "ranks", "sequences", "rounds", "dim", "heads", "layers", "vocab-size", "seq-len", "largest-seconds"]
)
def test_bench(name, subtests):
    for given in ("-1", "nan", "inf", *(() if name == "largest-seconds" else ("0",))):
        with subtests.test(given=given), pytest.raises(UsageError, match=name.replace("rounds", "rounds|steps")):
            bench([f"--{name}={given}", "--out", "/dev/null/none"])


def test_export(tmp_path, subtests):
    for given in ("0", "-1", "nan", "inf", "x"):
        with subtests.test(given=given), pytest.raises(UsageError, match="max-shard-gb"):
            export([str(tmp_path), str(tmp_path / "out"), f"--max-shard-gb={given}"])


def test_the_two_names_of_the_shards_size_replace_each_other():
    config = zs.Config(shard_size=4)
    for name, other in (("shard_size", "mics_shard_size"), ("mics_shard_size", "shard_size")):
        assert getattr(zs.Config.build(config, **{name: 2}), other) == 2
    with pytest.raises(zs.ConfigError, match="mean the same"):
        zs.Config.build(config, shard_size=2, mics_shard_size=3)
