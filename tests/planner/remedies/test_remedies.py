"""Remedies: the changes that are named make it fit by their own dry run, the cheapest first; what was not tried is said to be by formula."""

import itertools
import json
import math
from dataclasses import replace
from functools import partial

import pytest
from planned import MIB, hardware, request

from zeroshard.config import Tier
from zeroshard.engine.ledger import GATHERED, GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS, SECONDARY
from zeroshard.planner.faults import OutOfTime
from zeroshard.planner.model_source import source_of
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.planner.plan import ACTIVATIONS
from zeroshard.planner.recorder import deadline
from zeroshard.planner.remedies import remedy as module
from zeroshard.planner.remedies.changes import CHANGES, changes, flags
from zeroshard.planner.remedies.remedy import ENOUGH, remedies
from zeroshard.planner.request import Request, judge
from zeroshard.planner.search.memory import memory_of
from zeroshard.planner.search.requested import layout_of

MIXTRAL = {"model_type": "mixtral", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
FINE = {"stage": 3, "precision": "bf16", "max_unit_numel": 1 << 14}  # nothing left to split


@pytest.fixture(scope="module")
def stage_0():
    return request().plans()


def gpt(known=True, **fields):
    """A request for a GPT without tables of n-grams. known: formulas have its shape; else it is a user's own model."""
    shape = GPTConfig(vocab_size=256, seq_len=128, dim=128, layers=4, heads=4)
    asked = request(**fields)
    return replace(asked, source=replace(asked.source, config=shape if known else None, make=partial(GPT, shape)))


def short(asked, plans, nbytes):
    """The same on devices that lack so many bytes."""
    return replace(asked, hardware=hardware(judge(plans, asked.hardware).used - nbytes))


def said(found):
    return [each.flags for each in found]


def check(asked, found):
    """The first fits by its own dry run, and costs are ordered."""
    first = found[0]
    assert first.verdict.fits and judge(first.request.plans(), first.request.hardware).used == first.verdict.used
    tried = [each.seconds for each in found if each.verdict is not None]
    assert all(later * 1.02 >= sooner for sooner, later in itertools.pairwise(tried))
    assert all(each.flags == flags(asked, each.request) for each in found)


def test_the_cheapest_changes_come_first_and_fit_by_their_own_dry_run(stage_0):
    asked = short(request(), stage_0, 20 * MIB)  # states of 3.8M parameters, in fp32: 44 MiB
    found = remedies(asked, stage_0, seconds=math.inf)
    check(asked, found)
    assert sorted(said(found)) == ["--stage 1", "--stage 2", "--stage 3"]
    for each in found:
        assert each.verdict.fits and each.frees >= 20 * MIB and "s a step, not" in each.cost
        ratio = sum(each.verdict.plan.sent.values()) / sum(stage_0[0].sent.values())
        assert ("sends" in each.cost) == (ratio > 1.02)  # gradients of stage 0 travel in fp32


@pytest.mark.parametrize(("asked", "category", "part", "expected"), [
    (gpt(options=FINE, rows=8, seq=128), ACTIVATIONS, 0.3, {"--checkpoint-activations"}),
    (gpt(options={"stage": 3, "precision": "bf16", "prefetch_nbytes": 0}, rows=1, seq=16), GATHERED, 0.02, {"--max-unit-numel 66560"}),
    (gpt(known=False, options={"stage": 1, "precision": "bf16"}, rows=4), ACTIVATIONS, 0.3, {"--stage 2", "--stage 3"}),
    (gpt(axes={"dp": 2, "tp": 2}, options={"stage": 1, "precision": "bf16"}, rows=2), ACTIVATIONS, 0.05, {"--stage 2"}),
], ids=["activations", "units", "a user's own model", "tensor parallel"])  # fmt: skip
def test_what_does_not_fit_has_a_remedy_that_does(asked, category, part, expected):
    plans = asked.plans()
    asked = short(asked, plans, int(judge(plans, asked.hardware).held[category] * part))
    found = remedies(asked, plans, seconds=math.inf)  # by the clock: a busy machine would end it
    check(asked, found)
    assert expected & set(said(found)), said(found)


@pytest.mark.slow  # 5 s; each change by itself: above
def test_where_no_change_suffices_alone_several_do_and_none_is_idle():
    asked = request(options=FINE | {"stage": 0}, rows=2, seq=256)
    plans = asked.plans()
    least = replace(asked, options=FINE, rows=1, micro_batches=2)
    asked = replace(asked, hardware=hardware(int(judge(least.plans(), least.hardware).used * 1.02)))
    found = remedies(asked, plans, seconds=math.inf)  # by the clock: a busy machine would end it
    check(asked, found)
    for name, value in changes(asked, found[0].request).items():
        assert value != asked.options.get(name)
        without = replace(found[0].request, options={**found[0].request.options, name: asked.options.get(name)})
        if name != "stage":  # offloading needs one
            assert not judge(without.plans(), without.hardware).fits, name


def test_where_there_is_no_time_for_a_dry_run_formulas_say_what_fits(stage_0, monkeypatch):
    def late(self):
        raise OutOfTime

    monkeypatch.setattr(Request, "plans", late)
    asked = short(request(), stage_0, 20 * MIB)
    found = remedies(asked, stage_0)
    assert len(found) == ENOUGH and all(each.verdict is None and "fits by formula: " in each.then for each in found)
    monkeypatch.undo()
    for each in found:
        assert judge(each.request.plans(), each.request.hardware).fits and "s a step, not" in each.cost
    assert remedies(asked, stage_0, seconds=0) == []


def test_a_dry_run_that_takes_too_long_is_given_up():
    token = deadline.set(0.0)
    try:
        with pytest.raises(OutOfTime):
            request().plans()
    finally:
        deadline.reset(token)
    assert request().plans()


def test_what_does_not_fit_by_formula_is_not_tried(stage_0, monkeypatch):
    tried = []
    monkeypatch.setattr(
        module, "_tried", lambda formulas, plans, choice: tried.append(flags(formulas.request, choice.request)) or []
    )
    assert remedies(short(request(), stage_0, 14 * MIB), stage_0) == []
    assert {"--stage 1", "--stage 2", "--stage 3"} <= set(tried)
    # activations alone are a few MiB
    assert not {"--micro-batch 1 --accumulate 2", "--checkpoint-activations", "--ranks 8"} & set(tried)


def offered(asked):
    return [flags(asked, changed) for row in CHANGES for changed in row.offers(asked)]


def test_stages_of_a_pipeline_are_offered_in_each_precision():
    asked = {precision: gpt(options={"stage": 0, "precision": precision}) for precision in ("bf16", "fp16")}
    meshes = {name: offered(replace(each, source=replace(each.source, layers=4))) for name, each in asked.items()}
    assert any("pp=2" in words for words in meshes["bf16"]) and any("tp=2" in words for words in meshes["fp16"])
    assert any("pp=2" in words for words in meshes["fp16"])


def test_every_change_has_its_option_and_applies():
    asked = request(axes={"tp": 2, "dp": 4}, options={"stage": 1, "precision": "bf16"}, rows=4)
    found = offered(asked)
    assert all(found) and len(set(found)) == len(found)
    for words in (
        "--stage 2",
        "--micro-batch 2 --accumulate 2",
        "--partition-activations",
        "--offload-activations cpu",
        "--offload-optimizer nvme",
        "--offload-optimizer cpu --stage 2",
        "--accumulate 2 --mesh dp=2,tp=4",
        "--ranks 16 --mesh dp=8,tp=2",
    ):
        assert words in found, words
    assert not any(words in " ".join(found) for words in ("tp=8", "pp=2", "--stage 1", "max-unit", "hpz"))  # 4 heads, 3 layers


def test_each_change_says_what_to_write_in_the_program_and_what_it_frees():
    asked = request(
        axes={"dp": 8}, options={"stage": 3, "precision": "bf16", "zero_hpz_partition_size": 2}, rows=4, seq=256, node_size=2
    )
    formulas = module._Formulas(asked, asked.plans())
    held = memory_of(formulas.profile, layout_of(asked))[Tier.DEVICE]
    of = {"model states": (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER), ACTIVATIONS: (ACTIVATIONS,), "gathered parameters": (GATHERED,),
          "secondary shards": (SECONDARY,)}  # fmt: skip
    for row in (row for row in CHANGES if row.offers is not CHANGES[1].offers):  # this model has no experts
        after = next(
            iter(row.offers(asked) if row.offers is not CHANGES[0].offers else [replace(asked, axes={**asked.axes, "dp": 16})])
        )
        now = memory_of(formulas.profile, layout_of(after))[Tier.DEVICE]
        assert sum(now.get(name, 0) for name in of[row.frees]) < sum(held.get(name, 0) for name in of[row.frees]), row.frees
        assert (
            row.words(asked, after)[1]
            and not row.words(asked, asked)[1]
            and row.words(asked, after)[0]
            and not row.words(asked, asked)[0]
        )
        assert [other for other in CHANGES if other.words(asked, after)[1]] == [row]


def test_tokens_over_sp_and_tiles_are_offered_where_activations_are_short_and_fit_by_their_own_dry_run():
    asked = gpt(axes={"dp": 2}, options=FINE, rows=4, seq=128, checkpointing=True)
    assert {"--accumulate 2 --mesh sp=2", "--offload-activations cpu"} <= set(offered(asked))
    plans = asked.plans()
    asked = short(asked, plans, int(judge(plans, asked.hardware).held[ACTIVATIONS] * 0.4))
    found = remedies(asked, plans, seconds=math.inf)
    check(asked, found)
    assert any("sp=2" in words for words in said(found)), said(found)
    wide = replace(asked, source=replace(asked.source, hidden=32, context=1024))
    assert "--mlp-tokens 32 --loss-tokens 32" in offered(wide)
    assert not any("sp=" in words for words in offered(replace(asked, seq=127)))  # sp divides the tokens


def test_experts_over_ep_are_offered_and_fit_by_their_own_dry_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    asked = request(axes={"dp": 4}, options={"stage": 2, "precision": "bf16"}, rows=1, seq=32)
    asked = replace(asked, source=source_of(str(tmp_path)))
    assert {"--mesh dp=2,ep=2", "--mesh ep=4"} <= set(offered(asked))
    changed = next(CHANGES[1].offers(asked))
    assert [row.words(asked, changed)[1] for row in CHANGES if row.words(asked, changed)[1]] == [
        'zs.divide_experts over an axis "ep" of 2 ranks'
    ]
    plans = asked.plans()
    asked = short(asked, plans, int(judge(plans, asked.hardware).held[PARAMETERS] * 0.3))
    found = remedies(asked, plans, seconds=math.inf)
    check(asked, found)
    assert any("ep=" in words for words in said(found)), said(found)
    again = replace(asked, axes={"pp": 1, "dp": 2, "tp": 1, "ep": 2})
    assert "--mesh ep=4" in offered(again) and not any("sp=" in words or "tp=" in words for words in offered(again))


def test_nothing_is_offered_that_has_no_effect():
    full = request(options=FINE | dict.fromkeys(("offload_optimizer", "offload_gradient", "offload_param"), "nvme") | {"offload_path": "."},
                   rows=1, checkpointing={"offload": "cpu"})  # fmt: skip
    assert offered(full) == [
        "--accumulate 2 --mesh dp=2,tp=2",
        "--accumulate 4 --mesh tp=4",
        "--ranks 8",
        "--ranks 16",
        "--ranks 32",
        "--ranks 64",
        "--accumulate 2 --mesh dp=2,sp=2",
        "--accumulate 4 --mesh sp=4",
    ]
    alone = offered(request(axes={"dp": 1}))
    assert not any(words.startswith(("--stage 1", "--stage 2", "--stage 3", "--mesh")) for words in alone)
    together = replace(hardware(1 << 30), device=hardware(1 << 30).device, separate=False)
    assert not any("cpu" in words for words in offered(replace(request(), hardware=together)))


def test_what_nodes_keep_can_be_less():
    options = {"stage": 3, "precision": "bf16", "max_unit_numel": 1 << 14}
    shared = request(axes={"dp": 8}, options=options | {"zero_hpz_partition_size": 2}, node_size=2)
    assert {"--quantized-weights int8", "--hpz 1"} <= set(offered(shared))
    packed, plain = (next(each for each in CHANGES[-1].offers(shared) if name in flags(shared, each)) for name in ("int8", "hpz"))
    formulas = module._Formulas(shared, shared.plans())
    used = [formulas.uses(each)[Tier.DEVICE][0] for each in (plain, packed, shared)]
    assert used == sorted(set(used))
    assert {"--shard-size 4", "--shard-size 8"} <= set(
        offered(request(axes={"dp": 8}, options=options | {"shard_size": 2}, node_size=2))
    )
